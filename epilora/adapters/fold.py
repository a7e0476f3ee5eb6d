"""From PEFT's tensors to what a slot holds: per module A [R, K] and B [N, R] with the scaling folded in, and checks.

    delta W = scaling * B A      ->      B' = scaling * B, once, in fp32

scaling = alpha / rank (alpha / sqrt(rank) with rsLoRA), with rank and alpha possibly set per module by patterns. A
pattern is PEFT's: a regular expression that must match the module's name to its end, starting at the beginning or after
a dot; the first that matches wins.

Every check names the module, what it has and what it should have. Source of the semantics: PEFT's `LoraConfig`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from epilora.errors import AdapterRejected
from epilora.types import AdapterSpec

from .digest import as_tensor, weights_digest

PREFIX = "base_model.model."
ALL_LINEAR = "all-linear"
_KEY = re.compile(r"^(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<side>[AB])(?:\.default)?\.weight$")
_T = TypeVar("_T")


@dataclass(frozen=True)
class LinearModule:
    """A linear layer of the base as an adapter sees it: checkpoint-side name, out features N, in features K."""

    name: str
    out_features: int
    in_features: int


@dataclass(frozen=True)
class FoldedModule:
    """One module's adapter. a_RK: [R, K] fp32; b_NR: [N, R] fp32 with `scaling` already in it."""

    a_RK: torch.Tensor
    b_NR: torch.Tensor
    scaling: float

    @property
    def rank(self) -> int:
        return self.a_RK.shape[0]

    def padded(self, rank: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """(A [rank, K], B [N, rank]) in `dtype`, zeros past this module's rank."""
        if self.rank == rank:
            return self.a_RK.to(dtype), self.b_NR.to(dtype)
        a_RK = torch.zeros(rank, self.a_RK.shape[1], dtype=dtype, device=self.a_RK.device)
        b_NR = torch.zeros(self.b_NR.shape[0], rank, dtype=dtype, device=self.b_NR.device)
        a_RK[: self.rank] = self.a_RK.to(dtype)
        b_NR[:, : self.rank] = self.b_NR.to(dtype)
        return a_RK, b_NR


def _first_match(patterns: Iterable[tuple[str, _T]], module: str) -> _T | None:
    for pattern, value in patterns:
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return None


def module_rank_and_scaling(spec: AdapterSpec, module: str) -> tuple[int, float]:
    """(rank, scaling) of one module under the spec's patterns."""
    rank = _first_match(spec.rank_pattern, module)
    alpha = _first_match(spec.alpha_pattern, module)
    rank = spec.rank if rank is None else rank
    alpha = spec.alpha if alpha is None else alpha
    return rank, alpha / (math.sqrt(rank) if spec.use_rslora else rank)


def is_target(spec: AdapterSpec, module: str) -> bool:
    """Whether the spec's target_modules (names or dotted suffixes; `all-linear` for all) cover a module."""
    return any(target in (ALL_LINEAR, module) or module.endswith("." + target) for target in spec.target_modules)


def largest_magnitudes(tensors: Sequence[torch.Tensor]) -> list[float]:
    """max |x| of each tensor, NaN if it holds one, 0 if it is empty; one synchronisation for all."""
    if not tensors:
        return []
    norms = torch._foreach_norm([tensor if tensor.numel() else tensor.new_zeros(1) for tensor in tensors], math.inf)
    return torch.stack([norm.float() for norm in norms]).tolist()


def fold(spec: AdapterSpec, tensors: Mapping[str, Any]) -> dict[str, FoldedModule]:
    """Per checkpoint module: A and scaled B, fp32, in tensors of their own (the caller's are never written to), on the
    device the given ones are on.

    tensors: PEFT's keys (`base_model.model.<module>.lora_A.weight`), torch or numpy.
    Raises AdapterRejected: a key that is no LoRA weight, A without B, wrong dimensions or rank, values that are not
    finite, a module that target_modules does not cover, no module at all.
    """
    if spec.rank < 1 or not math.isfinite(spec.alpha):
        raise AdapterRejected(
            f"adapter spec has rank={spec.rank}, alpha={spec.alpha}; rank must be >= 1 and alpha finite"
        )
    sides: dict[str, dict[str, torch.Tensor]] = {}
    given: dict[str, torch.Tensor] = {}
    for key, value in tensors.items():
        match = _KEY.match(key)
        if match is None:
            raise AdapterRejected(
                f"tensor {key!r} is no LoRA weight; expected {PREFIX}<module>.lora_A.weight or .lora_B.weight"
            )
        tensor = value.detach() if isinstance(value, torch.Tensor) else as_tensor(value)
        if tensor.dim() != 2 or not tensor.is_floating_point():
            raise AdapterRejected(
                f"tensor {key!r} has shape {tuple(tensor.shape)}, dtype {tensor.dtype}; expected a float matrix"
            )
        given[key] = tensor
        sides.setdefault(match["module"], {})[match["side"]] = tensor
    if not sides:
        raise AdapterRejected("adapter has no LoRA tensors: it would change nothing; check how it was saved")
    for key, largest in zip(given, largest_magnitudes(list(given.values())), strict=True):
        if not math.isfinite(largest):
            raise AdapterRejected(f"tensor {key!r} holds values that are not finite")
    scalings: dict[str, float] = {}
    for module, pair in sides.items():
        if set(pair) != {"A", "B"}:
            raise AdapterRejected(f"module {module!r} has lora_{min(pair)} only; it needs lora_A and lora_B")
        if not is_target(spec, module):
            raise AdapterRejected(
                f"module {module!r} has tensors but is not among target_modules {list(spec.target_modules)}"
            )
        rank, scalings[module] = module_rank_and_scaling(spec, module)
        a_RK, b_NR = pair["A"], pair["B"]
        if a_RK.shape[0] != rank or b_NR.shape[1] != rank:
            raise AdapterRejected(
                f"module {module!r} has lora_A {tuple(a_RK.shape)}, lora_B {tuple(b_NR.shape)};"
                f" by its spec it should have lora_A ({rank}, {a_RK.shape[1]}), lora_B ({b_NR.shape[0]}, {rank})"
            )
    # one call for all tensors: on a GPU they are hundreds of launches otherwise
    copies = torch._foreach_mul([pair["A"].float() for pair in sides.values()], 1.0)
    scaled = torch._foreach_mul([pair["B"].float() for pair in sides.values()], list(scalings.values()))
    return {
        module: FoldedModule(a_RK, b_NR, scalings[module])
        for module, a_RK, b_NR in zip(sides, copies, scaled, strict=True)
    }


def folded_digest(folded: Mapping[str, FoldedModule]) -> str:
    """Digest of a folded adapter: the same wherever it was folded from the same tensors."""
    named = [(f"{name}.A", module.a_RK) for name, module in folded.items()]
    named += [(f"{name}.B", module.b_NR) for name, module in folded.items()]
    return weights_digest(named)


def check_against_base(folded: Mapping[str, FoldedModule], base: Iterable[LinearModule], max_rank: int) -> None:
    """Refuse an adapter the base cannot serve.

    base: the linear modules an adapter may target. max_rank: rank of an engine slot.
    Raises AdapterRejected: unknown module, wrong shape (the shape it has and should have), rank above max_rank.
    """
    by_name = {module.name: module for module in base}
    for name, module in folded.items():
        target = by_name.get(name)
        if target is None:
            leaf = name.rsplit(".", 1)[-1]
            close = [known for known in by_name if known.rsplit(".", 1)[-1] == leaf][:3] or list(by_name)[:3]
            raise AdapterRejected(
                f"module {name!r} is not among the {len(by_name)} modules this engine adapts; it has e.g. {close}"
            )
        has = (tuple(module.a_RK.shape), tuple(module.b_NR.shape))
        should = ((module.rank, target.in_features), (target.out_features, module.rank))
        if has != should:
            raise AdapterRejected(
                f"module {name!r} has lora_A {has[0]}, lora_B {has[1]};"
                f" it should have lora_A {should[0]}, lora_B {should[1]}"
            )
        if module.rank > max_rank:
            raise AdapterRejected(
                f"module {name!r} has rank {module.rank}; this engine's slots hold rank <= {max_rank} (max_lora_rank)"
            )
