"""Variable-length sequences into micro-batches under a budget of tokens.

Right-padded [B, T], or packed: one row of whole sequences one after the other, without padding (`attention.py`).
Sequences are sorted by length, so that little of a padded micro-batch is padding; the order is a pure function of the
lengths and positions. Completion tokens of all sequences form one flat axis in the caller's order (`Layout`), whichever
micro-batch computes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

TokenPair = tuple[tuple[int, ...], tuple[int, ...]]  # (prompt ids, completion ids)


@dataclass(frozen=True)
class Layout:
    """Where each sequence's completion tokens lie on the flat axis.

    lengths [S] int64; starts [S] int64; sequence [T] int64: which sequence a flat token belongs to.
    """

    lengths: torch.Tensor
    starts: torch.Tensor
    sequence: torch.Tensor

    @property
    def num_tokens(self) -> int:
        return int(self.sequence.numel())


@dataclass(frozen=True)
class MicroBatch:
    """ids [B, T] int64, right-padded with 0, or packed [1, T]. For each completion token of its sequences: rows,
    positions (of the hidden state that predicts it) and targets, all [n] int64, and flat [n]: its place on the flat
    axis. Sequences are whole. lengths: of the packed sequences in order; empty where they are padded. spans: (owner, first
    row, end row) of ids.flatten(), where sequences have owners.
    """

    ids: torch.Tensor
    rows: torch.Tensor
    positions: torch.Tensor
    targets: torch.Tensor
    flat: torch.Tensor
    lengths: tuple[int, ...] = ()
    spans: tuple[tuple[int, int, int], ...] = ()


def layout_of(sequences: Sequence[TokenPair]) -> Layout:
    """The flat axis of `sequences`. Raises ValueError naming a sequence without a prompt or a completion."""
    for index, (prompt, completion) in enumerate(sequences):
        if not prompt or not completion:
            raise ValueError(
                f"sequence {index} has {len(prompt)} prompt and {len(completion)} completion tokens; both need at "
                f"least one"
            )
    lengths = torch.tensor([len(completion) for _, completion in sequences], dtype=torch.long)
    starts = torch.cumsum(lengths, 0) - lengths
    return Layout(lengths, starts, torch.repeat_interleave(torch.arange(len(sequences)), lengths))


def micro_batches(
    sequences: Sequence[TokenPair],
    layout: Layout,
    budget: int,
    *,
    packed: bool = False,
    owners: Sequence[int] | None = None,
) -> list[MicroBatch]:
    """Cover every sequence once; each micro-batch has at most `budget` tokens, padding counted, or one longer sequence.

    owners: whose each sequence is; within a micro-batch an owner's sequences are consecutive.
    """
    order = sorted(range(len(sequences)), key=lambda i: (-len(sequences[i][0]) - len(sequences[i][1]), i))
    groups: list[list[int]] = []
    used = width = 0
    for index in order:
        length = sum(map(len, sequences[index]))
        width = max(width, length)
        taken = used + length if packed else (len(groups[-1]) + 1) * width if groups else 0
        if groups and taken <= budget:
            groups[-1].append(index)
            used += length
        else:
            groups.append([index])
            used = width = length
    assemble = _pack if packed else _pad
    if owners is None:
        return [assemble(sequences, layout, group) for group in groups]
    made = []
    for group in groups:
        group.sort(key=lambda i: owners[i])  # stable: by length within an owner
        micro = assemble(sequences, layout, group)
        made.append(replace(micro, spans=_spans([owners[i] for i in group], micro)))
    return made


def _spans(owners: Sequence[int], micro: MicroBatch) -> tuple[tuple[int, int, int], ...]:
    lengths = micro.lengths or (micro.ids.shape[1],) * len(owners)
    spans: list[tuple[int, int, int]] = []
    start = 0
    for owner, length in zip(owners, lengths, strict=True):
        if spans and spans[-1][0] == owner:
            spans[-1] = (owner, spans[-1][1], start + length)
        else:
            spans.append((owner, start, start + length))
        start += length
    return tuple(spans)


def _pad(sequences: Sequence[TokenPair], layout: Layout, members: list[int]) -> MicroBatch:
    width = max(sum(map(len, sequences[i])) for i in members)
    ids = torch.zeros(len(members), width, dtype=torch.long)
    rows, positions, flat = [], [], []
    for row, index in enumerate(members):
        prompt, completion = sequences[index]
        ids[row, : len(prompt) + len(completion)] = torch.tensor([*prompt, *completion])
        count = len(completion)
        rows.append(torch.full((count,), row))
        positions.append(torch.arange(len(prompt) - 1, len(prompt) - 1 + count))
        flat.append(layout.starts[index] + torch.arange(count))
    row_index, position = torch.cat(rows), torch.cat(positions)
    return MicroBatch(ids, row_index, position, ids[row_index, position + 1], torch.cat(flat))


def _pack(sequences: Sequence[TokenPair], layout: Layout, members: list[int]) -> MicroBatch:
    ids: list[int] = []
    positions, flat, lengths = [], [], []
    for index in members:
        prompt, completion = sequences[index]
        first = len(ids) + len(prompt) - 1
        positions.append(torch.arange(first, first + len(completion)))
        flat.append(layout.starts[index] + torch.arange(len(completion)))
        ids += [*prompt, *completion]
        lengths.append(len(prompt) + len(completion))
    row, position = torch.tensor([ids]), torch.cat(positions)
    return MicroBatch(row, torch.zeros_like(position), position, row[0, position + 1], torch.cat(flat), tuple(lengths))
