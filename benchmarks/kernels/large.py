"""Kernels for large batches: the hybrid LoRA path, W8A16 against Marlin, the training GEMMs against bf16 cuBLAS.

    python -m benchmarks.kernels.large --out OUT.json [--parts check,stress,w8a16,training,hybrid] [--seconds 500]
    python -m benchmarks.kernels.large --merge OUT.json        # append those rows to results/kernels_h200.json

One Qwen3-8B decoder layer's four projections, a chain of eight layers with weights of their own, one CUDA graph a
variant, variants interleaved (see `harness.py`). Every part first searches a small set of launch configurations per
projection, in the place where the kernel runs (the whole projection is timed, not the kernel alone), for our kernels
and for vLLM's alike, and then times the layer. A correctness gate against fp32 runs before any timing; a variant that
fails is kept as a failure row.

Providers of the layer cases: `vllm_no_adapter` (quantise + CUTLASS), `vllm_lora_default`, `vllm_lora_tuned` and both
with two streams; `epilora` (per projection the fastest of the three orders below), `epilora_serial`, `epilora_fused`,
`epilora_two_streams`.
Orders: serial: shrink, quantise, GEMM, expand-add. fused: shrink with the quantisation in it, GEMM, expand-add. two
streams: the shrink beside quantise + GEMM. The expand-add is the GEMM's programmatic dependent except with two streams.
Tokens: up to 512 they alternate between adapters (decode rows); above, each adapter's are contiguous (prefill chunks).
"""

from __future__ import annotations

# ruff: noqa: B023 (closures run before the loop moves on; vLLM's signatures are positional)
import argparse
import concurrent.futures
import concurrent.futures.process
import contextlib
import json
import multiprocessing
import os
import pathlib
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from epilora.kernels import training
from epilora.kernels.dispatch import calls, reset_calls
from epilora.kernels.lora_expand import (
    ExpandConfig,
    ShrinkConfig,
    TokenGroups,
    group_tokens,
    is_legal_expand,
    is_legal_shrink,
    lora_expand_add,
    lora_expand_add_ref,
    lora_shrink_grouped,
    lora_shrink_grouped_ref,
)
from epilora.kernels.training import (
    DxConfig,
    is_legal_dx,
    lora_grads,
    lora_grads_ref,
    train_dx,
    train_dx_ref,
    train_forward,
    train_forward_ref,
)
from epilora.kernels.w8a16 import LoraTerm, W8A16Config, is_legal_w8a16, w8a16_gemm, w8a16_gemm_ref
from epilora.quant.formats import Format, ScaleAxis
from epilora.quant.operand import Operand

from .. import harness, shapes
from .summary import adapter_case, summarise

RESULTS = pathlib.Path(__file__).parent.parent / "results" / "kernels_h200.json"
RANK, LAYERS = 64, harness.CHAIN_LAYERS


@dataclass(frozen=True)
class Cell:
    """One hybrid case: tokens, distinct adapters, their rank, the model whose layer it is. Up to 8 adapters sit in 8 slots."""

    M: int
    adapters: int
    rank: int = RANK
    model: str = "qwen3-8b"

    @property
    def slots(self) -> int:
        return 8 if self.adapters <= 8 else self.adapters

    @property
    def layer(self) -> tuple[shapes.Projection, ...]:
        return shapes.MODELS[self.model]


# The batches the summary names first; then ranks and models without a bar.
CELLS = (
    *(Cell(M, a) for M, a in ((512, 32), (2048, 32), (64, 32), (8192, 32), (2048, 4), (8192, 4), (256, 32), (128, 32))),
    *(Cell(512, 32, rank) for rank in (16, 128)),
    *(Cell(M, 32, RANK, "qwen3.5-9b") for M in (512, 2048)),
)
DEV = "cuda"

SHRINK_SMALL = (
    ShrinkConfig(16, 64, 128, 2, 4, 4),
    ShrinkConfig(16, 64, 128, 4, 4, 4),
    ShrinkConfig(16, 64, 256, 4, 4, 3),
    ShrinkConfig(32, 64, 128, 2, 4, 4),
    ShrinkConfig(32, 64, 128, 4, 4, 4),
)
SHRINK_LARGE = (
    ShrinkConfig(64, 64, 64, 1, 4, 4),
    ShrinkConfig(64, 64, 64, 2, 4, 4),
    ShrinkConfig(64, 64, 128, 1, 4, 3),
    ShrinkConfig(32, 64, 128, 2, 4, 4),
)
EXPAND_SMALL = (
    ExpandConfig(16, 128, 4, 4),
    ExpandConfig(16, 128, 2, 4),
    ExpandConfig(16, 128, 8, 4),
    ExpandConfig(16, 256, 1, 4),
    ExpandConfig(16, 256, 2, 4),
    ExpandConfig(32, 128, 4, 4),
)
EXPAND_LARGE = (
    ExpandConfig(64, 128, 2, 4),
    ExpandConfig(64, 128, 1, 4),
    ExpandConfig(64, 128, 4, 4),
    ExpandConfig(64, 256, 1, 8),
    ExpandConfig(64, 64, 4, 4),
)
ORDERS = ("fused", "serial", "two_streams")


def vllm_config(
    block_m: int, block_n: int, block_k: int, split_k: int = 1, warps: int = 4, stages: int = 2
) -> dict[str, Any]:
    """A launch configuration in vLLM's keys."""
    config = {"block_m": block_m, "block_n": block_n, "block_k": block_k, "num_warps": warps, "num_stages": stages}
    return config | {"split_k": split_k, "num_ctas": 1, "group_size_m": 8, "max_nreg": None}


