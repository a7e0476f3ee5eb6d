"""Check the plugin's GPU paths on the GPU that is there: numbers against fp32, equality with stock, graphs, first times.

    python -m benchmarks.plugin_check op        operators alone: every path against fp64, replays with changed slots, dispatch
    python -m benchmarks.plugin_check engine auto    a 4-layer Qwen3 of an 8B's widths; another path: hybrid, stock, ...
    python -m benchmarks.plugin_check compare auto   what that engine said against what `engine stock` did

Prints one line a finding and a last line PASS or FAIL; writes what it measured to $OUT/plugin_*.json where OUT is set.
Random weights and adapters: everything about arithmetic and time, nothing about quality.
"""

from __future__ import annotations

import json
import os
import pathlib
import statistics
import sys
import tempfile
import time
from typing import Any

import torch

SHAPES = {
    "qkv": (4096, (4096, 1024, 1024)),
    "o": (4096, (4096,)),
    "gate_up": (4096, (12288, 12288)),
    "down": (12288, (4096,)),
}
SLOTS, RANK = 32, 64
found: dict[str, Any] = {}
failures: list[str] = []


def say(name: str, value: Any, ok: bool = True) -> None:
    """Print and keep a finding; a false `ok` makes the run fail."""
    found[name] = value
    if not ok:
        failures.append(name)
    print(f"{'' if ok else 'WRONG '}{name}: {value}", flush=True)
    out = os.environ.get("OUT")
    if out:
        pathlib.Path(out, f"plugin_{'_'.join(sys.argv[1:3])}.json").write_text(json.dumps(found, default=str))


# ---- operators alone --------------------------------------------------------------------------------------------------


def call_of(shape: str, M: int, slots: list[int], meta: Any, *, bias: bool = False, fp8: bool = False) -> Any:
    """A projection's arguments with random tensors on the GPU, codes made by vLLM's kernel."""
    from epilora.plugin.gpu_ops import Call, batch_of, quantise, register_batch
    from epilora.quant.reference import quantize_rows_ref

    K, widths = SHAPES[shape]
    N = sum(widths)
    weight = (torch.randn(N, K, device="cuda") * 100).clamp(-448, 448).to(torch.float8_e4m3fn).t()
    scale = torch.rand(N, 1, device="cuda") * 1e-4 + 1.5e-4
    x = torch.randn(M, K, device="cuda", dtype=torch.bfloat16)
    a = [torch.randn(SLOTS, 1, RANK, K, device="cuda", dtype=torch.bfloat16) * 0.02 for _ in widths]
    b = [torch.randn(SLOTS, 1, n, RANK, device="cuda", dtype=torch.bfloat16) * 0.1 for n in widths]
    scales: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    if fp8:
        stored = [[quantize_rows_ref(s.squeeze(1)) for s in side] for side in (a, b)]
        a, b = ([o.values.unsqueeze(1) for o in side] for side in stored)
        scales = tuple([o.scales for o in side] for side in stored)  # type: ignore[assignment]
    meta.prepare_tensors(torch.tensor(slots, dtype=torch.int32, device="cuda"))
    bias_N = torch.randn(N, device="cuda", dtype=torch.bfloat16) if bias else None
    mapping = register_batch(meta)
    return Call(x, *quantise(x), weight, scale, bias_N, a, b, *scales, mapping, batch_of(mapping))


def exact(call: Any, slots: list[int]) -> torch.Tensor:
    """The projection in fp32 on the stored values."""
    from epilora.quant.reference import dequantize

    assert call.codes is not None
    y = (call.codes.float() * call.x_scale) @ dequantize(call.base()).t()
    if call.bias is not None:
        y += call.bias.float()
    a, b = ([dequantize(o) for o in side] for side in call.adapters())
    for slot in set(slots) - {-1}:
        rows = torch.tensor([i for i, s in enumerate(slots) if s == slot], device="cuda")
        x = call.x[rows].float()
        y[rows] += torch.cat(
            [(x @ a_LRK[slot].t()) @ b_LNR[slot].t() for a_LRK, b_LNR in zip(a, b, strict=True)], dim=1
        )
    return y


