"""The linear projections of real models, and the batches they are measured at. Benchmarks pick shapes only from here.

Legend: K in features, N out features (`slices` are the widths of the parts packed along N), M tokens, R rank.
Tensor parallelism: projections fed by the hidden state split N (column parallel); `o`, `down`, `linear_out` split K.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Projection:
    """One linear projection: y [M, sum(slices)] = x [M, K] W^T.

    name: role in the decoder layer. K: in features. slices: widths packed along N. per_model: how many the model has.
    """

    name: str
    K: int
    slices: tuple[int, ...]
    per_model: int

    @property
    def N(self) -> int:
        return sum(self.slices)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the FP8 codes."""
        return self.K * self.N

    def adapter_bytes(self, rank: int, bytes_per_value: int = 2) -> int:
        """Bytes of one adapter's A (one per slice) and B."""
        return rank * (self.K * len(self.slices) + self.N) * bytes_per_value

    def shard(self, tp_size: int) -> Projection:
        """The projection as one of `tp_size` tensor-parallel ranks holds it. Raises ValueError if it does not divide."""
        if self.name in ROW_PARALLEL:
            if self.K % tp_size:
                raise ValueError(f"{self.name}: K={self.K} does not divide by tp_size={tp_size}")
            return Projection(self.name, self.K // tp_size, self.slices, self.per_model)
        if any(n % tp_size for n in self.slices):
            raise ValueError(f"{self.name}: slices={self.slices} do not divide by tp_size={tp_size}")
        return Projection(self.name, self.K, tuple(n // tp_size for n in self.slices), self.per_model)


ROW_PARALLEL = frozenset({"o", "down", "linear_out"})


def _model(*projections: tuple[str, int, tuple[int, ...], int]) -> tuple[Projection, ...]:
    return tuple(Projection(*p) for p in projections)


# Projections of one model, each once. Layers that mix attention kinds list both kinds.
MODELS: dict[str, tuple[Projection, ...]] = {
    "qwen3-8b": _model(
        ("qkv", 4096, (4096, 1024, 1024), 36),
        ("o", 4096, (4096,), 36),
        ("gate_up", 4096, (12288, 12288), 36),
        ("down", 12288, (4096,), 36),
    ),
    "llama-3.1-8b": _model(
        ("qkv", 4096, (4096, 1024, 1024), 32),
        ("o", 4096, (4096,), 32),
        ("gate_up", 4096, (14336, 14336), 32),
        ("down", 14336, (4096,), 32),
    ),
    "qwen3.5-9b": _model(
        ("qkv", 4096, (8192, 1024, 1024), 8),
        ("o", 4096, (4096,), 8),
        ("linear_in", 4096, (2048, 2048, 4096, 4096), 24),
        ("linear_out", 4096, (4096,), 24),
        ("gate_up", 4096, (12288, 12288), 32),
        ("down", 12288, (4096,), 32),
    ),
    "qwen3.5-27b": _model(
        ("qkv", 5120, (12288, 1024, 1024), 16),
        ("o", 6144, (5120,), 16),
        ("linear_in", 5120, (2048, 2048, 6144, 6144), 48),
        ("linear_out", 6144, (5120,), 48),
        ("gate_up", 5120, (17408, 17408), 64),
        ("down", 17408, (5120,), 64),
    ),
    "qwen2.5-72b": _model(
        ("qkv", 8192, (8192, 1024, 1024), 80),
        ("o", 8192, (8192,), 80),
        ("gate_up", 8192, (29568, 29568), 80),
        ("down", 29568, (8192,), 80),
    ),
    "smollm2-135m": _model(
        ("qkv", 576, (576, 192, 192), 30),
        ("o", 576, (576,), 30),
        ("gate_up", 576, (1536, 1536), 30),
        ("down", 1536, (576,), 30),
    ),
}


def sharded(layer: tuple[Projection, ...], tp_size: int) -> tuple[Projection, ...]:
    """A layer as one of `tp_size` tensor-parallel ranks holds it. Raises ValueError if a projection does not divide."""
    return layer if tp_size == 1 else tuple(p.shard(tp_size) for p in layer)


# The decoder layer most figures are about: its four projections, once each.
LAYER = MODELS["qwen3-8b"]

DECODE_TOKENS = (1, 2, 4, 8, 16, 32)
BATCH_TOKENS = (64, 128, 256, 512)
PREFILL_TOKENS = (2048, 8192)
RANKS = (16, 64, 128)


def layer_weight_bytes(layer: tuple[Projection, ...] = LAYER) -> int:
    """Bytes of the FP8 codes of one layer: what decoding must read at least."""
    return sum(p.weight_bytes for p in layer)


def layer_adapter_bytes(rank: int, layer: tuple[Projection, ...] = LAYER, bytes_per_value: int = 2) -> int:
    """Bytes of one adapter's matrices for one layer."""
    return sum(p.adapter_bytes(rank, bytes_per_value) for p in layer)
