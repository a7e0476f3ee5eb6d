"""Tensor-parallel ranks of one trainer: the collectives, and which part of a layer a rank has.

A linear layer y = x W^T is cut as an engine cuts it (Megatron-LM, arXiv 1909.08053). Column-parallel: a rank has rows of W
and, of an adapter, the same rows of B and all of A; x is whole, y is cut. Row-parallel: a rank has columns of W, the same
columns of A and all of B; x is cut, and the ranks' products are parts of a sum. So

    what is cut (B of a column-, A of a row-parallel layer)     its gradient is complete on its rank
    what every rank has (A of a column-, B of a row-parallel)   its gradient is the sum of all ranks'

Embedding and output head are cut by rows of the vocabulary.

Legend: N out features, K in features of the whole layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from epilora.adapters.digest import ranks_digest
from epilora.errors import UnsupportedKernel
from epilora.quant.manifest import WeightManifest


class RankGroup:
    """This process's rank among `size`; every method is called by all ranks together, in the same order."""

    def __init__(self, rank: int, size: int, store_path: str, device: torch.device, timeout_s: float) -> None:
        """Meet the other ranks through the file `store_path`: gloo between CPUs, NCCL between GPUs.

        timeout_s: bound on meeting and on every collective; a rank that does not come makes the others raise.
        """
        self.rank, self.size = rank, size
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=dist.FileStore(store_path, size),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout_s),
            device_id=device if device.type == "cuda" else None,
        )

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, in place (the same bits on every rank); returns it."""
        dist.all_reduce(tensor)
        return tensor

    def max_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Largest over ranks, in place; returns it."""
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return tensor

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """x, which is whole, on its way into layers that are cut: its gradient is the sum of the ranks'."""
        return _Enter.apply(x, self)

    def total(self, y: torch.Tensor) -> torch.Tensor:
        """The sum of the ranks' parts y, on every rank."""
        return _Total.apply(y, self)

    def close(self) -> None:
        dist.destroy_process_group()


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: RankGroup) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.group.sum_(grads[0].clone(memory_format=torch.contiguous_format)), None


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, group: RankGroup) -> torch.Tensor:
        return group.sum_(y.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


@dataclass(frozen=True)
class Cut:
    """A rank's part of a linear layer [N, K]: rows [start, stop) if `by_rows` (column-parallel), else columns."""

    N: int
    K: int
    by_rows: bool
    start: int
    stop: int

    def of_a(self, a: torch.Tensor) -> torch.Tensor:
        """This rank's part of A [R, K], a view."""
        return a if self.by_rows else a[:, self.start : self.stop]

    def of_b(self, b: torch.Tensor) -> torch.Tensor:
        """This rank's part of B [N, R], a view."""
        return b[self.start : self.stop] if self.by_rows else b

    def of_weight(self, w: torch.Tensor) -> torch.Tensor:
        """This rank's part of W [N, K], a view."""
        return w[self.start : self.stop] if self.by_rows else w[:, self.start : self.stop]


@dataclass(frozen=True)
class VocabCut:
    """A rank's rows of embedding and head: from `start` on; `widest`: the largest count of rows that a rank has."""

    group: RankGroup
    start: int
    widest: int


class Ranks:
    """What one rank of a trainer knows of the others: their manifests and the group."""

    def __init__(self, manifests: Sequence[WeightManifest], group: RankGroup) -> None:
        """manifests: of all ranks of one engine, in any order. Raises UnsupportedKernel if they are not `group.size`."""
        self.manifests = in_rank_order(manifests)
        self.group = group
        if len(self.manifests) != group.size:
            raise UnsupportedKernel(
                f"this trainer has {group.size} ranks, the engine exported {_names(manifests)}; give both the same "
                "tensor_parallel"
            )
        self._slices = [_slices(manifest) for manifest in self.manifests]

    @property
    def manifest(self) -> WeightManifest:
        """Of this rank."""
        return self.manifests[self.group.rank]

    @property
    def base_digest(self) -> str:
        """Of the whole base."""
        return ranks_digest([manifest.base_digest for manifest in self.manifests])

    def cut(self, module: str, N: int, K: int) -> Cut:
        """This rank's part of the checkpoint's linear layer `module` [N, K].

        Raises UnsupportedKernel if the ranks' parts do not make up the layer once (repeated key and value heads, say).
        """
        parts = [found.get(module, (0, 0)) for found in self._slices]
        rows, columns = [n for n, _ in parts], [k for _, k in parts]
        rank = self.group.rank
        if sum(rows) == N and set(columns) == {K}:
            return Cut(N, K, True, sum(rows[:rank]), sum(rows[: rank + 1]))
        if sum(columns) == K and set(rows) == {N}:
            return Cut(N, K, False, sum(columns[:rank]), sum(columns[: rank + 1]))
        raise UnsupportedKernel(
            f"{module} [{N}, {K}] is exported as {parts} by {len(parts)} ranks; a sharded trainer needs each part of it on "
            "one rank: use a tensor_parallel that divides heads, key and value heads, and features"
        )

    def vocab(self, name: str, vocab_size: int) -> VocabCut:
        """This rank's rows of the table `name` (`model.embed_tokens`, `lm_head`) of `vocab_size` rows."""
        rows = [manifest.entry(name).values.shape[0] for manifest in self.manifests]
        if sum(rows) < vocab_size:
            raise UnsupportedKernel(f"{name}: the ranks' {rows} rows are fewer than the vocabulary's {vocab_size}")
        return VocabCut(self.group, sum(rows[: self.group.rank]), max(rows))


def in_rank_order(manifests: Sequence[WeightManifest]) -> tuple[WeightManifest, ...]:
    """The manifests of one engine by rank. Raises UnsupportedKernel if a rank is missing or there are two of one."""
    ordered = sorted(manifests, key=lambda manifest: manifest.tp_rank)
    size = ordered[0].tp_size if ordered else 1
    if [(m.tp_rank, m.tp_size) for m in ordered] != [(rank, size) for rank in range(size)]:
        raise UnsupportedKernel(f"a trainer attaches to all ranks of one engine, got {_names(manifests)}")
    return tuple(ordered)


def _names(manifests: Sequence[WeightManifest]) -> list[str]:
    return [f"{m.engine} rank {m.tp_rank}/{m.tp_size}" for m in manifests]


def _slices(manifest: WeightManifest) -> dict[str, tuple[int, int]]:
    """Checkpoint module -> (rows, columns) that a rank has of it."""
    found = {}
    for entry in manifest.entries:
        parent = entry.name.rpartition(".")[0]
        for leaf, rows in entry.slices:
            found[f"{parent}.{leaf}" if parent else leaf] = (rows, entry.values.shape[1])
    return found
