"""What a trainer needs of a base, wherever its tensors are: mapped from an engine, or this process's own."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Protocol

from epilora.quant.manifest import WeightManifest
from epilora.quant.operand import Operand


class BaseWeights(Protocol):
    """The tensors of a manifest by entry name. paths: the files they are mapped from, if any."""

    @property
    def manifest(self) -> WeightManifest: ...

    @property
    def operands(self) -> Mapping[str, Operand]: ...

    @property
    def paths(self) -> tuple[str, ...]: ...

    def digest(self) -> str: ...

    def loaded(self) -> AbstractContextManager[None]:
        """Inside, the tensors are where computing needs them."""
        ...

    def wait_for_layer(self, index: int) -> None:
        """Called before decoder layer `index` computes."""
        ...
