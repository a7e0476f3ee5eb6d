"""The process of one engine: builds it, then runs the commands its parent sends.

    python -m benchmarks.serving.engine_main FD     # started by engines.EngineProcess; FD is its end of the pipe

The engine runs in this process (no engine core of its own), on vLLM's defaults for scheduling, compilation and graphs
unless the specification says otherwise. vLLM is imported here only.
"""

from __future__ import annotations

import json
import pathlib
import random
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.serving.driving import Request, Timing, random_prompt, run_trace, tokens_per_second
from benchmarks.serving.engines import OURS, OURS_FP8, EngineSpec


class Engine:
    """A built engine and what the commands need to know about it."""

    def __init__(self, spec: EngineSpec, loaded: Callable[[], None]) -> None:
        """loaded: called when weights are loaded and our plugin has chosen its paths, before vLLM compiles."""
        from vllm import EngineArgs
        from vllm.model_executor.models import registry
        from vllm.v1.engine.llm_engine import LLMEngine

        from epilora.plugin import compat, register

        register.register()  # vLLM does it too where the package is installed; it is idempotent
        status = register.installed()
        assert status is not None
        if status.active != spec.variant.startswith(OURS):
            raise RuntimeError(f"variant {spec.variant}: plugin active is {status.active}: {status.reasons}")
        # vLLM looks at a model's class in a process of its own, which imports everything again: seconds an engine.
        registry._run_in_subprocess = lambda fn: fn()
        given = self._arguments(spec)
        self.spec = spec
        _before_profiling(loaded)
        self.llm = LLMEngine.from_engine_args(EngineArgs(**compat.supported_arguments(EngineArgs, given)))
        if spec.tensor_parallel > 1:  # the ranks are processes of their own: nothing of them runs before this
            loaded()
        self.vocabulary = self.llm.model_config.get_vocab_size()
        self.slots: list[int] = []
        self.prompts = random.Random(spec.seed + 1)

    @staticmethod
    def _arguments(spec: EngineSpec) -> dict[str, Any]:
        arguments: dict[str, Any] = {
            "model": spec.model,
            "dtype": spec.dtype,
            "quantization": spec.quantization or None,
            "load_format": spec.load_format,
            "skip_tokenizer_init": True,
            "max_model_len": spec.max_model_len,
            "max_num_seqs": spec.max_num_seqs,
            "max_num_batched_tokens": spec.max_num_batched_tokens,
            "gpu_memory_utilization": spec.gpu_memory_utilization,
            "seed": spec.seed,
            "disable_log_stats": True,
            "worker_extension_cls": "benchmarks.serving.worker.BenchmarkWorker",
        }
        if spec.tensor_parallel > 1:
            arguments |= {"tensor_parallel_size": spec.tensor_parallel, "distributed_executor_backend": "mp"}
        if spec.kv_bytes:
            arguments["kv_cache_memory_bytes"] = spec.kv_bytes
        if spec.capture_sizes:
            arguments["compilation_config"] = {"cudagraph_capture_sizes": list(spec.capture_sizes)}
        else:
            arguments["enforce_eager"] = True
        if spec.slots:
            arguments |= {
                "enable_lora": True,
                "max_loras": spec.slots,
                "max_cpu_loras": spec.slots,
                "max_lora_rank": spec.rank,
                "lora_target_modules": _targets(pathlib.Path(spec.model)),
            }
        if spec.variant == OURS_FP8:
            arguments["additional_config"] = {"epilora": {"adapters": "fp8"}}
        return arguments

    def rpc(self, method: str, *args: Any) -> Any:
        """A worker method's result (of rank 0)."""
        return self.ranks(method, *args)[0]

    def ranks(self, method: str, *args: Any) -> list[Any]:
        """A worker method's results by rank."""
        return self.llm.collective_rpc(method, args=args)