VLLM_SHRINK_SMALL = tuple(
    vllm_config(*c)
    for c in (
        (16, 64, 256, 8),
        (16, 64, 128, 8, 4, 4),
        (16, 64, 128, 4, 4, 4),
        (16, 32, 256, 8),
        (16, 64, 256, 16),
        (16, 64, 256, 4, 4, 3),
        (32, 64, 128, 4, 4, 3),
        (32, 64, 256, 8, 8, 3),
        (16, 64, 128, 16, 4, 3),
        (16, 64, 64, 8, 4, 4),
    )
)
VLLM_SHRINK_LARGE = tuple(
    vllm_config(*c)
    for c in (
        (64, 64, 64, 1, 4, 4),
        (64, 64, 64, 2, 4, 3),
        (32, 64, 128, 2, 4, 3),
        (128, 64, 64, 1, 8, 3),
        (64, 64, 128, 1, 4, 3),
        (64, 64, 32, 4, 4, 3),
        (128, 64, 64, 2, 8, 3),
        (128, 64, 32, 4, 4, 4),
        (64, 64, 64, 8, 4, 3),
    )
)
VLLM_EXPAND_SMALL = tuple(
    vllm_config(*c)
    for c in (
        (16, 128, 64),
        (16, 256, 64),
        (16, 64, 64),
        (16, 512, 64, 1, 8),
        (32, 128, 64),
        (32, 256, 64, 1, 8),
        (32, 512, 64, 1, 8),
        (64, 128, 64),
        (64, 256, 64, 1, 8),
        (16, 128, 32),
        (16, 256, 64, 1, 8),
    )
)
VLLM_EXPAND_LARGE = tuple(
    vllm_config(*c)
    for c in (
        (64, 128, 64),
        (64, 256, 64, 1, 8),
        (64, 256, 64, 1, 4),
        (64, 512, 64, 1, 8),
        (128, 128, 64, 1, 8),
        (128, 128, 64, 1, 4),
        (128, 256, 64, 1, 8),
        (256, 128, 64, 1, 8),
        (64, 64, 64),
        (32, 256, 64, 1, 8),
        (128, 64, 64),
    )
)
W8A16_EIGHT = tuple(  # up to 8 tokens: the narrowest MMA, mma.sync
    [W8A16Config(8, 64, 256, True, s, 1, 4, n) for s in (1, 2, 4) for n in (4, 3)]
    + [W8A16Config(8, 64, 512, True, s, 1, 4, 3) for s in (1, 2)]
    + [W8A16Config(8, 128, 256, True, s, 1, 8, 3) for s in (1, 2)]
    + [W8A16Config(8, 32, 512, True, s, 1, 2, 4) for s in (1, 2)]
    + [W8A16Config(16, 64, 256, True, s, 1, 4, 4) for s in (1, 2)]
)
W8A16_SIXTEEN = tuple(  # two warps: mma.sync; four: wgmma with W from registers
    [W8A16Config(16, 64, 256, True, s, 1, 2, n) for s in (1, 2, 4) for n in (4, 3)]
    + [W8A16Config(16, 32, 256, True, s, 1, 2, 5) for s in (1, 2)]
    + [W8A16Config(16, 32, 512, True, s, 1, 2, 3) for s in (1, 2)]
    + [W8A16Config(16, 64, 256, True, s, 1, 4, 4) for s in (1, 2, 4)]
    + [W8A16Config(16, 64, 256, True, s, 1, 4, 4, True) for s in (1, 2)]
    + [W8A16Config(16, 16, 512, True, 1, 1, 1, 4), W8A16Config(16, 128, 256, True, 2, 1, 8, 3)]
)
TRAIN_FORWARD = tuple(
    [W8A16Config(256, 128, 64, True, 1, g, 8, 3, t) for t in (False, True) for g in (8,)]
    + [W8A16Config(128, 256, 64, False, 1, 8, 8, 3, t) for t in (False, True)]
    + [W8A16Config(128, 128, 64, True, 1, 8, 4, 3, t) for t in (False, True)]
    + [W8A16Config(128, 128, 64, False, 1, 8, 4, 2, True), W8A16Config(256, 128, 64, True, 1, 16, 8, 4, True)]
    + [W8A16Config(128, 128, 128, True, 1, 8, 8, 3, True), W8A16Config(256, 128, 128, True, 1, 8, 8, 2, True)]
)
TRAIN_DX = (
    DxConfig(128, 256, 64, False, 8, 8, 3, False),
    DxConfig(128, 256, 64, False, 8, 8, 3, True),
    DxConfig(128, 256, 64, False, 8, 8, 2, True),
    DxConfig(256, 128, 64, False, 8, 8, 3, True),
    DxConfig(128, 128, 64, False, 8, 4, 2, True),
    DxConfig(256, 128, 64, True, 8, 8, 3, True),
    DxConfig(128, 128, 64, True, 8, 4, 3, True),
)


# ---- tensors ---------------------------------------------------------------------------------------------------------


