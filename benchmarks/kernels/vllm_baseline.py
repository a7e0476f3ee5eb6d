"""vLLM's own kernels on the same tensors: quantise + CUTLASS, its LoRA shrink and expand, default or tuned, one or two streams.

"Tuned" means: for each projection, the fastest of a handful of launch configurations of vLLM's shrink and of its expand, timed
alone on this GPU. The choice is handed to vLLM where it would read a tuned-config file.

    python -m benchmarks.kernels.vllm_baseline --warm 0 4    # compile every fourth configuration ahead of time
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from benchmarks.harness import capture, time_graphs
from benchmarks.kernels.layers import ProjectionData, projection_data, with_tokens
from benchmarks.shapes import LAYER

Config = dict[str, int | None]


def _shrink(block_m: int, block_n: int, block_k: int, split_k: int, num_warps: int, num_stages: int) -> Config:
    return dict(
        block_m=block_m, block_n=block_n, block_k=block_k, split_k=split_k, num_warps=num_warps, num_ctas=1, group_size_m=8,
        num_stages=num_stages, max_nreg=None,
    )  # fmt: skip


def _expand(block_m: int, block_n: int, block_k: int, num_warps: int, num_stages: int) -> Config:
    return dict(
        block_m=block_m,
        block_n=block_n,
        block_k=block_k,
        num_warps=num_warps,
        num_ctas=1,
        num_stages=num_stages,
        max_nreg=None,
    )


SHRINK = [
    _shrink(16, 64, 256, 16, 4, 3),
    _shrink(16, 32, 256, 32, 4, 2),
    _shrink(16, 64, 128, 32, 4, 3),
    _shrink(16, 16, 256, 16, 4, 3),
]
EXPAND = [_expand(16, 128, 64, 4, 2), _expand(16, 64, 64, 4, 2), _expand(16, 256, 64, 8, 2), _expand(32, 128, 64, 8, 2)]

_chosen: dict[tuple[str, int, int], Config] = {}  # (op, hidden size, slices) -> configuration; empty: vLLM's default


def _patch() -> None:
    """Let vLLM's ops ask `_chosen` before their own table. Once a process."""
    from vllm.lora.ops.triton_ops import lora_expand_op, lora_shrink_op

    for module in (lora_shrink_op, lora_expand_op):
        if getattr(module, "_epilora_patched", False):
            continue
        stock = module.get_lora_op_configs

        def ask(op_type, max_loras, batch, hidden_size, rank, num_slices, add_inputs=None, stock=stock):
            found = _chosen.get((op_type, hidden_size, num_slices))
            return (
                found
                if found is not None
                else stock(op_type, max_loras, batch, hidden_size, rank, num_slices, add_inputs)
            )

        module.get_lora_op_configs = ask
        module._epilora_patched = True


def op_key(op: str, data: ProjectionData) -> tuple[str, int, int]:
    """What vLLM looks a configuration up by: shrink by K, expand by the widest slice."""
    return (op, data.shape.K if op == "shrink" else max(data.shape.slices), len(data.shape.slices))


@contextlib.contextmanager
def configured(chosen: dict[tuple[str, int, int], Config]) -> Iterator[None]:
    """Within the block vLLM's LoRA kernels launch with these configurations."""
    _patch()
    _chosen.update(chosen)
    try:
        yield
    finally:
        _chosen.clear()