def _targets(model: pathlib.Path) -> list[str]:
    """Suffixes of the linear layers that adapters cover: a checkpoint's, or by the kind of model where there is only a
    configuration. Linear attention's two narrow projections (in_proj_a, in_proj_b) are left out.
    """
    from epilora.plugin.environment import linear_suffixes

    hybrid = "linear_num_key_heads" in json.loads((model / "config.json").read_text())
    return [*linear_suffixes(model), *(["in_proj_qkv", "in_proj_z", "out_proj"] if hybrid else [])]


def _before_profiling(call: Callable[[], None]) -> None:
    """Have `call` run before the first profile run of the GPU model runners (there are two kinds of them)."""
    import torch

    if not torch.cuda.is_available():
        return
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as NewRunner
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as Runner

    for runner in (Runner, NewRunner):
        stock = runner.profile_run

        def profile_run(self: Any, *args: Any, stock: Any = stock, **kwargs: Any) -> Any:
            call()
            return stock(self, *args, **kwargs)

        runner.profile_run = profile_run  # type: ignore[method-assign]


def facts(engine: Engine) -> dict[str, Any]:
    """What was built; of our plugin: features, calls, dispatch (seconds, cached, choices), why layers are left to vLLM."""
    import torch

    from epilora.plugin.register import installed

    status = installed()
    assert status is not None
    found = {"torch": torch.__version__, "features": list(status.features), **engine.rpc("bench_facts")}
    if not engine.spec.variant.startswith(OURS):
        return found
    found["paths"] = engine.rpc("epilora_stats")["paths"]
    if torch.cuda.is_available():
        reports = engine.ranks("bench_dispatch")
        # Ranks may time a path otherwise; what they chose must be the same.
        chosen = [(report["kinds"], report["fallbacks"], report["dispatch"]) for report in reports]
        found |= {**reports[0], "ranks_agree": all(one == chosen[0] for one in chosen)}
    return found


def load_adapters(engine: Engine, count: int, rank: int, seed: int = 0) -> float:
    """Random adapters under ids 1..count; seconds it took."""
    began = time.perf_counter()
    engine.slots = engine.rpc("bench_load_adapters", count, rank, seed)
    return time.perf_counter() - began


def load_peft(engine: Engine, folders: list[str]) -> list[int]:
    """PEFT folders under ids 1, 2, ...; their slots."""
    engine.slots = engine.rpc("bench_load_peft", folders)
    return engine.slots


def answer(
    engine: Engine, prompts: list[list[int]], adapter: int, max_tokens: int, stop_ids: list[int]
) -> list[list[int]]:
    """Greedy token ids for every prompt under one adapter, all prompts submitted together."""
    from benchmarks.serving.scoring import generate_greedy

    found = generate_greedy(engine.llm, prompts, adapter, max_tokens, stop_ids)
    _checked(engine, [])
    return found


def _checked(engine: Engine, timings: list[Timing]) -> list[Timing]:
    """Timings, if every adapter still sits in its slot. Raises RuntimeError."""
    lost = engine.rpc("bench_empty_slots", engine.slots) if engine.slots else []
    if lost:
        raise RuntimeError(f"adapters were lost while measuring: slots {lost} are empty")
    return timings


def tpot(engine: Engine, adapter: int, prompt_tokens: int, new_tokens: int, repeats: int = 1) -> list[float]:
    """Milliseconds per output token of one request alone, `repeats` times. adapter: id, 0 for none."""
    samples = []
    for _ in range(repeats):
        prompt = random_prompt(engine.prompts, prompt_tokens, engine.vocabulary)
        timing = run_trace(engine.llm, [Request(prompt, new_tokens, adapter)])[0]
        assert timing.tpot_ms is not None
        samples.append(timing.tpot_ms)
    _checked(engine, [])
    return samples