def fp8_weight(N: int, K: int) -> Operand:
    """Random e4m3 codes with unequal channel scales."""
    codes = (torch.randn(N, K, device=DEV) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    return Operand(codes, Format.FP8_E4M3, ScaleAxis.CHANNEL, 1e-4 + 1e-4 * torch.rand(N, device=DEV))


@dataclass
class Hybrid:
    """One projection with its adapters. a, b: per slice [L, R, K] and [L, N_s, R] bf16; x: [M, K]."""

    shape: shapes.Projection
    weight: Operand
    a: list[torch.Tensor]
    b: list[torch.Tensor]
    x: torch.Tensor

    @property
    def lora_a(self) -> list[Operand]:
        return [Operand(t, Format.BF16) for t in self.a]

    @property
    def lora_b(self) -> list[Operand]:
        return [Operand(t, Format.BF16) for t in self.b]


def hybrid_layers(cell: Cell, num_layers: int) -> list[dict[str, Hybrid]]:
    """`num_layers` layers of the model's projections; every one has weights and adapters of its own."""

    def one(p: shapes.Projection) -> Hybrid:
        like = {"device": DEV, "dtype": torch.bfloat16}
        a = [torch.randn(cell.slots, cell.rank, p.K, **like) * 0.02 for _ in p.slices]
        b = [torch.randn(cell.slots, n, cell.rank, **like) * 0.02 for n in p.slices]
        return Hybrid(p, fp8_weight(p.N, p.K), a, b, torch.randn(cell.M, p.K, **like))

    return [{p.name: one(p) for p in cell.layer} for _ in range(num_layers)]


def token_slots(M: int, adapters: int) -> torch.Tensor:
    """int32 [M] slots: alternating up to 512 tokens, contiguous above."""
    index = torch.arange(M, device=DEV)
    return ((index % adapters) if M <= 512 else (index * adapters // M)).to(torch.int32)


# ---- vLLM ------------------------------------------------------------------------------------------------------------


class VllmLora:
    """vLLM's layer on its own ops, with a table of launch configurations that stands in for its JSON files."""

    def __init__(self) -> None:
        import vllm._custom_ops as ops
        from vllm.lora.ops.triton_ops import LoRAKernelMeta, lora_expand, lora_expand_op, lora_shrink, lora_shrink_op

        self.ops, self.shrink, self.expand, self.Meta = ops, lora_shrink, lora_expand, LoRAKernelMeta
        self.tables: dict[tuple[str, int, int], dict[str, Any]] = {}
        self.tuned = False
        for module in (lora_shrink_op, lora_expand_op):
            stock = module.get_lora_op_configs
            module.get_lora_op_configs = self._lookup(stock)
        self.side = torch.cuda.Stream()

    def _lookup(self, stock: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
        def look(
            op_type: str,
            max_loras: int,
            batch: int,
            hidden_size: int,
            rank: int,
            num_slices: int,
            add_inputs: bool | None = None,
        ) -> dict[str, Any]:
            found = self.tables.get((op_type, hidden_size, num_slices)) if self.tuned else None
            return found or stock(op_type, max_loras, batch, hidden_size, rank, num_slices, add_inputs)

        return look

    def set_batch(self, slots: torch.Tensor, num_slots: int) -> TokenGroups:
        """Prepare vLLM's metadata for this batch; returns our view of the same arrays."""
        self.meta = self.Meta.make(num_slots, slots.numel(), DEV)
        self.meta.prepare_tensors(slots)
        self.args = self.meta.meta_args(slots.numel(), False)
        m = self.meta
        return TokenGroups(
            m.token_indices_sorted_by_lora_ids, m.active_lora_ids, m.num_tokens_per_lora, m.lora_token_start_loc
        )

    def quantise(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.ops.scaled_fp8_quant(x, use_per_token_if_dynamic=True)

    def gemm(self, p: Hybrid, xq: torch.Tensor, x_scale: torch.Tensor) -> torch.Tensor:
        return self.ops.cutlass_scaled_mm(xq, p.weight.values.t(), x_scale, p.weight.scales[None], torch.bfloat16)

    def base(self, p: Hybrid) -> torch.Tensor:
        return self.gemm(p, *self.quantise(p.x))

    def lora(self, p: Hybrid, y: torch.Tensor, add: bool) -> torch.Tensor:
        h = torch.empty(len(p.a), p.x.shape[0], p.a[0].shape[1], dtype=torch.float32, device=DEV)
        self.shrink(p.x, [t.unsqueeze(1) for t in p.a], h, *self.args, 1.0)
        self.expand(h, [t.unsqueeze(1) for t in p.b], y, *self.args, offset_start=0, add_inputs=add)
        return y

    def one_stream(self, p: Hybrid) -> torch.Tensor:
        return self.lora(p, self.base(p), True)

    def two_streams(self, p: Hybrid) -> torch.Tensor:
        current, before, after = torch.cuda.current_stream(), torch.cuda.Event(), torch.cuda.Event()
        before.record()
        with torch.cuda.stream(self.side):
            self.side.wait_event(before)
            delta = self.lora(p, torch.zeros(p.x.shape[0], p.shape.N, dtype=torch.bfloat16, device=DEV), False)
            after.record()
        y = self.base(p)
        current.wait_event(after)
        return y.add_(delta)

    @contextlib.contextmanager
    def using(self, tuned: bool, tables: dict[tuple[str, int, int], dict[str, Any]] | None = None):
        before = self.tuned, self.tables
        self.tuned, self.tables = tuned, self.tables if tables is None else tables
        try:
            yield
        finally:
            self.tuned, self.tables = before


# ---- ours ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Choice:
    """How one projection runs on the hybrid path."""

    shrink: ShrinkConfig
    expand: ExpandConfig
    order: str = "fused"


def run_hybrid(vllm: VllmLora, p: Hybrid, groups: TokenGroups, choice: Choice, side: torch.cuda.Stream) -> torch.Tensor:
    """One projection: the vendor's quantise and GEMM, our shrink and expand-add, in the chosen order."""
    M = p.x.shape[0]
    if choice.order == "two_streams":
        current, before, after = torch.cuda.current_stream(), torch.cuda.Event(), torch.cuda.Event()
        before.record()
        with torch.cuda.stream(side):
            side.wait_event(before)
            h = lora_shrink_grouped(p.x, p.lora_a, groups, config=choice.shrink)
            after.record()
        y = vllm.base(p)
        current.wait_event(after)
        return lora_expand_add(y, h, p.lora_b, groups, config=choice.expand)
    if choice.order == "fused":
        xq = torch.empty(M, p.shape.K, dtype=torch.float8_e4m3fn, device=DEV)
        x_scale = torch.empty(M, 1, dtype=torch.float32, device=DEV)
        h = lora_shrink_grouped(p.x, p.lora_a, groups, quantize_to=(xq, x_scale), config=choice.shrink)
    else:
        h = lora_shrink_grouped(p.x, p.lora_a, groups, config=choice.shrink)
        xq, x_scale = vllm.quantise(p.x)
    return lora_expand_add(vllm.gemm(p, xq, x_scale), h, p.lora_b, groups, config=choice.expand, use_pdl=True)


def is_small(M: int) -> bool:
    return M <= 512


def candidates_for(small: bool, rank: int) -> tuple[list[ShrinkConfig], list[ExpandConfig]]:
    """Our launch configurations to search, as the rank allows."""
    block_r = min(64, max(16, rank))
    shrinks = [replace(c, block_r=block_r) for c in (SHRINK_SMALL if small else SHRINK_LARGE)]
    return shrinks, [c for c in (EXPAND_SMALL if small else EXPAND_LARGE) if is_legal_expand(c, rank)]


def vllm_candidates_for(small: bool) -> tuple[Sequence[dict[str, Any]], Sequence[dict[str, Any]]]:
    """vLLM's launch configurations to search."""
    return (VLLM_SHRINK_SMALL, VLLM_EXPAND_SMALL) if small else (VLLM_SHRINK_LARGE, VLLM_EXPAND_LARGE)


# ---- compile ahead, in parallel --------------------------------------------------------------------------------------


def _warm(job: tuple[str, Any]) -> str:
    """Compile one kernel configuration by launching it once on small inputs; it lands in Triton's disk cache."""
    kind, payload = job
    try:
        torch.manual_seed(0)
        if kind in ("shrink", "expand"):
            config, p, quant, split, rank = payload
            M = 64
            groups = group_tokens(token_slots(M, 4), 32)
            if kind == "shrink":
                a = [
                    Operand(torch.zeros(32, rank, p.K, device=DEV, dtype=torch.bfloat16), Format.BF16) for _ in p.slices
                ]
                x = torch.zeros(M, p.K, device=DEV, dtype=torch.bfloat16)
                to = (
                    (torch.empty(M, p.K, device=DEV, dtype=torch.float8_e4m3fn), torch.empty(M, device=DEV))
                    if quant
                    else None
                )
                lora_shrink_grouped(x, a, groups, config=config, quantize_to=to)
            else:
                b = [Operand(torch.zeros(32, n, rank, device=DEV, dtype=torch.bfloat16), Format.BF16) for n in p.slices]
                h = torch.zeros(
                    split, M, len(p.slices), rank, device=DEV, dtype=torch.bfloat16 if split == 1 else torch.float32
                )
                y = torch.zeros(M, p.N, device=DEV, dtype=torch.bfloat16)
                lora_expand_add(y, h, b, groups, config=config, use_pdl=quant)
        elif kind == "w8a16":
            config, p = payload
            weight = Operand(
                torch.zeros(p.N, p.K, device=DEV).to(torch.float8_e4m3fn),
                Format.FP8_E4M3,
                ScaleAxis.CHANNEL,
                torch.ones(p.N, device=DEV),
            )
            for pdl in (True, False):
                w8a16_gemm(torch.zeros(8, p.K, device=DEV, dtype=torch.bfloat16), weight, config=config, use_pdl=pdl)
        elif kind in ("forward", "dx"):
            config, p = payload
            weight = Operand(
                torch.zeros(p.N, p.K, device=DEV).to(torch.float8_e4m3fn),
                Format.FP8_E4M3,
                ScaleAxis.CHANNEL,
                torch.ones(p.N, device=DEV),
            )
            a = [torch.zeros(RANK, p.K, device=DEV, dtype=torch.bfloat16) for _ in p.slices]
            b = [torch.zeros(n, RANK, device=DEV, dtype=torch.bfloat16) for n in p.slices]
            if kind == "forward":
                train_forward(torch.zeros(256, p.K, device=DEV, dtype=torch.bfloat16), weight, a, b, config=config)
            else:
                train_dx(torch.zeros(256, p.N, device=DEV, dtype=torch.bfloat16), weight, a, b, config=config)
        elif kind == "vllm":
            global _vllm
            if _vllm is None:
                _vllm = VllmLora()
            shrink, expand, p, rank = payload
            _vllm.set_batch(token_slots(64, 4), 32)
            one = Hybrid(
                p,
                fp8_weight(16, 16),
                [torch.zeros(32, rank, p.K, device=DEV, dtype=torch.bfloat16) for _ in p.slices],
                [torch.zeros(32, n, rank, device=DEV, dtype=torch.bfloat16) for n in p.slices],
                torch.zeros(64, p.K, device=DEV, dtype=torch.bfloat16),
            )
            tables = {("shrink", p.K, len(p.slices)): shrink, ("expand", max(p.slices), len(p.slices)): expand}
            with _vllm.using(True, tables):
                for add in (True, False):
                    _vllm.lora(one, torch.zeros(64, p.N, device=DEV, dtype=torch.bfloat16), add)
        torch.cuda.synchronize()
        return ""
    except (
        Exception
    ) as err:  # a config that does not compile is reported here and fails again, with a row, where it is timed
        return f"{kind} {payload[0]}: {type(err).__name__}: {str(err)[:160]}"


_vllm: VllmLora | None = None


def compile_jobs(parts: Sequence[str], cells: Sequence[Cell]) -> list[tuple[str, Any]]:
    """Everything the parts will launch, each once; slices decide the binary, so one projection stands for its kind."""
    by_slices = {len(p.slices): p for p in shapes.LAYER if p.name != "down"}
    one = by_slices[1]
    jobs: list[tuple[str, Any]] = []
    if "training" in parts:
        jobs += [("forward", (c, p)) for c in TRAIN_FORWARD for p in by_slices.values() if is_legal_w8a16(c, p.N, p.K)]
        jobs += [("dx", (c, p)) for c in TRAIN_DX for p in by_slices.values() if is_legal_dx(c, p.N, p.K)]
    if "w8a16" in parts:
        candidates = dict.fromkeys(W8A16_EIGHT + W8A16_SIXTEEN)
        jobs += [("w8a16", (c, one)) for c in candidates if is_legal_w8a16(c, one.N, one.K)]
    if "hybrid" not in parts:
        return jobs
    for small, rank, slices in sorted({(is_small(c.M), c.rank, len(p.slices)) for c in cells for p in c.layer}):
        p = next(q for model in shapes.MODELS.values() for q in model if len(q.slices) == slices and q.K % 1024 == 0)
        shrinks, expands = candidates_for(small, rank)
        # Searched with two streams: neither quantisation in the shrink nor dependent launches; the rest compiles when it is met.
        jobs += [("shrink", (c, p, False, 0, rank)) for c in shrinks]
        splits = sorted({c.split_k for c in shrinks})
        jobs += [("expand", (e, p, False, k, rank)) for e in expands for k in splits]
        v_shrinks, v_expands = vllm_candidates_for(small)
        most = max(len(v_shrinks), len(v_expands))
        jobs += [("vllm", (v_shrinks[i % len(v_shrinks)], v_expands[i % len(v_expands)], p, rank)) for i in range(most)]
    return jobs


def compile_all(jobs: list[tuple[str, Any]], workers: int) -> None:
    """Compile in `workers` processes; prints what failed."""
    if not jobs:
        return
    start = time.time()
    problems = []
    with concurrent.futures.ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        for future in concurrent.futures.as_completed([pool.submit(_warm, job) for job in jobs]):
            try:
                text = future.result()
            # a compiler crash ends the workers, not the run
            except concurrent.futures.process.BrokenProcessPool as err:
                text = f"workers ended: {err}"
            if text:
                problems.append(text)
    print(f"compiled {len(jobs)} launches in {time.time() - start:.0f} s, {len(problems)} failed", flush=True)
    for text in problems[:12]:
        print("  ", text, flush=True)


# ---- search ----------------------------------------------------------------------------------------------------------


class Clock:
    """Seconds since start and what is left."""

    def __init__(self, seconds: float) -> None:
        self.start, self.seconds = time.time(), seconds

    @property
    def left(self) -> float:
        return self.seconds - (time.time() - self.start)


def fastest(
    candidates: Sequence[Any], run: Callable[[Any, Any], object], layers: Sequence[Any], replays: int = 7
) -> tuple[Any, float, list[str]]:
    """(best candidate, its us a layer, failures). run(candidate, layer) launches one projection."""
    best, best_us, failures = None, float("inf"), []
    for candidate in candidates:
        try:
            us = harness.us_per_layer(lambda layer, c=candidate: run(c, layer), layers, replays)
        except Exception as err:  # an illegal or uncompilable launch must not end the search; it is reported
            failures.append(f"{candidate}: {type(err).__name__}: {str(err)[:120]}")
            continue
        if us < best_us:
            best, best_us = candidate, us
    if best is None:
        raise RuntimeError(f"no candidate ran: {failures[:3]}")
    return best, best_us, failures


def time_shuffled(
    variants: dict[str, Callable[[Any], object]], layers: Sequence[Any], replays: int
) -> tuple[dict[str, list[float]], dict[str, dict[str, int]]]:
    """Samples (us a layer) and kernel calls of a captured chain, per variant. Every round replays them in another order.

    The GPU slows down under matrix work and recovers beside lighter work, so a fixed order would favour whoever follows it.
    """
    graphs, paths = {}, {}
    for name, fn in variants.items():
        fn(layers[0])
        reset_calls()
        graphs[name] = harness.capture(fn, layers, warmups=0)
        paths[name] = calls() or {"vendor": len(layers)}
    order = random.Random(0)
    samples: dict[str, list[float]] = {name: [] for name in graphs}
    harness.warm_up(0.5)
    for index in range(replays + 2):
        names = list(graphs)
        order.shuffle(names)
        for name in names:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graphs[name].replay()
            end.record()
            torch.cuda.synchronize()
            if index >= 2:
                samples[name].append(start.elapsed_time(end) * 1e3 / len(layers))
    return samples, paths


def settled(samples: dict[str, list[float]]) -> dict[str, float]:
    return {name: round(statistics.median(values), 1) for name, values in samples.items()}


# ---- parts -----------------------------------------------------------------------------------------------------------


# tokens, K, widths, rank, adapters
CHECKED = (
    (77, 1024, (256, 128, 128), 64, 5),
    (300, 4096, (512, 256), 16, 32),
    (1000, 2048, (512,), 128, 3),
    (33, 576, (576, 192, 192), 8, 2),
)


def check_kernels(
    results: harness.Results, shapes_checked: Sequence[tuple[int, int, tuple[int, ...], int, int]]
) -> None:
    """Every kernel against fp32 on this GPU, before any timing; prints and keeps the errors. Raises when one is off."""
    torch.manual_seed(1)
    reset_calls()
    errors: dict[str, float] = {}
    for M, K, widths, R, adapters in shapes_checked:
        slots = torch.randint(-1, adapters, (M,), device=DEV, dtype=torch.int32)
        groups = group_tokens(slots, 32)
        x = torch.randn(M, K, device=DEV, dtype=torch.bfloat16)
        a = [Operand(torch.randn(32, R, K, device=DEV, dtype=torch.bfloat16) * 0.02, Format.BF16) for _ in widths]
        b = [Operand(torch.randn(32, n, R, device=DEV, dtype=torch.bfloat16) * 0.02, Format.BF16) for n in widths]
        y0 = torch.randn(M, sum(widths), device=DEV, dtype=torch.bfloat16)
        h_ref = lora_shrink_grouped_ref(x, a, groups)
        live = slots >= 0
        for config in (None, ShrinkConfig(16, 16, 128, 2, 4, 3), ShrinkConfig(64, 16, 64, 1, 4, 3)):
            h = lora_shrink_grouped(x, a, groups, config=config)
            errors[f"shrink {M} {config}"] = harness.rms_error(h.float().sum(0)[live], h_ref[0][live])
            h = torch.where(live[None, :, None, None], h, torch.full_like(h, float("nan")))
            want = lora_expand_add_ref(y0, h.nan_to_num(0.0), b, groups)
            for expand in (None, ExpandConfig(32, 64, 2, 4)):
                y = lora_expand_add(y0.clone(), h, b, groups, config=expand, use_pdl=True)
                errors[f"expand {M} {expand}"] = harness.rms_error(y, want)
                assert torch.equal(y[~live], y0[~live]), "rows without an adapter changed"
        weight = fp8_weight(sum(widths), K)
        term = LoraTerm(h, b, slots, groups)
        want = w8a16_gemm_ref(x, weight, lora=LoraTerm(h.nan_to_num(0.0), b, slots, groups))
        for config in (
            None,
            W8A16Config(16, 64, 128, True, 2, 1, 4, 4),
            W8A16Config(128, 128, 64, False, 1, 8, 4, 2, K % 16 == 0),
        ):
            errors[f"w8a16 {M} {config}"] = harness.rms_error(w8a16_gemm(x, weight, lora=term, config=config), want)
        la, lb = [o.values[0].contiguous() for o in a], [o.values[0].contiguous() for o in b]
        dy = torch.randn(M, sum(widths), device=DEV, dtype=torch.bfloat16)
        for mode in ("registers", "panel"):
            y, h1 = train_forward(x, weight, la, lb, mode=mode)
            dx, dh = train_dx(dy, weight, la, lb, mode=mode)
            errors[f"forward {M} {mode}"] = harness.rms_error(y, train_forward_ref(x, weight, la, lb))
            errors[f"dx {M} {mode}"] = harness.rms_error(dx, train_dx_ref(dy, weight, la, lb))
        grads = lora_grads(x, dy, h1, dh, widths)
        wants = lora_grads_ref(x, dy, la, lb)
        errors[f"grads {M}"] = max(
            harness.rms_error(g, w)
            for got, ref in zip(grads, wants, strict=True)
            for g, w in zip(got, ref, strict=True)
        )
    torch.cuda.synchronize()
    worst = max(errors, key=errors.get)
    results.add(
        "check/large",
        "epilora",
        0,
        [errors[worst]],
        unit="rms_error",
        worst=worst,
        errors={k: float(f"{v:.2e}") for k, v in errors.items()},
        calls_per_path=calls(),
    )
    bad = {k: v for k, v in errors.items() if not v < 8e-3}
    print(f"check: {len(errors)} comparisons, worst {worst} {errors[worst]:.2e}; off: {bad or 'none'}", flush=True)
    if bad:
        raise SystemExit(f"kernels are wrong: {bad}")


def search_cell(
    cell: Cell, vllm: VllmLora, groups: TokenGroups, layers: list[dict[str, Hybrid]], side: torch.cuda.Stream
) -> tuple[dict[str, Choice], dict[tuple[str, int, int], dict[str, Any]], list[str]]:
    """Fastest configurations for one cell, ours and vLLM's, per projection; and what failed to run."""
    shrinks, expands = candidates_for(is_small(cell.M), cell.rank)
    v_shrinks, v_expands = vllm_candidates_for(is_small(cell.M))
    choices: dict[str, Choice] = {}
    tables: dict[tuple[str, int, int], dict[str, Any]] = {}
    failures: list[str] = []
    for p in cell.layer:
        mine = [layer[p.name] for layer in layers]

        def run(one: Hybrid, shrink: ShrinkConfig, expand: ExpandConfig, order: str) -> None:
            run_hybrid(vllm, one, groups, Choice(shrink, expand, order), side)

        legal = [c for c in shrinks if is_legal_shrink(c, p.K, cell.rank)]
        shrink, _, bad = fastest(legal, lambda c, one: run(one, c, expands[0], "two_streams"), mine)
        failures += bad
        expand, _, bad = fastest(expands, lambda c, one, s=shrink: run(one, s, c, "two_streams"), mine)
        failures += bad
        order, _, bad = fastest(ORDERS, lambda o, one, s=shrink, e=expand: run(one, s, e, o), mine)
        failures += bad
        choices[p.name] = Choice(shrink, expand, order)
        s_key, e_key = ("shrink", p.K, len(p.slices)), ("expand", max(p.slices), len(p.slices))
        tables.setdefault(e_key, v_expands[0])

        def stock(one: Hybrid, key: tuple[str, int, int], config: dict[str, Any]) -> None:
            with vllm.using(True, tables | {key: config}):
                vllm.one_stream(one)

        tables[s_key], _, bad = fastest(v_shrinks, lambda c, one, k=s_key: stock(one, k, c), mine)
        failures += bad
        tables[e_key], _, bad = fastest(v_expands, lambda c, one, k=e_key: stock(one, k, c), mine)
        failures += bad
    return choices, tables, failures


def hybrid_errors(
    cell: Cell, vllm: VllmLora, groups: TokenGroups, layer: dict[str, Hybrid], choices: dict[str, Choice], side: Any
) -> dict[str, dict[str, Any]]:
    """RMS error against fp32 of ours and of vLLM's path on the same inputs, and whether 20 runs of ours agree bit for bit."""
    errors: dict[str, dict[str, Any]] = {}
    for name in (cell.layer[0].name, "down"):
        one = layer[name]
        xq, x_scale = vllm.quantise(one.x)
        want = (xq.float() @ one.weight.values.float().t()) * x_scale * one.weight.scales
        want = lora_expand_add_ref(want, lora_shrink_grouped_ref(one.x, one.lora_a, groups), one.lora_b, groups)
        first = run_hybrid(vllm, one, groups, choices[name], side)
        errors[name] = {
            "epilora": harness.rms_error(first, want),
            "vllm": harness.rms_error(vllm.one_stream(one), want),
            "same_bits": all(torch.equal(first, run_hybrid(vllm, one, groups, choices[name], side)) for _ in range(20)),
        }
    return errors


def part_stress(results: harness.Results, rounds: int = 300) -> None:
    """Order under graphs: captured chains of the dependent launches against runs one launch at a time.

    Before every replay h, y and the GEMM's input change; the groups change in place, as a serving step changes them. The base
    GEMM is torch's, so that this needs no vLLM. Raises when one replay differs by a bit.
    """
    torch.manual_seed(2)
    M, K, widths, L = 256, 1024, (512, 256, 256), 8
    a = [Operand(torch.randn(L, RANK, K, device=DEV, dtype=torch.bfloat16) * 0.02, Format.BF16) for _ in widths]
    b = [Operand(torch.randn(L, n, RANK, device=DEV, dtype=torch.bfloat16) * 0.02, Format.BF16) for n in widths]
    x = torch.randn(M, K, device=DEV, dtype=torch.bfloat16)
    w = torch.randn(sum(widths), K, device=DEV, dtype=torch.bfloat16) * 0.02
    weight = fp8_weight(sum(widths), K)
    groups = group_tokens(token_slots(M, L), L)
    h = torch.empty(2, M, len(widths), RANK, dtype=torch.float32, device=DEV)
    y = torch.empty(M, sum(widths), dtype=torch.bfloat16, device=DEV)
    z = torch.empty(8, sum(widths), dtype=torch.bfloat16, device=DEV)
    shrink = ShrinkConfig(16, 64, 128, 2, 4, 4)
    split = W8A16Config(8, 64, 128, True, 4, 1, 4, 4)

    def chain(pdl: bool) -> None:
        for _ in range(4):
            lora_shrink_grouped(x, a, groups, out=h, config=shrink)
            torch.mm(x, w.t(), out=y)
            lora_expand_add(y, h, b, groups, use_pdl=pdl)
            w8a16_gemm(x[:8], weight, out=z, config=split, use_pdl=pdl)

    chain(True)
    torch.cuda.synchronize()
    graph = harness.capture(lambda _: chain(True), [None], warmups=1)
    differ = 0
    for index in range(rounds):
        slots = (
            torch.randint(-1, L, (M,), device=DEV, dtype=torch.int32) if index % 7 else torch.full((M,), -1, device=DEV)
        )
        now = group_tokens(slots, L)
        for kept, new in zip(
            (groups.sorted_tokens, groups.active_slots, groups.counts, groups.starts),
            (now.sorted_tokens, now.active_slots, now.counts, now.starts),
            strict=True,
        ):
            kept.copy_(new)
        x.normal_()
        h.fill_(float("nan"))
        y.fill_(float("nan"))
        z.fill_(float("nan"))
        graph.replay()
        got = y.clone(), z.clone()
        torch.cuda.synchronize()
        lora_shrink_grouped(x, a, groups, out=h, config=shrink)
        torch.cuda.synchronize()
        torch.mm(x, w.t(), out=y)
        torch.cuda.synchronize()
        lora_expand_add(y, h, b, groups)
        w8a16_gemm(x[:8], weight, out=z, config=split)
        torch.cuda.synchronize()
        differ += not (torch.equal(got[0], y) and torch.equal(got[1], z))
    facts = {"rounds": rounds, "launches_a_replay": 16, "calls_per_path": calls()}
    results.add("stress/graph_order", "epilora", M, [float(differ)], unit="differing_replays", **facts)
    print(f"stress: {differ} of {rounds} replays differ from runs one launch at a time", flush=True)
    if differ:
        raise SystemExit("a dependent launch read too early")


def part_hybrid(results: harness.Results, clock: Clock, cells: Sequence[Cell] = CELLS) -> None:
    """Layers with adapters at many tokens, against vLLM's LoRA path."""
    vllm = VllmLora()
    side = torch.cuda.Stream()
    for cell in cells:
        if clock.left < 20 + (15 if cell.M > 4096 else 0):
            print(f"hybrid {cell}: out of time", flush=True)
            continue
        start = time.time()
        torch.manual_seed(0)
        layers = hybrid_layers(cell, LAYERS)
        groups = vllm.set_batch(token_slots(cell.M, cell.adapters), cell.slots)
        chain = layers if cell.M <= 2048 else layers[:4]
        choices, tables, failures = search_cell(cell, vllm, groups, chain, side)
        searched = time.time() - start

        def stock(fn: Callable[[Hybrid], object], tuned: bool) -> Callable[[dict[str, Hybrid]], None]:
            def run(layer: dict[str, Hybrid]) -> None:
                with vllm.using(tuned, tables):
                    for one in layer.values():
                        fn(one)

            return run

        def ours(order: str | None) -> Callable[[dict[str, Hybrid]], None]:
            def run(layer: dict[str, Hybrid]) -> None:
                for name, one in layer.items():
                    c = choices[name]
                    run_hybrid(vllm, one, groups, c if order is None else replace(c, order=order), side)

            return run

        variants = {
            "vllm_no_adapter": stock(vllm.base, False),
            "vllm_lora_default": stock(vllm.one_stream, False),
            "vllm_lora_tuned": stock(vllm.one_stream, True),
            "vllm_lora_default_two_streams": stock(vllm.two_streams, False),
            "vllm_lora_tuned_two_streams": stock(vllm.two_streams, True),
            "epilora": ours(None),
        } | {f"epilora_{order}": ours(order) for order in ORDERS}
        errors = hybrid_errors(cell, vllm, groups, layers[0], choices, side)
        samples, paths = time_shuffled(variants, layers, 16 if cell.M > 4096 else 30)
        case = adapter_case(cell.adapters, cell.rank, cell.slots, cell.model)
        config = {
            name: {"order": c.order, "shrink": asdict(c.shrink), "expand": asdict(c.expand)}
            for name, c in choices.items()
        }
        for name, values in samples.items():
            facts: dict[str, Any] = {"calls_per_path": paths[name]}
            if name == "epilora":
                facts |= {"config": config, "errors": errors, "failures": failures}
            if "tuned" in name:
                facts["config"] = {"/".join(map(str, k)): v for k, v in tables.items()}
            results.add(case, name, cell.M, values, **facts)
        results.write()
        medians = settled(samples)
        best = min(v for k, v in medians.items() if k.startswith("vllm_lora"))
        base = medians["vllm_no_adapter"]
        print(
            f"hybrid {case} M={cell.M}: ours {medians['epilora']} vllm best {best} ratio "
            f"{medians['epilora'] / best:.3f} over base {medians['epilora'] / base:.3f} | "
            f"{ {k.replace('vllm_lora', 'v'): v for k, v in medians.items()} } | err "
            f"{ {n: [f'{e[k]:.2e}' for k in ('epilora', 'vllm')] + [e['same_bits']] for n, e in errors.items()} } | "
            f"searched {searched:.0f} s, all {time.time() - start:.0f} s; failures {len(failures)} {failures[:1]}",
            flush=True,
        )
        brief = {
            n: (c.order, tuple(asdict(c.shrink).values()), tuple(asdict(c.expand).values())) for n, c in choices.items()
        }
        print(f"    {brief}", flush=True)
        del layers, variants
        torch.cuda.empty_cache()


class Marlin:
    """vLLM's weight-only FP8 GEMM over its own repacked copy of the same codes."""

    def __init__(self, weight: Operand) -> None:
        from vllm.model_executor.layers.quantization.utils.marlin_utils_fp8 import (
            apply_fp8_marlin_linear,
            prepare_fp8_layer_for_marlin,
        )

        N, K = weight.values.shape
        layer = torch.nn.Module()
        layer.output_size_per_partition, layer.input_size_per_partition, layer.orig_dtype = N, K, torch.bfloat16
        layer.weight = torch.nn.Parameter(weight.values.t(), requires_grad=False)
        layer.weight_scale = torch.nn.Parameter(weight.scales.clone(), requires_grad=False)
        prepare_fp8_layer_for_marlin(layer, size_k_first=True)
        self.layer, self.N, self.K, self.apply = layer, N, K, apply_fp8_marlin_linear

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.apply(x, self.layer.weight, self.layer.weight_scale, self.layer.workspace, self.N, self.K, None)


def part_w8a16(results: harness.Results, clock: Clock, tokens: Sequence[int] = (1, 4, 8, 16)) -> None:
    """W8A16 layer without an adapter, against Marlin."""
    torch.manual_seed(0)
    layers = [{p.name: fp8_weight(p.N, p.K) for p in shapes.LAYER} for _ in range(LAYERS)]
    marlin: list[dict[str, Marlin]] | None = None
    try:
        marlin = [{name: Marlin(w) for name, w in layer.items()} for layer in layers]
    except Exception as err:  # the op may be missing from the installed vLLM: said in the rows
        results.add_failure("w8a16/qwen3-8b", "marlin", 1, f"{type(err).__name__}: {str(err)[:300]}")
        print(f"marlin: {type(err).__name__}: {str(err)[:200]}", flush=True)
    picked: dict[tuple[str, bool], W8A16Config] = {}
    for M in tokens:
        if clock.left < 20:
            print(f"w8a16 M={M}: out of time", flush=True)
            continue
        x = {K: torch.randn(M, K, device=DEV, dtype=torch.bfloat16) for K in sorted({p.K for p in shapes.LAYER})}
        failures: list[str] = []
        if M in (1, 16):  # 4 and 8 tokens take what one token takes: the same 8-token tile
            for p in shapes.LAYER:
                legal = [c for c in (W8A16_EIGHT if M <= 8 else W8A16_SIXTEEN) if is_legal_w8a16(c, p.N, p.K)]
                for pdl in (False, True):
                    config, us, bad = fastest(
                        legal,
                        lambda c, w, K=p.K, on=pdl: w8a16_gemm(x[K], w, config=c, use_pdl=on),
                        [layer[p.name] for layer in layers],
                        9,
                    )
                    picked[p.name, pdl], failures = config, failures + bad
                    print(
                        f"   w8a16 M={M} {p.name} pdl={pdl}: {us:.1f} us {tuple(asdict(config).values())}", flush=True
                    )

        def ours(layer: dict[str, Operand], pdl: bool) -> None:
            for p in shapes.LAYER:
                w8a16_gemm(x[p.K], layer[p.name], config=picked[p.name, pdl], use_pdl=pdl)

        variants: dict[str, Callable[[Any], object]] = {
            "epilora": lambda pair: ours(pair[0], False),
            "epilora_pdl": lambda pair: ours(pair[0], True),
        }
        if marlin is not None:
            variants["marlin"] = lambda pair: [pair[1][p.name](x[p.K]) for p in shapes.LAYER]
        pairs = list(zip(layers, marlin or layers, strict=True))
        errors = {}
        for p in shapes.LAYER:
            want = w8a16_gemm_ref(x[p.K], layers[0][p.name])
            runs = [
                w8a16_gemm(x[p.K], layers[0][p.name], config=picked[p.name, pdl], use_pdl=pdl) for pdl in (False, True)
            ]
            repeats = [w8a16_gemm(x[p.K], layers[0][p.name], config=picked[p.name, False]) for _ in range(50)]
            errors[p.name] = {
                "epilora": harness.rms_error(runs[0], want),
                "epilora_pdl": harness.rms_error(runs[1], want),
                "same_bits": all(torch.equal(runs[0], again) for again in repeats),
            }
            if marlin is not None:
                errors[p.name]["marlin"] = harness.rms_error(marlin[0][p.name](x[p.K]), want)
        samples, paths = time_shuffled(variants, pairs, 30)
        for name, values in samples.items():
            facts: dict[str, Any] = {"calls_per_path": paths[name]}
            if name != "marlin":
                chosen = {n: asdict(c) for (n, pdl), c in picked.items() if pdl == name.endswith("pdl")}
                facts |= {"config": chosen, "errors": errors, "failures": failures}
            results.add("w8a16/qwen3-8b", name, M, values, **facts)
        results.write()
        worst = max(e["epilora"] for e in errors.values())
        same = all(e["same_bits"] for e in errors.values())
        print(
            f"w8a16 M={M}: {settled(samples)} worst error {worst:.2e} same bits {same} failures {len(failures)}",
            flush=True,
        )
    del layers, marlin
    torch.cuda.empty_cache()


def part_training(results: harness.Results, clock: Clock, M: int = 4096, num_layers: int = LAYERS) -> None:
    """Forward and backward of the four projections, one adapter, against bf16 cuBLAS with LoRA as GEMMs of its own."""
    torch.manual_seed(0)
    bf16 = torch.bfloat16

    def one(p: shapes.Projection) -> dict[str, Any]:
        weight = fp8_weight(p.N, p.K)
        a = [torch.randn(RANK, p.K, device=DEV, dtype=bf16) * 0.02 for _ in p.slices]
        return {
            "p": p,
            "w": weight,
            "wide": (weight.values.float() * weight.scales[:, None]).to(bf16),
            "a": a,
            "a_cat": torch.cat(a),
            "b": [torch.randn(n, RANK, device=DEV, dtype=bf16) * 0.02 for n in p.slices],
            "x": torch.randn(M, p.K, device=DEV, dtype=bf16),
            "dy": torch.randn(M, p.N, device=DEV, dtype=bf16),
            "h": torch.randn(M, len(a) * RANK, device=DEV, dtype=bf16),
        }

    layers = [{p.name: one(p) for p in shapes.LAYER} for _ in range(num_layers)]

    def bf16_forward(t: dict[str, Any]) -> torch.Tensor:
        y, h, column = t["x"] @ t["wide"].t(), t["x"] @ t["a_cat"].t(), 0
        for s, b in enumerate(t["b"]):
            y[:, column : column + b.shape[0]].addmm_(h[:, s * RANK : (s + 1) * RANK], b.t())
            column += b.shape[0]
        return y

    def bf16_backward(t: dict[str, Any]) -> torch.Tensor:
        dx, column = t["dy"] @ t["wide"], 0
        dh = torch.empty_like(t["h"])
        for s, b in enumerate(t["b"]):
            torch.mm(t["dy"][:, column : column + b.shape[0]], b, out=dh[:, s * RANK : (s + 1) * RANK])
            column += b.shape[0]
        dx.addmm_(dh, t["a_cat"])
        lora_grads(t["x"], t["dy"], t["h"], dh, t["p"].slices)
        return dx

    forward: dict[str, W8A16Config] = {}
    dx_configs: dict[str, DxConfig] = {}
    failures: list[str] = []
    panel_us: dict[int, float] = {}
    for p in shapes.LAYER:
        if clock.left < 40:
            break
        mine = [layer[p.name] for layer in layers[:4]]
        legal = [c for c in TRAIN_FORWARD if is_legal_w8a16(c, p.N, p.K)]
        forward[p.name], us_f, bad = fastest(
            legal, lambda c, t: train_forward(t["x"], t["w"], t["a"], t["b"], config=c), mine, 5
        )
        legal_dx = [c for c in TRAIN_DX if is_legal_dx(c, p.N, p.K)]
        dx_configs[p.name], us_b, bad2 = fastest(
            legal_dx, lambda c, t: train_dx(t["dy"], t["w"], t["a"], t["b"], config=c), mine, 5
        )
        failures += bad + bad2
        gemm = 2 * M * p.N * p.K / 1e6
        cublas = harness.us_per_layer(lambda t: t["x"] @ t["wide"].t(), mine, 5)
        print(
            f"   training {p.name}: forward {us_f:.0f} us ({gemm / us_f:.0f} TFLOP/s) "
            f"{tuple(asdict(forward[p.name]).values())}; dx {us_b:.0f} us ({gemm / us_b:.0f}) "
            f"{tuple(asdict(dx_configs[p.name]).values())}; cuBLAS x W^T {cublas:.0f} us ({gemm / cublas:.0f})",
            flush=True,
        )

    def our_forward(t: dict[str, Any], mode: str) -> torch.Tensor:
        return train_forward(
            t["x"], t["w"], t["a"], t["b"], mode=mode, config=forward.get(t["p"].name) if mode == "registers" else None
        )[0]

    def our_backward(t: dict[str, Any], mode: str) -> torch.Tensor:
        dx, dh = train_dx(
            t["dy"],
            t["w"],
            t["a"],
            t["b"],
            mode=mode,
            config=dx_configs.get(t["p"].name) if mode == "registers" else None,
        )
        lora_grads(t["x"], t["dy"], t["h"], dh, t["p"].slices)
        return dx

    for mib in (16, 32, 64):
        training.PANEL_BYTES = mib * 2**20
        training._panels.clear()
        us = harness.us_per_layer(lambda layer: [our_forward(t, "panel") for t in layer.values()] and None, layers, 5)
        panel_us[mib] = us
    best_mib = min(panel_us, key=panel_us.__getitem__)
    training.PANEL_BYTES = best_mib * 2**20
    training._panels.clear()
    print(f"   training panels: { ({k: round(v) for k, v in panel_us.items()}) } us forward by MiB", flush=True)

    def layer_of(fn: Callable[[dict[str, Any]], object]) -> Callable[[dict[str, Any]], None]:
        return lambda layer: [fn(t) for t in layer.values()] and None

    for case, base, ours in (
        ("train_forward/qwen3-8b", bf16_forward, our_forward),
        ("train_backward/qwen3-8b", bf16_backward, our_backward),
    ):
        if clock.left < 15:
            print(f"{case}: out of time", flush=True)
            continue
        is_forward = base is bf16_forward
        errors = {}
        for name in ("qkv", "o"):
            t = layers[0][name]
            reference, source = (train_forward_ref, t["x"]) if is_forward else (train_dx_ref, t["dy"])
            want = reference(source, t["w"], t["a"], t["b"])
            errors[name] = {"bf16": harness.rms_error(base(t), want)}
            errors[name] |= {m: harness.rms_error(ours(t, m), want) for m in ("registers", "panel")}
        variants = {
            "bf16": layer_of(base),
            "epilora_registers": layer_of(lambda t, f=ours: f(t, "registers")),
            "epilora_panel": layer_of(lambda t, f=ours: f(t, "panel")),
        }
        samples, paths = time_shuffled(variants, layers, 15)
        for name, values in samples.items():
            facts: dict[str, Any] = {"calls_per_path": paths[name], "errors": errors, "failures": failures}
            if name == "epilora_registers":
                facts["config"] = {n: asdict(c) for n, c in (forward if is_forward else dx_configs).items()}
            if name == "epilora_panel":
                facts["panel_bytes"] = training.PANEL_BYTES
                results.add(case, "epilora", M, values, mode="panel", **facts)
            results.add(case, name, M, values, **facts)
        results.write()
        print(f"{case} M={M}: {settled(samples)} err {errors} failures {len(failures)} {failures[:2]}", flush=True)
    del layers
    torch.cuda.empty_cache()


def merge(path: pathlib.Path) -> None:
    """Append a run's rows to the committed results file and recompute its summary."""
    new = json.loads(path.read_text())
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {**new, "rows": [], "runs": []}
    known = {run["run_id"] for run in kept["runs"]}
    fresh = [run for run in new["runs"] if run["run_id"] not in known]
    if not fresh:
        raise SystemExit(
            f"{path}: its runs {sorted(known & {r['run_id'] for r in new['runs']})} are already in {RESULTS.name}"
        )
    ids = {run["run_id"] for run in fresh}
    for run in fresh:
        run["command"] = harness.command_line("", run["command"].split()).strip()
    kept["runs"] += fresh
    kept["rows"] += [row for row in new["rows"] if row["run_id"] in ids]
    whole = {k: v for k, v in kept.items() if k not in ("rows", "summary")} | {"summary": summarise(kept["rows"])}
    harness.write_results(RESULTS, whole, kept["rows"])
    print(f"{RESULTS}: {len(ids)} run(s), {sum(row['run_id'] in ids for row in kept['rows'])} rows appended")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, help="JSON file to write")
    parser.add_argument("--merge", type=pathlib.Path, help="append this run to the committed results and stop")
    parser.add_argument("--parts", default="check,stress,w8a16,training,hybrid")
    parser.add_argument("--seconds", type=float, default=560.0, help="stop starting new cases after this")
    parser.add_argument("--workers", type=int, default=min(14, os.cpu_count() or 1))
    parser.add_argument("--cells", default="", help="tokens:adapters[:rank] of the hybrid part, comma separated")
    args = parser.parse_args()
    if args.merge:
        merge(args.merge)
        return
    if args.out is None:
        parser.error("--out is needed to measure")
    clock = Clock(args.seconds)
    parts = args.parts.split(",")
    command = harness.command_line("python -m benchmarks.kernels.large", sys.argv[1:])
    results = harness.Results(args.out, summarise, command)
    cells = [Cell(*map(int, pair.split(":"))) for pair in args.cells.split(",") if pair] or CELLS
    compile_all(compile_jobs(parts, cells), args.workers)
    steps: dict[str, Callable[[], None]] = {
        "check": lambda: check_kernels(results, CHECKED),
        "check_small": lambda: check_kernels(results, CHECKED[-1:]),
        "w8a16": lambda: part_w8a16(results, clock),
        "stress": lambda: part_stress(results),
        "training": lambda: part_training(results, clock),
        "hybrid": lambda: part_hybrid(results, clock, cells),
    }
    for part in parts:
        steps[part]()
        print(f"[{part} done, {clock.left:.0f} s left]", flush=True)
    results.write()


if __name__ == "__main__":
    main()
