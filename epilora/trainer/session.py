"""One adapter being trained: its parameters in one flat fp32 vector, its gradient, and AdamW.

    m = b1 m + (1 - b1) g,    v = b2 v + (1 - b2) g^2
    theta -= lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps) + lr wd theta

(decoupled weight decay, arXiv 1711.05101), by torch's fused kernel. A and B of every module are views of the flat vector, so that a step, a clip
and a checkpoint are a few vector operations. A starts as PEFT's kaiming-uniform, U(-1/sqrt(K), 1/sqrt(K)); B starts at
zero.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch.optim.adamw import adamw

from epilora.adapters.device_tensors import DeviceTensors, share
from epilora.adapters.fold import is_target, module_rank_and_scaling
from epilora.types import AdapterSpec

from .linear import LoraPair

Key = tuple[str, str]  # module, "A" or "B"


@dataclass(frozen=True)
class AdamWConfig:
    """lr after warm-up; grad_clip: global L2 norm, 0 off; warmup_steps: linear from lr / warmup_steps; then
    constant.
    """

    lr: float = 3e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    grad_clip: float = 1.0
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        if self.lr <= 0 or self.eps <= 0 or self.weight_decay < 0 or self.grad_clip < 0 or self.warmup_steps < 0:
            raise ValueError(
                f"optimizer: lr and eps must be > 0, weight_decay, grad_clip and warmup_steps >= 0; got {self}"
            )
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"optimizer: betas={self.betas}; allowed: two numbers in [0, 1)")

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> AdamWConfig:
        """From plain values. Raises ValueError naming unknown keys."""
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ValueError(f"optimizer: unknown keys {unknown}; allowed: {sorted(known)}")
        given = dict(values)
        if "betas" in given:
            given["betas"] = tuple(given["betas"])
        return cls(**given)


@dataclass(frozen=True)
class Layout:
    """Where an adapter's tensors lie in a flat vector: (module, "A" or "B") -> (start, shape)."""

    places: dict[Key, tuple[int, tuple[int, int]]]
    size: int

    @classmethod
    def of(cls, shapes: Mapping[Key, tuple[int, int]]) -> Layout:
        """One after the other."""
        places, size = {}, 0
        for key, shape in shapes.items():
            places[key] = (size, shape)
            size += shape[0] * shape[1]
        return cls(places, size)

    def view(self, flat: torch.Tensor, key: Key) -> torch.Tensor:
        """One tensor as a view of `flat`."""
        start, shape = self.places[key]
        return flat[start : start + shape[0] * shape[1]].view(shape)


