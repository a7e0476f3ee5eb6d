"""Storage formats of bases and adapters on a GPU: each kernel checked against its reference, then layers timed beside vLLM's paths.

    python -m benchmarks.formats layers [--seconds 480] [--only CASE] [--check-only] [--cpu]

Order: checks (small shapes, every format; a failed one is a row with its error, and its timings are left out), then one Qwen3-8B
layer's four projections, chains of four layers in CUDA graphs, variants replayed in turn:

  nvfp4      W4A16 without and with one adapter                       beside Marlin NVFP4 (and vLLM's LoRA kernels)
  fp8_block  K1 + K2, hybrid, W8A16, without and with one adapter     beside CUTLASS, Triton and DeepGEMM for the same blocks
  adapters   FP8 channel base, 32 tenants, slots in bf16, FP8, NVFP4
  ada        K1 + K2 as Ada would run them, timed here as a stand-in and labelled so
  training   forward and dx on blocks and NVFP4                       beside bf16 cuBLAS

Every row is written as soon as it is measured. --cpu runs the checks in Triton's interpreter at toy shapes and times nothing.
Legend: M tokens, N out features, K in features, R rank, L slots.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import pathlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.formats.summary import summarise
from benchmarks.harness import Results, command_line, rms_error, time_variants, warm_up
from benchmarks.shapes import LAYER, Projection
from epilora.kernels import w8a16
from epilora.kernels.arguments import shared_limit, weight_kind
from epilora.kernels.fused_lora_gemm import fused_lora_gemm, fused_lora_gemm_ref
from epilora.kernels.lora_decode import DecodeWorkspace, lora_decode, lora_decode_ref
from epilora.kernels.lora_expand import (
    TokenGroups,
    group_tokens,
    lora_beside_gemm,
    lora_expand_add_ref,
    lora_shrink_grouped,
    lora_shrink_grouped_ref,
)
from epilora.kernels.quantize import quantize_groups
from epilora.kernels.quantize_nvfp4 import quantize_nvfp4
from epilora.kernels.training import MODES, dx_config_for, train_dx, train_dx_ref, train_forward, train_forward_ref
from epilora.kernels.w8a16 import LoraTerm, w8a16_gemm, w8a16_gemm_ref
from epilora.quant.block_fp8 import quantize_blocks_ref, quantize_groups_ref
from epilora.quant.formats import Format
from epilora.quant.nvfp4 import inverse_global_scale_for, quantize_nvfp4_ref, quantize_nvfp4_stack_ref
from epilora.quant.operand import Operand
from epilora.quant.reference import dequantize, quantize_rows_ref, quantize_weight_ref

RESULTS = pathlib.Path("benchmarks/results/formats_h200.json")
RANK, SLOTS, CHAIN = 64, 32, 4
CHECKED = LAYER[:2]  # three slices and one
TOY = (Projection("toy_qkv", 256, (128, 64, 64), 1), Projection("toy_down", 384, (128,), 1))
BASES: dict[str, Callable[[torch.Tensor], Operand]] = {
    "fp8_channel": quantize_weight_ref,
    "fp8_block": quantize_blocks_ref,
    "nvfp4": quantize_nvfp4_ref,
}
LIMIT = {torch.bfloat16: 6e-3, torch.float16: 1e-3}  # h and y rounded once: below an ulp of each


@dataclass
class Layer:
    """One projection in every format. x [M, K]; bases by name; adapters by name: (A stacks, B stacks), one a slice."""

    shape: Projection
    x: torch.Tensor
    bases: dict[str, Operand]
    adapters: dict[str, tuple[list[Operand], list[Operand]]]
    marlin: Any = None  # vLLM's repacked NVFP4 layer

    @property
    def lora_a(self) -> list[Operand]:
        return self.adapters["bf16"][0]

    @property
    def lora_b(self) -> list[Operand]:
        return self.adapters["bf16"][1]

    @functools.cached_property
    def y(self) -> torch.Tensor:
        """[M, N] that vLLM's expand adds to while it is tuned."""
        return torch.zeros(self.x.shape[0], self.shape.N, dtype=self.x.dtype, device=self.x.device)


