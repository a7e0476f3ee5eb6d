"""An adapter that several ranks train together: each holds and steps what its layers read (`ranks.Cut`).

In a rank's flat vectors what every rank has comes first, so that its gradients are summed by one collective before a step;
what is cut follows. All ranks then step by themselves: the same numbers for what all have.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from epilora.types import AdapterSpec

from .ranks import Cut, RankGroup
from .session import Key, Layout, Session


class ShardedSession(Session):
    """As `Session`; what is given and returned is the whole adapter. Methods are called on all ranks together."""

    def __init__(
        self,
        name: str,
        spec: AdapterSpec,
        optimizer: Mapping[str, Any],
        seed: int,
        cuts: Mapping[str, Cut],
        group: RankGroup,
        device: torch.device | None = None,
    ) -> None:
        """cuts: this rank's part of each module that may be adapted; the rest as for `Session`."""
        self._cuts, self._group = cuts, group
        self._common = 0  # elements at the head of the flat vectors that every rank has
        self._gathered: torch.Tensor | None = None
        super().__init__(name, spec, optimizer, seed, {m: (cut.N, cut.K) for m, cut in cuts.items()}, device)

    def _part(self, key: Key, tensor: torch.Tensor) -> torch.Tensor:
        cut = self._cuts[key[0]]
        return cut.of_a(tensor) if key[1] == "A" else cut.of_b(tensor)

    def _is_cut(self, key: Key) -> bool:
        return self._cuts[key[0]].by_rows == (key[1] == "B")

    def _held_here(self, whole: Layout) -> Layout:
        shapes: dict[Key, tuple[int, int]] = {}
        for key in sorted(whole.places, key=self._is_cut):
            rows, columns = self._part(key, torch.empty(whole.places[key][1], device="meta")).shape
            shapes[key] = (rows, columns)
            if not self._is_cut(key):
                self._common += rows * columns
        return Layout.of(shapes)

    def _gradient_norm(self) -> float:
        common, own = self.grad[: self._common], self.grad[self._common :]
        self._group.sum_(common)
        return math.sqrt(float(self._group.sum_(own.square().sum()) + common.square().sum()))

    def whole(self, flat: torch.Tensor) -> torch.Tensor:
        return self._gather(flat, torch.empty(self._whole.size, device=flat.device))

    def _gather(self, flat: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
        """Every rank's elements, bit for bit: each lies on one rank's vector, the others add the integer zero."""
        into.zero_()
        with torch.no_grad():
            for key in self._whole.places:
                if self._is_cut(key) or self._group.rank == 0:
                    self._part(key, self._whole.view(into, key)).copy_(self._held.view(flat, key))
        self._group.sum_(into.view(torch.int32))
        return into

    def _whole_in_place(self) -> torch.Tensor:
        if self._gathered is None:
            self._gathered = torch.empty(self._whole.size, device=self.theta.device)
        return self._gather(self.theta, self._gathered)