def rms(y: torch.Tensor, want: torch.Tensor) -> float:
    return float((y.float() - want).norm() / want.norm())


def arguments(call: Any) -> list[Any]:
    return [getattr(call, name) for name in call.__slots__ if name != "batch"]


def check_operators() -> None:
    """Every path, several mappings, eagerly and on replays whose slots changed."""
    from vllm.lora.ops.triton_ops import LoRAKernelMeta

    from epilora.plugin import gpu_ops
    from epilora.plugin.gpu_ops import PATHS, Mode, Path

    torch.backends.cuda.matmul.allow_tf32 = False
    meta = LoRAKernelMeta.make(SLOTS, 8192, "cuda")
    for K, widths in SHAPES.values():
        gpu_ops.scratch(torch.device("cuda", 0)).announce(K, len(widths), RANK)
    mixes = {
        "one": lambda M: [5] * M,
        "mixed": lambda M: [(7 * i) % 6 - 1 for i in range(M)],
        "distinct": lambda M: [i % SLOTS for i in range(M)],
    }
    worst: dict[str, float] = {}
    for shape in SHAPES:
        for M in (1, 7, 32, 512):
            for mix, slots_of in mixes.items():
                slots = slots_of(M)
                call = call_of(shape, M, slots, meta, bias=shape == "o")
                want = exact(call, slots)
                for path in gpu_ops.candidates(call, Mode()):
                    mode = Mode(forced=PATHS.index(path) + 1).pack()
                    y = torch.ops.epilora.lora_linear(*arguments(call), mode)
                    error = rms(y, want)
                    worst[path.value] = max(worst.get(path.value, 0.0), error)
                    if not error < 6e-3:
                        say(f"{shape} M={M} {mix} {path.value} error", error, ok=False)
                matched = torch.ops.epilora.lora_linear(*arguments(call), Mode(matched=1).pack())
                worst["matched"] = max(worst.get("matched", 0.0), rms(matched, want))
    vendor = worst["vendor"]
    say("worst rms error against fp32 by path", worst)
    say("no path is less exact than vLLM's", all(e <= 1.05 * vendor for p, e in worst.items() if p != "matched"))

    call = call_of("qkv", 32, [-1] * 32, meta)
    y = torch.ops.epilora.lora_linear(*arguments(call), Mode().pack())
    say(
        "no adapters: bits of the vendor GEMM",
        torch.equal(y, gpu_ops.vendor_gemm(0, call)),
        ok=torch.equal(y, gpu_ops.vendor_gemm(0, call)),
    )

    fp8 = call_of("gate_up", 16, mixes["mixed"](16), meta, fp8=True)
    for path in (Path.DECODE, Path.HYBRID):
        y = torch.ops.epilora.lora_linear(*arguments(fp8), Mode(forced=PATHS.index(path) + 1).pack())
        error = rms(y, exact(fp8, mixes["mixed"](16)))
        say(f"fp8 slots, {path.value}: rms error", error, ok=error < 6e-3)

    for path in PATHS:
        M = 32
        call = call_of("qkv", M, mixes["distinct"](M), meta)
        mode = (Mode(matched=1) if path is Path.MATCHED else Mode(forced=PATHS.index(path) + 1)).pack()
        for _ in range(2):
            torch.ops.epilora.lora_linear(*arguments(call), mode)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = torch.ops.epilora.lora_linear(*arguments(call), mode)
        errors = []
        for slots in (mixes["one"](M), mixes["mixed"](20), [-1] * M, [3] + [-1] * 9, mixes["distinct"](M)):
            meta.prepare_tensors(torch.tensor(slots, dtype=torch.int32, device="cuda"))
            y.fill_(float("nan"))
            graph.replay()
            torch.cuda.synchronize()
            want = exact(call, slots + [-1] * (M - len(slots)))
            errors.append(rms(y[: len(slots)], want[: len(slots)]))
        limit = 3e-2 if path is Path.MATCHED else 6e-3  # matched does not round activations, the reference does
        say(f"replays with other slots, {path.value}", [f"{e:.1e}" for e in errors], ok=max(errors) < limit)