def make_layer(
    shape: Projection, M: int, dtype: torch.dtype, device: torch.device, *, rank: int, slots: int, bases: Sequence[str]
) -> Layer:
    """Random numbers of a trained layer's size, quantised by the references."""
    real = torch.randn(shape.N, shape.K, device=device) * 0.02

    def stacks(rows: Sequence[int], columns: int) -> list[torch.Tensor]:
        return [(torch.randn(slots, n, columns, device=device) * 0.02).to(dtype) for n in rows]

    a, b = stacks([rank] * len(shape.slices), shape.K), stacks(shape.slices, rank)
    kind = Format.BF16 if dtype is torch.bfloat16 else Format.FP16
    adapters = {"bf16": tuple([Operand(t, kind) for t in side] for side in (a, b))}
    for name, quantise in (("fp8", quantize_rows_ref), ("nvfp4", quantize_nvfp4_stack_ref)):
        adapters[name] = tuple([quantise(t) for t in side] for side in (a, b))
    x = torch.randn(M, shape.K, device=device).to(dtype)
    return Layer(shape, x, {name: BASES[name](real) for name in bases}, adapters)  # type: ignore[arg-type]


# ---- checks ------------------------------------------------------------------------------------------------------------


@dataclass
class Check:
    """One kernel against its reference: returns (result, reference, limit)."""

    name: str
    run: Callable[[], tuple[torch.Tensor, torch.Tensor, float]]


def checks(shapes: Sequence[Projection], M: int, dtype: torch.dtype, device: torch.device) -> Iterator[Check]:
    """Every kernel of the formats at `shapes`: quantisers bit for bit, GEMMs and adapters by RMS error."""
    limit = LIMIT[dtype]
    for shape in shapes:
        torch.manual_seed(shape.K)
        layer = make_layer(shape, M, dtype, device, rank=16 if shape.K < 1024 else RANK, slots=4, bases=tuple(BASES))
        slots = (torch.arange(M, device=device) % 5 - 1).to(torch.int32)
        groups = group_tokens(slots, 4)
        yield from _quantiser_checks(shape.name, layer)
        for base in BASES:
            for stored in layer.adapters:
                yield from _gemm_checks(f"{shape.name}/{base}/{stored}", layer, base, stored, slots, groups, limit)
        for stored in layer.adapters:
            yield Check(
                f"{shape.name}/hybrid/{stored}", functools.partial(_hybrid, layer, stored, slots, groups, limit)
            )
        for base in BASES:
            yield from _training_checks(f"{shape.name}/{base}", layer, base, limit)


def _hybrid(
    layer: Layer, stored: str, slots: torch.Tensor, groups: TokenGroups, limit: float
) -> tuple[torch.Tensor, torch.Tensor, float]:
    (a, b), x = layer.adapters[stored], layer.x
    y = torch.randn(x.shape[0], layer.shape.N, device=x.device).to(x.dtype)
    want = lora_expand_add_ref(y, lora_shrink_grouped_ref(x, a, groups), b, groups)
    out = lora_beside_gemm(y.clone, x, a, b, groups)
    assert torch.equal(out[slots < 0], y[slots < 0]), "a row without an adapter changed"
    return out, want, limit


def _quantiser_checks(name: str, layer: Layer) -> Iterator[Check]:
    def groups() -> tuple[torch.Tensor, torch.Tensor, float]:
        codes, scales = quantize_groups(layer.x)
        want, want_scales = quantize_groups_ref(layer.x)
        assert torch.equal(scales, want_scales), "group scales differ"
        return codes.view(torch.uint8).float(), want.view(torch.uint8).float(), 0.0

    def nvfp4() -> tuple[torch.Tensor, torch.Tensor, float]:
        inverse = inverse_global_scale_for(layer.x.abs().amax())
        out, want = quantize_nvfp4(layer.x, inverse), quantize_nvfp4_ref(layer.x, inverse)
        assert torch.equal(out.scales.view(torch.uint8), want.scales.view(torch.uint8)), "block scales differ"  # type: ignore[union-attr]
        return out.values.float(), want.values.float(), 0.0

    yield Check(f"{name}/quantize_groups", groups)
    yield Check(f"{name}/quantize_nvfp4", nvfp4)


