"""After a model is loaded on a GPU and before its KV cache is sized: choose every layer's paths, compile what they launch.

It runs at the start of vLLM's memory profiling, when weights and slots exist and nothing else does: its scratch is gone again
when vLLM measures, and what stays (the decode workspace, loaded kernels) is measured with the model.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import logging
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from epilora.kernels import lora_decode as decode

from . import gpu_ops, path_table
from .gpu_ops import Call, Mode, Path, batch_of
from .layers import EpiloraLinear, MatchedLinearMethod, layer_kinds
from .path_table import CHAIN, Problem
from .settings import Kind, settings_of

logger = logging.getLogger(__name__)

_reports: list[dict[str, Any]] = []


def reports() -> list[dict[str, Any]]:
    """What `prepare_worker` found and took, one entry a model loaded in this process."""
    return list(_reports)


def batch_sizes(vllm_config: Any) -> tuple[int, int]:
    """(largest captured number of tokens, 0 without graphs; most tokens of a step)."""
    compilation = vllm_config.compilation_config
    mode = getattr(compilation.cudagraph_mode, "name", str(compilation.cudagraph_mode))
    captured = 0
    if mode not in ("NONE", "None") and not vllm_config.model_config.enforce_eager:
        captured = max(compilation.cudagraph_capture_sizes or [0])
    return captured, vllm_config.scheduler_config.max_num_batched_tokens


def call_of(layer: Any) -> Call:
    """A fused layer's arguments with an empty x."""
    base_layer = layer.base_layer
    x = torch.empty(0, base_layer.weight.shape[0], dtype=layer.lora_config.lora_dtype, device=base_layer.weight.device)
    codes = x_scale = None
    settings = layer._epilora_settings
    in_graph = settings.quantise == "graph" and not settings.batch_invariant
    if in_graph and not isinstance(base_layer.quant_method, MatchedLinearMethod):
        codes, x_scale = x.to(torch.float8_e4m3fn), x.new_empty(0, 1, dtype=torch.float32)
    bias = None if getattr(base_layer, "skip_bias_add", False) else base_layer.bias
    if bias is not None and getattr(base_layer, "input_is_parallel", False) and layer.tp_rank > 0:
        bias = None  # a row-parallel layer's first rank adds it
    adapters = layer._epilora_adapters()
    batch = batch_of(adapters[-1])
    return Call(*(x, codes, x_scale, base_layer.weight, base_layer.weight_scale, bias, *adapters, batch))


def problems_of(model: torch.nn.Module) -> list[Problem]:
    """The model's fused layers by shape and mode, up to CHAIN of each."""
    found: dict[tuple[Any, ...], list[Any]] = collections.defaultdict(list)
    for layer in model.modules():
        if isinstance(layer, EpiloraLinear) and layer._epilora_kind is Kind.FUSED:
            call = call_of(layer)
            found[call.key, layer._epilora_mode, call.bias is None].append((layer, call))
    problems = []
    for (_, mode, _), members in found.items():
        meta = members[0][0].punica_wrapper.token_mapping_meta
        calls = tuple(call for _, call in members[:CHAIN])
        problems.append(Problem(calls, Mode.unpack(mode), meta.prepare_tensors))
    return problems


def compile_ahead(problems: list[Problem], sizes: list[int]) -> float:
    """Compile what the timed paths launch, in parallel; seconds.

    CUDA kernels of the decode path, one thread each; Triton kernels, ours and vLLM's, by running every size once, one thread
    for each shape and owner (a compile is mostly a subprocess and code that runs without Python's lock).
    """
    began = time.monotonic()
    tasks = _decode_tasks(problems, sizes)
    for problem in problems:
        problem.set_mapping(torch.zeros(1, dtype=torch.int32, device=problem.calls[0].x.device))
        launched = [(Path.HYBRID, Path.HYBRID_STREAMS), (Path.FUSED,), (Path.VENDOR,)]
        if not _decodes_in_cuda(problem.calls[0]):
            launched.append((Path.DECODE,))
        for paths in launched:
            tasks.append(functools.partial(_run_sizes, problem, sizes, paths))
    if problems[0].calls[0].x.is_cuda:
        with ThreadPoolExecutor(max_workers=16) as pool:
            for done in [pool.submit(task) for task in tasks]:
                done.result()
        torch.cuda.synchronize()
    return time.monotonic() - began


def _run_sizes(problem: Problem, sizes: list[int], paths: tuple[Path, ...]) -> None:
    """Run one layer of a shape at every size by those of `paths` that could be chosen, on a stream of its own."""
    device = problem.calls[0].x.device
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.default_stream(device))
    with torch.inference_mode(), torch.cuda.device(device), torch.cuda.stream(stream):
        for M in sizes:
            call = problem.at(M)[0]
            for path in path_table.worth_timing(call, problem.mode):
                if path in paths:
                    with contextlib.suppress(*path_table.CANNOT_RUN):  # timing meets it again, and says so
                        gpu_ops.execute(path, call, problem.mode)
        stream.synchronize()