class VllmLayer:
    """vLLM's paths for M tokens with given slots. Each path is a function of one layer's projections."""

    def __init__(self, M: int, slots: torch.Tensor, num_slots: int, rank: int) -> None:
        from vllm.lora.ops.triton_ops import LoRAKernelMeta

        _patch()
        self.M, self.rank = M, rank
        self.meta = LoRAKernelMeta.make(num_slots, max(64, M), "cuda")
        self.meta.prepare_tensors(slots)
        self.args = self.meta.meta_args(M, False)
        self.side = torch.cuda.Stream()

    def base(self, d: ProjectionData) -> torch.Tensor:
        """Quantise per token, then CUTLASS."""
        import vllm._custom_ops as ops

        xq, x_scale = ops.scaled_fp8_quant(d.x, use_per_token_if_dynamic=True)
        return ops.cutlass_scaled_mm(xq, d.weight.values.t(), x_scale, d.weight.scales[None], torch.bfloat16)

    def shrink(self, d: ProjectionData) -> torch.Tensor:
        from vllm.lora.ops.triton_ops import lora_shrink

        h = torch.empty(len(d.shape.slices), self.M, self.rank, dtype=torch.float32, device="cuda")
        lora_shrink(d.x, [o.values[:, None] for o in d.lora_a], h, *self.args, 1.0)
        return h

    def expand(self, d: ProjectionData, h: torch.Tensor, y: torch.Tensor, add: bool) -> torch.Tensor:
        from vllm.lora.ops.triton_ops import lora_expand

        lora_expand(h, [o.values[:, None] for o in d.lora_b], y, *self.args, offset_start=0, add_inputs=add)
        return y

    def no_adapter(self, layer: list[ProjectionData]) -> None:
        for d in layer:
            self.base(d)

    def beside(self, d: Any, base: Callable[[Any], torch.Tensor], *, streams: int) -> torch.Tensor:
        """One projection with adapters, whatever GEMM `base` is. streams: 2 runs the adapters on a stream of their own."""
        if streams == 1:
            return self.expand(d, self.shrink(d), base(d), True)
        current, before, after = torch.cuda.current_stream(), torch.cuda.Event(), torch.cuda.Event()
        before.record()
        with torch.cuda.stream(self.side):
            self.side.wait_event(before)
            zeros = torch.zeros(self.M, d.shape.N, dtype=torch.bfloat16, device="cuda")
            delta = self.expand(d, self.shrink(d), zeros, False)
            after.record()
        y = base(d)
        current.wait_event(after)
        return y.add_(delta)

    def one_stream(self, layer: list[ProjectionData]) -> None:
        for d in layer:
            self.beside(d, self.base, streams=1)

    def two_streams(self, layer: list[ProjectionData]) -> None:
        for d in layer:
            self.beside(d, self.base, streams=2)


def tune(
    layers: list[list[ProjectionData]],
    vllm_layer: VllmLayer,
    replays: int = 5,
    candidates: tuple[Sequence[Config], Sequence[Config]] | None = None,
) -> dict[tuple[str, int, int], Config]:
    """Fastest configuration for every projection's shrink and expand; absent where the default is fastest.

    candidates: shrink's and expand's configurations to try; None for this module's, made for few tokens.
    """
    shrinks, expands = candidates or (SHRINK, EXPAND)
    chosen: dict[tuple[str, int, int], Config] = {}
    for i in range(len(layers[0])):
        chain = [one[i] for one in layers]
        h = {id(d): vllm_layer.shrink(d) for d in chain}
        runs: dict[str, tuple[Sequence[Config], Callable[[ProjectionData], object]]] = {
            "shrink": (shrinks, vllm_layer.shrink),
            "expand": (expands, lambda d, h=h: vllm_layer.expand(d, h[id(d)], d.y, True)),
        }
        for op, (configs, fn) in runs.items():
            key = op_key(op, chain[0])
            graphs = {"default": capture(fn, chain, warmups=1)}
            for n, config in enumerate(configs):
                with configured({key: config}):
                    graphs[str(n)] = capture(fn, chain, warmups=1)
            times = {name: statistics.median(t) for name, t in time_graphs(graphs, len(chain), replays).items()}
            best = min(times, key=times.__getitem__)
            if best != "default":
                chosen[key] = configs[int(best)]
    return chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--warm", type=int, nargs=2, metavar=("INDEX", "COUNT"), required=True)
    args = parser.parse_args()
    index, count = args.warm
    jobs = [("shrink", c) for c in [None, *SHRINK]] + [("expand", c) for c in [None, *EXPAND]]
    data = [projection_data(p, 1, 64, 32) for p in LAYER]
    for M in (1, 8, 32):
        vllm_layer = VllmLayer(M, torch.zeros(M, dtype=torch.int32, device="cuda"), 32 if M == 32 else 8, 64)
        for op, config in jobs[index::count]:
            for d in data:
                dm = with_tokens(d, M)
                with configured({op_key(op, dm): config} if config else {}):
                    if op == "shrink":
                        vllm_layer.shrink(dm)
                    else:
                        h = torch.zeros(len(d.shape.slices), M, 64, dtype=torch.float32, device="cuda")
                        vllm_layer.expand(dm, h, dm.y, True)
                        if config is None:
                            vllm_layer.expand(dm, h, dm.y, False)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