def _gemm_checks(
    name: str, layer: Layer, base: str, stored: str, slots: torch.Tensor, groups: TokenGroups, limit: float
) -> Iterator[Check]:
    weight, (a, b), x = layer.bases[base], layer.adapters[stored], layer.x

    def w16() -> tuple[torch.Tensor, torch.Tensor, float]:
        h = lora_shrink_grouped(x, a, groups)
        want_h = lora_shrink_grouped_ref(x, a, groups)
        out = w8a16_gemm(x, weight, lora=LoraTerm(h, b, slots, groups))
        return out, w8a16_gemm_ref(x, weight, lora=LoraTerm(want_h, b, slots, groups)), limit

    def fused() -> tuple[torch.Tensor, torch.Tensor, float]:
        workspace = decode_workspace([layer.shape], x.device, a[0].values.shape[1])
        out = lora_decode(x, weight, a, b, slots, workspace=workspace)
        return out, lora_decode_ref(x, weight, a, b, slots), limit

    def w4a4() -> tuple[torch.Tensor, torch.Tensor, float]:
        codes = quantize_nvfp4(x, inverse_global_scale_for(x.abs().amax()))
        h = lora_shrink_grouped(x, a, groups).permute(0, 2, 1, 3)
        args = (codes.values, codes.scales, weight, h, b, slots)
        out = fused_lora_gemm(*args, x_global_scale=codes.global_scale, out_dtype=x.dtype)  # type: ignore[arg-type]
        h = lora_shrink_grouped_ref(x, a, groups).permute(0, 2, 1, 3)
        args = (codes.values, codes.scales, weight, h, b, slots)
        return out, fused_lora_gemm_ref(*args, x_global_scale=codes.global_scale), limit  # type: ignore[arg-type]

    yield Check(f"{name}/w16", w16)
    yield Check(f"{name}/w4a4" if base == "nvfp4" else f"{name}/k1_k2", w4a4 if base == "nvfp4" else fused)


def _training_checks(name: str, layer: Layer, base: str, limit: float) -> Iterator[Check]:
    weight, x = layer.bases[base], layer.x
    a, b = ([o.values[0].contiguous() for o in side] for side in layer.adapters["bf16"])

    def forward(mode: str) -> tuple[torch.Tensor, torch.Tensor, float]:
        return train_forward(x, weight, a, b, mode=mode)[0], train_forward_ref(x, weight, a, b), limit

    def dx(mode: str) -> tuple[torch.Tensor, torch.Tensor, float]:
        dy = torch.randn(x.shape[0], layer.shape.N, device=x.device).to(x.dtype)
        tiles = None  # registers: named, or few tokens would take the panels
        if mode == "registers":
            tiles = dx_config_for(x.shape[0], *weight.shape, shared_limit(x.device), weight_kind(weight))
        return train_dx(dy, weight, a, b, mode=mode, config=tiles)[0], train_dx_ref(dy, weight, a, b), limit

    for mode in MODES:
        yield Check(f"{name}/forward_{mode}", functools.partial(forward, mode))
        yield Check(f"{name}/dx_{mode}", functools.partial(dx, mode))


def compile_ahead(found: Sequence[Check], workers: int = 12) -> None:
    """Run every check once, several at a time, for the sake of what it compiles; results and failures are met again later."""

    def once(check: Check) -> None:
        with contextlib.suppress(Exception), torch.cuda.stream(torch.cuda.Stream()):
            check.run()

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(once, found))
    torch.cuda.synchronize()
    w8a16._workspaces.clear()  # split-K launches that met there may have left their counters half-way