def check_dispatch() -> None:
    """The table of an 8B's four shapes, cold, and what eager calls cost the host."""
    from vllm.lora.ops.triton_ops import LoRAKernelMeta

    from epilora.plugin import gpu_load, gpu_ops, path_table
    from epilora.plugin.gpu_ops import Mode, Path

    meta = LoRAKernelMeta.make(SLOTS, 8192, "cuda")
    problems = []
    for shape in SHAPES:
        gpu_ops.scratch(torch.device("cuda", 0)).announce(SHAPES[shape][0], 3, RANK)
        calls = tuple(call_of(shape, 1, [0], meta) for _ in range(4))
        problems.append(path_table.Problem(calls, Mode(), meta.prepare_tensors))
    graphs, eager = path_table.token_counts(512, 8192)
    ahead = gpu_load.compile_ahead(problems, [*graphs, *eager])
    began = time.monotonic()
    table = path_table.time_paths(problems, graphs, eager, budget_s=60)
    say("dispatch: seconds to compile ahead, to time", [round(ahead, 1), round(time.monotonic() - began, 1)])
    path_table.install(table)
    for shape, problem in zip(SHAPES, problems, strict=True):
        for M, times in table.times_us[problem.key].items():
            print(
                shape, M, {p: [round(t, 1) for t in ts] for p, ts in times.items()}, dict(table.choices[problem.key])[M]
            )
    found["times_us"] = {"x".join(map(str, key)): times for key, times in table.times_us.items()}
    call = problems[0].at(1024)[0]
    for path in (Path.HYBRID, Path.HYBRID_STREAMS, Path.VENDOR):
        gpu_ops.execute(path, call, Mode())
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(50):
            gpu_ops.execute(path, call, Mode())
        host = (time.perf_counter() - began) / 50 * 1e6
        torch.cuda.synchronize()
        say(f"host us a call, qkv 1,024 tokens, {path.value}", round(host, 1))


# ---- a small engine ---------------------------------------------------------------------------------------------------

LAYERS, HIDDEN, HEADS, KV, HEAD_DIM, FFN, VOCAB = 4, 4096, 32, 8, 128, 12288, 4096