class Session:
    """Parameters and optimizer state of one adapter.

    pairs: module name -> LoraPair, leaves whose gradients accumulate into `grad`. theta, grad, m, v: flat fp32 of what this
    process holds.
    step: optimizer steps taken. generator: the session's own random numbers.
    """

    def __init__(
        self,
        name: str,
        spec: AdapterSpec,
        optimizer: Mapping[str, Any],
        seed: int,
        linear_shapes: Mapping[str, tuple[int, int]],
        device: torch.device | None = None,
    ) -> None:
        """linear_shapes: module name -> (N, K) of what may be adapted. device: of parameters and moments (None: CPU).

        Raises ValueError if a target matches no module or a rank is not positive.
        """
        self.name, self.spec, self.seed = name, spec, seed
        self.optimizer = AdamWConfig.from_mapping(optimizer)
        self.step = 0
        self._shared: DeviceTensors | None = None
        self.generator = torch.Generator().manual_seed(seed)
        modules = [module for module in sorted(linear_shapes) if is_target(spec, module)]
        unmatched = [t for t in spec.target_modules if not any(is_target(_only(spec, t), m) for m in linear_shapes)]
        if unmatched or not modules:
            leaves = sorted({module.rsplit(".", 1)[-1] for module in linear_shapes})
            raise ValueError(
                f"session {name!r}: target_modules {unmatched} match nothing; the base has {leaves} (or all-linear)"
            )
        shapes: dict[Key, tuple[int, int]] = {}
        for module in modules:
            n, k = linear_shapes[module]
            rank, _ = module_rank_and_scaling(spec, module)
            if rank < 1:
                raise ValueError(f"session {name!r}: rank {rank} for {module}; allowed: >= 1")
            shapes |= {(module, "A"): (rank, k), (module, "B"): (n, rank)}
        self._whole = Layout.of(shapes)
        self._held = self._held_here(self._whole)
        self.theta, self.grad, self.m, self.v = (torch.zeros(self._held.size, device=device) for _ in range(4))
        held = {key: self._leaf(key) for key in shapes}
        self.pairs: dict[str, LoraPair] = {}
        for module in modules:
            rank, k = shapes[module, "A"]
            bound = 1.0 / math.sqrt(k)
            with torch.no_grad():  # drawn on the CPU: a seed means the same adapter on every device
                drawn = torch.empty(rank, k).uniform_(-bound, bound, generator=self.generator)
                held[module, "A"].copy_(self._part((module, "A"), drawn))
            _, scaling = module_rank_and_scaling(spec, module)
            self.pairs[module] = LoraPair(held[module, "A"], held[module, "B"], scaling)

    def _leaf(self, key: Key) -> torch.Tensor:
        leaf = self._held.view(self.theta, key).requires_grad_()
        leaf.grad = self._held.view(self.grad, key)
        return leaf

    # ---- what one of several ranks does otherwise (see sharded_session.py) ---------------------------------------------

    def _held_here(self, whole: Layout) -> Layout:
        """Where what this process holds of the adapter lies in its flat vectors."""
        return whole

    def _part(self, key: Key, tensor: torch.Tensor) -> torch.Tensor:
        """What this process holds of one whole tensor."""
        return tensor

    def _gradient_norm(self) -> float:
        """L2 norm of the whole gradient, once it is complete."""
        return float(self.grad.norm())

    def whole(self, flat: torch.Tensor) -> torch.Tensor:
        """The whole adapter's vector of this process's `flat` (theta, m or v), in the order of one that holds it all."""
        return flat.detach()

    def take(self, flat: torch.Tensor, whole: torch.Tensor) -> None:
        """Set `flat` (theta, m or v) from the whole adapter's vector."""
        with torch.no_grad():
            for key in self._whole.places:
                self._held.view(flat.detach(), key).copy_(self._part(key, self._whole.view(whole, key)))

    @property
    def num_parameters(self) -> int:
        """Of the whole adapter."""
        return self._whole.size

    def learning_rate(self) -> float:
        """Rate of the next step."""
        warmup = self.optimizer.warmup_steps
        return self.optimizer.lr * (min(1.0, (self.step + 1) / warmup) if warmup else 1.0)

    @torch.no_grad()
    def apply(self) -> dict[str, float]:
        """One AdamW step on the accumulated gradient. Returns grad_norm (before clipping) and lr.

        Raises FloatingPointError, changing nothing, if the gradient is not finite.
        """
        config = self.optimizer
        norm = self._gradient_norm()
        if not math.isfinite(norm):
            raise FloatingPointError(
                f"session {self.name!r}, step {self.step + 1}: gradient norm is {norm}; lower the learning rate"
            )
        if config.grad_clip and norm > config.grad_clip:
            self.grad.mul_(config.grad_clip / norm)
        rate = self.learning_rate()
        self.step += 1
        adamw(
            [self.theta],
            [self.grad],
            [self.m],
            [self.v],
            [],
            [torch.full((), float(self.step - 1), device=self.theta.device)],
            fused=True,
            amsgrad=False,
            maximize=False,
            beta1=config.betas[0],
            beta2=config.betas[1],
            lr=rate,
            weight_decay=config.weight_decay,
            eps=config.eps,
        )
        return {"grad_norm": norm, "lr": rate}

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Any]) -> None:
        """Take parameters from what `export` gave. Raises ValueError naming what does not fit; changes nothing then."""
        wanted = {_peft_name(key): key for key in self._whole.places}
        missing, surplus = sorted(set(wanted) - set(tensors)), sorted(set(tensors) - set(wanted))
        if missing or surplus:
            raise ValueError(f"session {self.name!r}: tensors missing {missing[:3]}, unknown {surplus[:3]}")
        for name, key in wanted.items():
            shape = self._whole.places[key][1]
            if tuple(tensors[name].shape) != shape:
                raise ValueError(
                    f"session {self.name!r}: {name} has shape {tuple(tensors[name].shape)}, the session's {shape}"
                )
        for name, key in wanted.items():
            self._held.view(self.theta, key).copy_(self._part(key, torch.as_tensor(tensors[name])))

    def export(self) -> dict[str, np.ndarray]:
        """PEFT keys -> fp32 arrays (copies), scaling not folded."""
        return {name: leaf.cpu().numpy().copy() for name, leaf in self._named(self.whole(self.theta)).items()}

    def share(self) -> DeviceTensors:
        """PEFT keys -> handles of the tensors as they lie on this GPU, for an engine there; the same at every call.

        Waits for what runs on the GPU. Whoever reads them must have done so before the next `apply`.
        Raises RuntimeError off a GPU, or for memory that cannot be shared.
        """
        tensors = self._named(self._whole_in_place())
        if self._shared is None:
            self._shared = share(self.name, tensors)
        torch.cuda.synchronize(self.theta.device)
        return self._shared

    def _whole_in_place(self) -> torch.Tensor:
        """The whole adapter's vector at an address that stays."""
        return self.theta.detach()

    def _named(self, whole: torch.Tensor) -> dict[str, torch.Tensor]:
        return {_peft_name(key): self._whole.view(whole, key) for key in self._whole.places}


def _peft_name(key: Key) -> str:
    return f"base_model.model.{key[0]}.lora_{key[1]}.weight"


def _only(spec: AdapterSpec, target: str) -> AdapterSpec:
    return AdapterSpec(spec.rank, spec.alpha, (target,))