def run_checks(results: Results, found: Iterable[Check], M: int) -> list[str]:
    """Rows of every check; names of those that failed."""
    failed = []
    for check in found:
        try:
            out, want, limit = check.run()
        except (AssertionError, ValueError, TypeError, RuntimeError) as err:
            results.add_failure(f"check/{check.name}", "epilora", M, f"{type(err).__name__}: {err}"[:500])
            failed.append(check.name)
        else:
            error = rms_error(out, want)
            results.add(
                f"check/{check.name}", "epilora", M, [error], unit="rms_error", digits=9, limit=limit, passed=error <= limit
            )  # fmt: skip
            if not error <= limit:
                failed.append(check.name)
        results.write()
    for name in failed:
        print(f"FAILED {name}", flush=True)
    return failed


# ---- vLLM's paths for the same checkpoints --------------------------------------------------------------------------------


def marlin_layer(weight: Operand, dtype: torch.dtype) -> Any:
    """vLLM's NVFP4 layer repacked for Marlin."""
    from vllm.model_executor.layers.quantization.utils.marlin_utils_fp4 import prepare_fp4_layer_for_marlin

    N, K = weight.shape
    layer = torch.nn.Module()
    layer.output_size_per_partition, layer.input_size_per_partition, layer.params_dtype = N, K, dtype  # type: ignore[assignment]
    assert weight.scales is not None, "NVFP4 carries scales"
    layer.weight = torch.nn.Parameter(weight.values.clone(), requires_grad=False)
    layer.weight_scale = torch.nn.Parameter(weight.scales.clone(), requires_grad=False)
    assert weight.global_scale is not None, "NVFP4 carries a global scale"
    layer.weight_global_scale = torch.nn.Parameter(weight.global_scale.reshape(()).clone(), requires_grad=False)
    prepare_fp4_layer_for_marlin(layer)
    return layer


def marlin(d: Layer) -> torch.Tensor:
    from vllm.model_executor.layers.quantization.utils.marlin_utils_fp4 import apply_fp4_marlin_linear

    held = d.marlin
    return apply_fp4_marlin_linear(
        d.x, held.weight, held.weight_scale, held.weight_global_scale, held.workspace, d.shape.N, d.shape.K
    )


def block_paths() -> dict[str, Callable[[Layer], torch.Tensor]]:
    """vLLM's block-scaled GEMMs that exist here, by name; quantisation included."""
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.quantization.utils import fp8_utils

    def quantised(d: Layer, **layout: bool) -> tuple[torch.Tensor, torch.Tensor]:
        return fp8_utils.per_token_group_quant_fp8(d.x, 128, use_ue8m0=False, **layout)

    def cutlass(d: Layer) -> torch.Tensor:
        weight = d.bases["fp8_block"]
        codes, scales = quantised(d, column_major_scales=True)
        return ops.cutlass_scaled_mm(
            codes, weight.values.T, out_dtype=d.x.dtype, scale_a=scales, scale_b=weight.scales.T
        )  # type: ignore[union-attr]

    def triton(d: Layer) -> torch.Tensor:
        weight = d.bases["fp8_block"]
        codes, scales = quantised(d)
        return fp8_utils.w8a8_triton_block_scaled_mm(
            codes, weight.values, scales, weight.scales, [128, 128], output_dtype=d.x.dtype
        )

    found = {"vllm_cutlass": cutlass, "vllm_triton": triton}
    from vllm.utils import deep_gemm

    if deep_gemm.is_deep_gemm_supported():

        def deepgemm(d: Layer) -> torch.Tensor:
            weight = d.bases["fp8_block"]
            codes, scales = quantised(d, column_major_scales=True, tma_aligned_scales=True)
            out = torch.empty(d.x.shape[0], d.shape.N, dtype=d.x.dtype, device=d.x.device)
            deep_gemm.fp8_gemm_nt((codes, scales), (weight.values, weight.scales), out, is_deep_gemm_e8m0_used=False)
            return out

        found["vllm_deepgemm"] = deepgemm
    return found