def make_model(folder: pathlib.Path) -> None:
    """A random Qwen3 of an 8B's widths, weights of unit gain."""
    from safetensors.torch import save_file

    g = torch.Generator("cuda").manual_seed(0)

    def rand(*size: int, gain: float = 1.0) -> torch.Tensor:
        return (torch.randn(*size, generator=g, device="cuda") * gain / size[-1] ** 0.5).to(torch.bfloat16).cpu()

    tensors = {
        "model.embed_tokens.weight": rand(VOCAB, HIDDEN, gain=64.0),
        "lm_head.weight": rand(VOCAB, HIDDEN, gain=2.0),
    }
    tensors["model.norm.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
    for i in range(LAYERS):
        at = f"model.layers.{i}"
        for name, n, k in (
            ("self_attn.q_proj", HEADS * HEAD_DIM, HIDDEN), ("self_attn.k_proj", KV * HEAD_DIM, HIDDEN),
            ("self_attn.v_proj", KV * HEAD_DIM, HIDDEN), ("self_attn.o_proj", HIDDEN, HEADS * HEAD_DIM),
            ("mlp.gate_proj", FFN, HIDDEN), ("mlp.up_proj", FFN, HIDDEN), ("mlp.down_proj", HIDDEN, FFN),
        ):  # fmt: skip
            tensors[f"{at}.{name}.weight"] = rand(n, k)
        for name, width in (("self_attn.q_norm", HEAD_DIM), ("self_attn.k_norm", HEAD_DIM), ("input_layernorm", HIDDEN),
                            ("post_attention_layernorm", HIDDEN)):  # fmt: skip
            tensors[f"{at}.{name}.weight"] = torch.ones(width, dtype=torch.bfloat16)
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": VOCAB, "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "head_dim": HEAD_DIM, "num_key_value_heads": KV,
        "intermediate_size": FFN, "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "attention_bias": False,
        "max_position_embeddings": 4096, "tie_word_embeddings": False, "eos_token_id": 1, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


def make_adapter(folder: pathlib.Path, seed: int, rank: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Write a PEFT adapter whose delta is about a third of the base's output; {module: (A, B with the scaling in it)}."""
    from safetensors.torch import save_file

    g = torch.Generator("cuda").manual_seed(seed)
    folder.mkdir(parents=True, exist_ok=True)
    tensors, folded = {}, {}
    for i in range(LAYERS):
        for part, names in (
            ("self_attn", ("q_proj", "k_proj", "v_proj", "o_proj")),
            ("mlp", ("gate_proj", "up_proj", "down_proj")),
        ):
            for name in names:
                k = FFN if name == "down_proj" else HIDDEN
                n = {"k_proj": KV * HEAD_DIM, "v_proj": KV * HEAD_DIM, "gate_proj": FFN, "up_proj": FFN}.get(
                    name, HIDDEN
                )
                a = (torch.randn(rank, k, generator=g, device="cuda") / k**0.5).to(torch.bfloat16)
                b = (torch.randn(n, rank, generator=g, device="cuda") * 0.15 / rank**0.5).to(torch.bfloat16)
                module = f"model.layers.{i}.{part}.{name}"
                tensors[f"base_model.model.{module}.lora_A.weight"] = a.cpu()
                tensors[f"base_model.model.{module}.lora_B.weight"] = b.cpu()
                folded[module] = (a, b * 2.0)
    save_file(tensors, str(folder / "adapter_model.safetensors"))
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    (folder / "adapter_config.json").write_text(
        json.dumps(
            {
                "peft_type": "LORA",
                "r": rank,
                "lora_alpha": 2 * rank,
                "target_modules": targets,
                "bias": "none",
                "task_type": "CAUSAL_LM",
            }
        )
    )
    return folded


class Reference:
    """The model in fp32 on the engine's codes, activations not rounded, with one adapter or none."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.weights: dict[str, torch.Tensor] = {}
        for name, module in model.named_modules():
            weight, plain = getattr(module, "weight", None), name.replace(".base_layer", "")
            if not isinstance(weight, torch.Tensor) or hasattr(module, "base_layer"):
                continue  # a LoRA layer names its base's weight
            if weight.dtype == torch.float8_e4m3fn:
                self.weights[plain] = weight.t().float() * module.weight_scale.float().reshape(-1, 1)
            else:
                self.weights.setdefault(plain, weight.float())

    def linear(self, x: torch.Tensor, at: str, packed: str, parts: tuple[str, ...], adapter: dict) -> torch.Tensor:
        y = x @ self.weights[f"{at}.{packed}"].t()
        if adapter:
            pairs = [adapter[f"{at}.{part}"] for part in parts]
            y = y + torch.cat([(x @ a.float().t()) @ b.float().t() for a, b in pairs], dim=-1)
        return y

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weights[name]

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        half = HEAD_DIM // 2
        positions = torch.arange(x.shape[0], device=x.device).float()[:, None]
        angle = positions / 10000.0 ** (torch.arange(half, device=x.device).float() * 2 / HEAD_DIM)
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        one, two = x[..., :half], x[..., half:]
        return torch.cat([one * cos - two * sin, two * cos + one * sin], dim=-1)

    def logprobs(self, prompt: list[int], completion: list[int], adapter: dict) -> torch.Tensor:
        tokens = torch.tensor([*prompt, *completion], device="cuda")
        x = self.weights["model.embed_tokens"][tokens]
        for i in range(LAYERS):
            at = f"model.layers.{i}"
            h = self.norm(x, f"{at}.input_layernorm")
            qkv = self.linear(h, f"{at}.self_attn", "qkv_proj", ("q_proj", "k_proj", "v_proj"), adapter)
            q, k, v = (
                t.reshape(len(tokens), -1, HEAD_DIM)
                for t in qkv.split([HEADS * HEAD_DIM, KV * HEAD_DIM, KV * HEAD_DIM], -1)
            )
            q = self.rotate(self.norm(q, f"{at}.self_attn.q_norm"))
            k = self.rotate(self.norm(k, f"{at}.self_attn.k_norm"))
            heads = [t.transpose(0, 1)[None] for t in (q, k, v)]
            out = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
            out = out[0].transpose(0, 1).reshape(len(tokens), -1)
            x = x + self.linear(out, f"{at}.self_attn", "o_proj", ("o_proj",), adapter)
            h = self.norm(x, f"{at}.post_attention_layernorm")
            gate, up = self.linear(h, f"{at}.mlp", "gate_up_proj", ("gate_proj", "up_proj"), adapter).split(FFN, -1)
            x = x + self.linear(torch.nn.functional.silu(gate) * up, f"{at}.mlp", "down_proj", ("down_proj",), adapter)
        logits = self.norm(x[len(prompt) - 1 : -1], "model.norm") @ self.weights["lm_head"].t()
        return logits.log_softmax(-1).gather(1, tokens[len(prompt) :, None]).flatten()


def run_engine(path: str, model: str, adapters: list[str]) -> dict[str, Any]:
    """Start an engine, answer the same batches, time its graphs; what it said and took."""
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    began = time.monotonic()
    llm = LLM(
        model=model, skip_tokenizer_init=True, quantization="fp8_per_channel", enable_lora=True, max_loras=4, max_cpu_loras=8,
        max_lora_rank=RANK, max_model_len=1024, max_num_seqs=64, max_num_batched_tokens=512, kv_cache_memory_bytes=2 << 30,
        compilation_config={"cudagraph_capture_sizes": [1, 8, 32, 64]}, seed=0,
        additional_config={"epilora": {"path": path}}, lora_dtype="bfloat16",
    )  # fmt: skip
    result: dict[str, Any] = {"start_s": round(time.monotonic() - began, 1)}
    worker = llm.llm_engine.model_executor.driver_worker.worker
    runner = worker.model_runner
    result["model"] = runner.get_model()
    result["runner"] = type(runner).__module__
    from epilora.plugin.layers import layer_kinds

    kinds = layer_kinds(result["model"])
    result["kinds"] = {kind: sum(k == kind for k, _ in kinds.values()) for kind, _ in kinds.values()}
    result["reasons"] = sorted({reason for _, reason in kinds.values()})
    greedy = SamplingParams(temperature=0.0, max_tokens=24, logprobs=0, ignore_eos=True, detokenize=False)

    def ask(who: list[int | None], length: Any) -> list[tuple[list[int], list[int], list[float]]]:
        prompts = [
            {"prompt_token_ids": [(37 * i + 11 * j * j) % VOCAB for j in range(length(i))]} for i in range(len(who))
        ]
        requests = [None if w is None else LoRARequest(f"a{w}", w + 1, adapters[w]) for w in who]
        done = llm.generate(prompts, greedy, lora_request=requests, use_tqdm=False)
        return [
            (p["prompt_token_ids"], list(o.outputs[0].token_ids), [next(iter(d.values())).logprob for d in o.outputs[0].logprobs])
            for p, o in zip(prompts, done, strict=True)
        ]  # fmt: skip

    result["base"] = ask([None] * 12, lambda i: 20 + 15 * i)
    result["who"] = [None, 0, 1, 0, 2, None, 3, 1, 2, None, 0, 3]
    result["mixed"] = ask(result["who"], lambda i: 20 + 15 * i)
    result["who2"] = [4, None, 4, 0, 1, 2, 3, 0]  # a fifth adapter: a slot changes hands
    result["evicted"] = ask(result["who2"], lambda i: 30 + 9 * i)
    result["who3"] = [0] * 3
    result["single"] = ask(result["who3"], lambda i: 40)
    llm.generate(
        [{"prompt_token_ids": [1, 2, 3]}], greedy, lora_request=LoRARequest("a0", 1, adapters[0]), use_tqdm=False
    )
    manager = getattr(runner, "cudagraph_manager", None)
    for desc, graph in (getattr(manager, "graphs", None) or {}).items():
        times = []
        for _ in range(40):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3)
        name = f"{desc.num_tokens} tokens, {desc.num_active_loras} adapters"
        result.setdefault("graphs_us", {})[name] = [round(min(times), 1), round(statistics.median(times), 1)]
    from epilora.plugin.counters import CALLS

    result["calls"] = dict(CALLS)
    CALLS.clear()
    result["llm"] = llm
    return result


ROOT = pathlib.Path(tempfile.gettempdir()) / "epilora_plugin_check"
RANKS = (64, 16, 8, 64, 32)


def check_engine(path: str) -> None:
    """One engine with `path`; what it said goes to a file for `compare`."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from epilora.plugin import gpu_load, register

    register.register()
    say("installed", register.installed())
    if not (ROOT / "model" / "config.json").exists():
        (ROOT / "model").mkdir(parents=True)
        make_model(ROOT / "model")
    folded = [make_adapter(ROOT / path / f"a{i}", i + 1, rank) for i, rank in enumerate(RANKS)]
    result = run_engine(path, str(ROOT / "model"), [str(ROOT / path / f"a{i}") for i in range(len(RANKS))])
    for key in ("start_s", "runner", "kinds", "reasons", "graphs_us", "calls"):
        say(f"{path} {key}", result.get(key))
    for report in gpu_load.reports():
        say(f"{path} load report", report)
    with torch.inference_mode():
        reference = Reference(result.pop("model"))
        whole = {"base": [None] * 12, "mixed": result["who"], "evicted": result["who2"], "single": result["who3"]}
        for batch, who in whole.items():
            deltas = [
                (
                    torch.tensor(logprobs, device="cuda")
                    - reference.logprobs(prompt, tokens, {} if w is None else folded[w])
                ).abs()
                for (prompt, tokens, logprobs), w in zip(result[batch], who, strict=True)
            ]
            result[f"deviation_{batch}"] = round(torch.cat(deltas).mean().item(), 5)
            say(f"{path} {batch}: mean |log p - fp32|", result[f"deviation_{batch}"])
        prompt, tokens, logprobs = result["mixed"][1]
        other = (
            (torch.tensor(logprobs, device="cuda") - reference.logprobs(prompt, tokens, folded[3])).abs().mean().item()
        )
        say(f"{path} against another adapter", round(other, 4), ok=other > 3 * result["deviation_mixed"])
    del result["llm"]
    torch.save(result, ROOT / f"{path}.pt")


def compare(paths: list[str]) -> None:
    """The engines of `paths` against that of stock vLLM."""
    stock = torch.load(ROOT / "stock.pt", weights_only=False)
    for path in paths:
        result = torch.load(ROOT / f"{path}.pt", weights_only=False)
        same = all(a[1] == b[1] and a[2] == b[2] for a, b in zip(result["base"], stock["base"], strict=True))
        say(f"{path}: batches without adapters identical to stock", same, ok=same)
        for batch in ("base", "mixed", "evicted", "single"):
            ours, theirs = result[f"deviation_{batch}"], stock[f"deviation_{batch}"]
            say(f"{path} {batch}: deviation over stock's", round(ours / theirs, 3), ok=ours < 1.15 * theirs)
        for graph, us in (result.get("graphs_us") or {}).items():
            print(f"{path} {graph}: {us} us, stock {(stock.get('graphs_us') or {}).get(graph)}", flush=True)


def main() -> int:
    """Run one of the checks."""
    what, *more = sys.argv[1:] or [""]
    if what == "op":
        with torch.inference_mode():
            check_operators()
            if not more:
                check_dispatch()
    elif what == "engine" and more:
        check_engine(more[0])
    elif what == "compare" and more:
        compare(more)
    else:
        print(__doc__)
        return 2
    print(f"FAIL: {failures}" if failures else "PASS")
    return bool(failures)


if __name__ == "__main__":
    raise SystemExit(main())