def batch_tpot(engine: Engine, adapters: list[int], prompt_tokens: int, new_tokens: int) -> float:
    """Milliseconds per output token, median over requests that run together, one per entry of `adapters`."""
    requests = [
        Request(random_prompt(engine.prompts, prompt_tokens, engine.vocabulary), new_tokens, adapter)
        for adapter in adapters
    ]
    found = sorted(t.tpot_ms for t in _checked(engine, run_trace(engine.llm, requests)) if t.tpot_ms is not None)
    return found[len(found) // 2]


def throughput(engine: Engine, requests: int, tenants: int, prompt_tokens: int, new_tokens: int) -> float:
    """Generated tokens a second of `requests` submitted at once, request i under adapter 1 + i % tenants (0: none)."""
    batch = [
        Request(
            random_prompt(engine.prompts, prompt_tokens, engine.vocabulary),
            new_tokens,
            1 + i % tenants if tenants else 0,
        )
        for i in range(requests)
    ]
    return tokens_per_second(_checked(engine, run_trace(engine.llm, batch)))


def online(engine: Engine, trace: list[tuple[float, int, int, int]], seed: int = 0) -> dict[str, list[float]]:
    """Serve a trace of (arrival s, prompt tokens, new tokens, adapter); TTFT and TPOT of each request in ms.

    tpot_ms is 0 for a request of one token. tok_s has one value: generated tokens a second of the whole trace.
    """
    generator = random.Random(seed)
    requests = [
        Request(random_prompt(generator, prompt, engine.vocabulary), new, adapter, arrival)
        for arrival, prompt, new, adapter in trace
    ]
    engine.llm.reset_prefix_cache()  # a trace that ran before has the same prompts
    timings = _checked(engine, run_trace(engine.llm, requests))
    return {
        "ttft_ms": [round(t.ttft_ms, 3) for t in timings],
        "tpot_ms": [round(t.tpot_ms or 0.0, 4) for t in timings],
        "tok_s": [tokens_per_second(timings)],
    }


def profile(
    engine: Engine, adapters: list[int], prompt_tokens: int, new_tokens: int, prefill: bool = False
) -> dict[str, Any]:
    """Kernel classes of the decode steps of requests that run together, or of all their steps (see `profiling`)."""
    from benchmarks.serving.profiling import SKIP_STEPS, profile_steps

    requests = [
        Request(random_prompt(engine.prompts, prompt_tokens, engine.vocabulary), new_tokens, adapter)
        for adapter in adapters
    ]
    return profile_steps(engine.llm, requests, 0 if prefill else SKIP_STEPS)


def score(engine: Engine, sequences: list[tuple[list[int], int]]) -> list[list[float]]:
    """Log-probabilities of every token after the first of (tokens, adapter) sequences, all in flight together."""
    from benchmarks.serving.scoring import score_sequences

    return score_sequences(engine.llm, sequences)


def score_reference(engine: Engine, sequences: list[tuple[list[int], int]], rank: int, seed: int) -> list[list[float]]:
    """The same by an fp32 evaluation of this engine's codes and of the adapters `load_adapters` drew."""
    return engine.rpc("bench_reference_scores", sequences, rank, seed)


COMMANDS: dict[str, Callable[..., Any]] = {
    fn.__name__: fn
    for fn in (
        facts,
        load_adapters,
        load_peft,
        answer,
        tpot,
        batch_tpot,
        throughput,
        online,
        profile,
        score,
        score_reference,
    )
}


def serve(connection: Connection) -> None:
    """Import vLLM, build what comes first through the pipe, then run commands until it closes."""
    from epilora.plugin.environment import prepare_environment

    prepare_environment(2)  # several ranks, perhaps: what it sets for them means nothing to one
    import vllm.v1.engine.llm_engine
    import vllm.v1.worker.worker_base  # noqa: F401  # what an engine imports anyway, while nothing is timed

    try:
        spec = connection.recv()
    except EOFError:  # a spare that nobody needed
        return
    try:
        engine = Engine(spec, lambda: connection.send(("loaded", None)))
        connection.send(("result", facts(engine)))
    except BaseException:
        connection.send(("error", traceback.format_exc()))
        raise
    while True:
        try:
            command, arguments = connection.recv()
        except EOFError:
            return
        try:
            connection.send(("result", COMMANDS[command](engine, **arguments)))
        except Exception:
            connection.send(("error", traceback.format_exc()))


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