# ---- timing ---------------------------------------------------------------------------------------------------------------


def decode_workspace(shapes: Sequence[Projection], device: torch.device, rank: int) -> DecodeWorkspace:
    most = max(len(p.slices) for p in shapes)
    return DecodeWorkspace(device, max_k=max(p.K for p in shapes), max_h=DecodeWorkspace.h_values(most, rank))


class Timer:
    """Times variants over chains of layers and writes their rows; starts nothing past its budget."""

    def __init__(self, results: Results, seconds: float, failed: Sequence[str], only: str = "") -> None:
        self.results, self.until = results, time.monotonic() + seconds
        self.failed, self.only = failed, only

    def rows(
        self,
        case: str,
        M: int,
        chain: Sequence[Sequence[Layer]],
        variants: Mapping[str, Callable[[Layer], Any]],
        **facts: Any,
    ) -> None:
        """One row a variant: us a layer. A variant that cannot run becomes a row that says why."""
        if not case.startswith(self.only):
            return
        if time.monotonic() > self.until:
            self.results.add_failure(case, "all", M, "out of time", **facts)
            self.results.write()
            return
        alive: dict[str, Callable[[Any], object]] = {}
        for name, one in variants.items():

            def whole(layer: Sequence[Layer], one: Callable[[Layer], Any] = one) -> None:
                for d in layer:
                    one(d)

            try:
                whole(chain[0])
                torch.cuda.synchronize()
            except Exception as err:  # whatever another project's path raises: the row keeps it
                self.results.add_failure(case, name, M, f"{type(err).__name__}: {err}"[:500], **facts)
                continue
            alive[name] = whole
        for name, samples in time_variants(alive, chain, replays=20).items():
            self.results.add(case, name, M, samples, checked=not self.failed, **facts)
            print(f"{case} M={M} {name}: {sorted(samples)[len(samples) // 2]:.1f} us {facts}", flush=True)
        self.results.write()