def _decodes_in_cuda(call: Call) -> bool:
    """Whether the decode path of a layer is CUDA C++; elsewhere it is Triton kernels, which running compiles."""
    return call.lora_a[0].dtype != torch.uint8 and not decode.supports_cuda(call.x.device)


def _decode_tasks(problems: list[Problem], sizes: list[int]) -> list[Callable[[], Any]]:
    """One task for each shape and size that the decode path may run."""
    tasks: list[Callable[[], Any]] = []
    for problem in problems:
        call = problem.calls[0]
        if not _decodes_in_cuda(call):
            continue
        L, _, R, K = call.lora_a[0].shape
        for M in [M for M in sizes if M <= decode.MAX_TOKENS and not problem.mode.matched]:
            tasks.append(
                functools.partial(
                    decode.compile_kernels, M, [b.shape[-2] for b in call.lora_b], K, R, L, device=call.x.device,
                    fp16=call.x.dtype == torch.float16, fp8_adapters=bool(call.a_scales),
                )
            )  # fmt: skip
    return tasks


def _run_beside(model: torch.nn.Module, sizes: list[int]) -> int:
    """Run the adapter kernels of layers whose base is vLLM's once a shape and size; how many such layers there are."""
    done: set[tuple[Any, ...]] = set()
    count = 0
    for layer in model.modules():
        if not isinstance(layer, EpiloraLinear) or layer._epilora_kind is not Kind.BESIDE:
            continue
        count += 1
        a, b, *rest = layer._epilora_adapters()
        key = (*a[0].shape, *[part.shape[-2] for part in b])
        if key in done:
            continue
        done.add(key)
        meta = layer.punica_wrapper.token_mapping_meta  # type: ignore[attr-defined]
        for M in sizes:
            meta.prepare_tensors(torch.zeros(M, dtype=torch.int32, device=a[0].device))
            x = torch.zeros(M, a[0].shape[-1], dtype=layer.lora_config.lora_dtype, device=a[0].device)  # type: ignore[attr-defined]
            y = x.new_zeros(M, sum(part.shape[-2] for part in b))
            torch.ops.epilora.lora_add_(y, x, a, b, *rest, layer._epilora_mode)
    return count


@torch.inference_mode()
def prepare_model(model: torch.nn.Module, vllm_config: Any, share: Any = lambda value: value) -> dict[str, Any]:
    """Choose paths and warm kernels up for a loaded model. share: see `path_table.prepare`. Returns and keeps a report."""
    settings = settings_of(vllm_config)
    problems = problems_of(model)
    captured, most = batch_sizes(vllm_config)
    graphs, eager = path_table.token_counts(captured, most)
    kinds = layer_kinds(model)
    report: dict[str, Any] = {
        "kinds": dict(collections.Counter(kind for kind, _ in kinds.values())),
        "reasons": dict(collections.Counter(reason for _, reason in kinds.values() if reason)),
    }
    began = time.monotonic()
    if problems:
        report["compiled_s"] = compile_ahead(problems, [*graphs, *eager])
        timed = settings.timed and settings.path in ("auto", "op") and not settings.batch_invariant
        timed = timed and not problems[0].mode.matched
        timed = timed and problems[0].calls[0].x.is_cuda
        report |= path_table.prepare(problems, graphs, eager, timed=timed, share=share)
        report["choices"] = {
            "x".join(map(str, problem.key)): path_table.current().choices.get(problem.key, []) for problem in problems
        }
    report["beside_layers"] = _run_beside(model, [*graphs, *eager])
    report["total_s"] = time.monotonic() - began
    logger.info(
        "EpiLoRA layers: %s; reasons: %s; ready in %.1f s", report["kinds"], report["reasons"], report["total_s"]
    )
    _reports.append(report)
    return report


def prepare_worker(worker: Any) -> None:
    """`prepare_model` for a vLLM worker's model; ranks take the first rank's table."""
    from vllm.distributed import get_tp_group

    group = get_tp_group()
    prepare_model(
        worker.model_runner.get_model(), worker.vllm_config, lambda value: group.broadcast_object(value, src=0)
    )


def hook_worker() -> None:
    """Put `prepare_worker` before the memory profiling of this process' GPU worker class, once.

    Called when LoRA modules are made: the worker's module is loaded then, and importing it any earlier would cost every
    other process of the engine.
    """
    module = sys.modules.get("vllm.v1.worker.gpu_worker")
    worker_class = getattr(module, "Worker", None)
    stock = getattr(worker_class, "determine_available_memory", None)
    if worker_class is None or stock is None:
        logger.warning("EpiLoRA: vLLM's GPU worker was not found; paths keep their defaults and are not timed")
        return
    if getattr(stock, "_epilora", False):
        return

    @functools.wraps(stock)
    def determine_available_memory(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(self.vllm_config, "lora_config", None) is not None:
            prepare_worker(self)
        return stock(self, *args, **kwargs)

    determine_available_memory._epilora = True  # type: ignore[attr-defined]
    worker_class.determine_available_memory = determine_available_memory