def time_layers(results: Results, seconds: float, failed: Sequence[str], only: str = "") -> None:
    """All timed cases whose name starts with `only`; see the module."""
    from benchmarks.kernels import vllm_baseline

    device, dtype = torch.device("cuda"), torch.bfloat16
    timer = Timer(results, seconds, failed, only)
    warm_up()
    full = [
        [make_layer(p, 1, dtype, device, rank=RANK, slots=SLOTS, bases=tuple(BASES)) for p in LAYER]
        for _ in range(CHAIN)
    ]
    for layer in full:
        for d in layer:
            d.marlin = marlin_layer(d.bases["nvfp4"], dtype)
    workspace = decode_workspace(LAYER, device, RANK)
    blocks = block_paths()
    if "vllm_deepgemm" not in blocks:
        results.add_failure(
            "layer/fp8_block", "vllm_deepgemm", 1, "DeepGEMM is not installed: CUTLASS/Triton block only"
        )
    one = vllm_baseline.VllmLayer(1, torch.zeros(1, dtype=torch.int32, device=device), SLOTS, RANK)
    tuned = vllm_baseline.tune(full, one)  # type: ignore[arg-type]
    for M in (1, 8, 16, 32):
        chain = _with_tokens(full, M)
        slots = torch.zeros(M, dtype=torch.int32, device=device)
        groups = group_tokens(slots, SLOTS)
        stock = vllm_baseline.VllmLayer(M, slots, SLOTS, RANK)

        def with_stock_lora(
            name: str, base: Callable[[Layer], torch.Tensor], stock: vllm_baseline.VllmLayer = stock
        ) -> dict[str, Callable[[Layer], Any]]:
            """vLLM's LoRA kernels beside a GEMM: {default, tuned} x {one, two streams}, so that the fastest is among them."""

            def variant(chosen: Any, streams: int) -> Callable[[Layer], Any]:
                def run(d: Layer) -> Any:
                    with vllm_baseline.configured(chosen):
                        return stock.beside(d, base, streams=streams)

                return run

            return {
                f"{name}_{mode}_{streams}_stream{'s' * (streams - 1)}": variant(chosen, streams)
                for mode, chosen in (("default", {}), ("tuned", tuned))
                for streams in (1, 2)
            }

        def w16(
            base: str, lora: bool, slots: torch.Tensor = slots, groups: TokenGroups = groups
        ) -> Callable[[Layer], Any]:
            def run(d: Layer) -> torch.Tensor:
                term = None
                if lora:
                    term = LoraTerm(lora_shrink_grouped(d.x, d.lora_a, groups), d.lora_b, slots, groups)
                return w8a16_gemm(d.x, d.bases[base], lora=term)

            return run

        def fused(
            base: str, stored: str, which: torch.Tensor = slots, how: str | None = None
        ) -> Callable[[Layer], Any]:
            def run(d: Layer) -> torch.Tensor:
                a, b = d.adapters[stored] if stored else ([], [])
                given = which if stored else None
                return lora_decode(d.x, d.bases[base], a, b, given, workspace=workspace, implementation=how)

            return run

        def beside(
            gemm: Callable[[Layer], torch.Tensor], stored: str = "bf16", groups: TokenGroups = groups
        ) -> Callable[[Layer], Any]:
            return lambda d: lora_beside_gemm(lambda: gemm(d), d.x, *d.adapters[stored], groups)

        timer.rows("layer/nvfp4", M, chain, {"epilora_w4a16": w16("nvfp4", False), "vllm_marlin": marlin}, adapters=0)
        timer.rows(
            "layer/nvfp4", M, chain, {"epilora_w4a16": w16("nvfp4", True)} | with_stock_lora("vllm_marlin", marlin), adapters=1
        )  # fmt: skip
        ours = {"epilora_k1_k2": fused("fp8_block", ""), "epilora_w8a16": w16("fp8_block", False)}
        timer.rows("layer/fp8_block", M, chain, ours | blocks, adapters=0)
        variants = {"epilora_k1_k2": fused("fp8_block", "bf16"), "epilora_w8a16": w16("fp8_block", True)}
        for name, gemm in blocks.items():
            variants |= {f"epilora_hybrid_{name}": beside(gemm), **with_stock_lora(name, gemm)}
        timer.rows("layer/fp8_block", M, chain, variants, adapters=1)
        if M in (1, 32):
            ada = {
                "epilora_k1_k2_triton": fused("fp8_channel", "bf16", how="triton"),
                "epilora_w8a16": w16("fp8_channel", True),
            }
            timer.rows("layer/ada_stand_in", M, chain, ada, adapters=1, note="sm_89's paths, timed on this GPU")
        if M == 32:
            tenants = torch.arange(M, device=device, dtype=torch.int32)
            stored = {f"epilora_{name}": fused("fp8_channel", name, tenants) for name in ("bf16", "fp8", "nvfp4")}
            stored["epilora_bf16_triton"] = fused("fp8_channel", "bf16", tenants, "triton")
            timer.rows("layer/adapters", M, chain, stored, adapters=32)
    _time_batches(timer, full)
    _time_training(timer, full)


def _with_tokens(full: Sequence[Sequence[Layer]], M: int) -> list[list[Layer]]:
    def fresh(d: Layer) -> Layer:
        x = torch.randn(M, d.shape.K, device=d.x.device).to(d.x.dtype)
        return Layer(d.shape, x, d.bases, d.adapters, d.marlin)

    return [[fresh(d) for d in layer] for layer in full]


def _time_batches(timer: Timer, full: Sequence[Sequence[Layer]]) -> None:
    """256 tokens of 32 tenants: adapters in each format beside a GEMM that costs nothing here, the expand and shrink alone."""
    M, device = 256, full[0][0].x.device
    groups = group_tokens((torch.arange(M, device=device) % SLOTS).to(torch.int32), SLOTS)
    chain = _with_tokens(full, M)
    outputs = {id(d): torch.zeros(M, d.shape.N, device=device, dtype=d.x.dtype) for layer in chain for d in layer}

    def alone(stored: str) -> Callable[[Layer], Any]:
        return lambda d: lora_beside_gemm(lambda: outputs[id(d)], d.x, *d.adapters[stored], groups)

    variants = {f"epilora_{name}": alone(name) for name in ("bf16", "fp8", "nvfp4")}
    timer.rows("adapters_alone", M, chain, variants, adapters=32)


def _time_training(timer: Timer, full: Sequence[Sequence[Layer]]) -> None:
    """Forward and dx of 2,048 tokens, one adapter: codes against bf16 weights under cuBLAS."""
    M = 2048
    chain = _with_tokens(full[:2], M)
    wide = {id(d): dequantize(d.bases["fp8_channel"]).to(d.x.dtype) for layer in chain for d in layer}
    gradients = {id(d): torch.randn(M, d.shape.N, device=d.x.device).to(d.x.dtype) for layer in chain for d in layer}
    pair = {
        id(d): tuple([o.values[0].contiguous() for o in side] for side in d.adapters["bf16"])
        for layer in chain
        for d in layer
    }

    def cublas(d: Layer) -> None:
        y = d.x @ wide[id(d)].t()
        column = 0
        for a, b in zip(*pair[id(d)], strict=True):
            y[:, column : column + b.shape[0]].addmm_(d.x @ a.t(), b.t())
            column += b.shape[0]

    def cublas_dx(d: Layer) -> None:
        dy, column = gradients[id(d)], 0
        dx = dy @ wide[id(d)]
        for a, b in zip(*pair[id(d)], strict=True):
            dx.addmm_(dy[:, column : column + b.shape[0]] @ b, a)
            column += b.shape[0]

    def forward(base: str, mode: str) -> Callable[[Layer], Any]:
        return lambda d: train_forward(d.x, d.bases[base], *pair[id(d)], mode=mode)

    def backward(base: str, mode: str) -> Callable[[Layer], Any]:
        return lambda d: train_dx(gradients[id(d)], d.bases[base], *pair[id(d)], mode=mode)

    for case, reference, ours in (("train/forward", cublas, forward), ("train/dx", cublas_dx, backward)):
        variants: dict[str, Callable[[Layer], Any]] = {"bf16_cublas": reference}
        variants |= {f"epilora_{base}_{mode}": ours(base, mode) for base in BASES for mode in MODES}
        timer.rows(case, M, chain, variants, adapters=1)


def run(arguments: Sequence[str]) -> int:
    """The `layers` command. Returns the exit status: 1 if a check failed."""
    parser = argparse.ArgumentParser(prog="benchmarks.formats layers", description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS)
    parser.add_argument("--seconds", type=float, default=480.0, help="start no new case after this long")
    parser.add_argument("--check-only", action="store_true")
    parser.add_argument("--only", default="", metavar="CASE", help="time cases whose name starts so, layer/nvfp4 say")
    parser.add_argument(
        "--cpu", action="store_true", help="checks at toy shapes in the interpreter (TRITON_INTERPRET=1)"
    )
    given = parser.parse_args(arguments)
    began = time.monotonic()
    results = Results(given.results, summarise, command_line("python -m benchmarks.formats layers", sys.argv[2:]))
    setting = SimpleNamespace(shapes=TOY, M=7, dtype=torch.float16, device=torch.device("cpu"))
    if not given.cpu:
        setting = SimpleNamespace(shapes=CHECKED, M=32, dtype=torch.bfloat16, device=torch.device("cuda"))
    found = list(checks(setting.shapes, setting.M, setting.dtype, setting.device))
    if not given.cpu:
        compile_ahead(found)
    failed = run_checks(results, found, setting.M)
    if not (given.cpu or given.check_only):
        time_layers(results, given.seconds - (time.monotonic() - began), failed, given.only)
    results.write()
    for key, value in results.summarise(results.rows).items():
        if value is not None:
            print(f"{key} = {value}")
    return 1 if failed else 0
