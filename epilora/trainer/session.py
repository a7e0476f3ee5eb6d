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


class Session:
    """Parameters and optimizer state of one adapter.

    pairs: module name -> LoraPair, leaves whose gradients accumulate into `grad`. theta, grad, m, v: flat fp32 [P].
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
        self._where: dict[str, tuple[int, int, int, int, int, float]] = {}
        size = 0
        for module in modules:
            n, k = linear_shapes[module]
            rank, scaling = module_rank_and_scaling(spec, module)
            if rank < 1:
                raise ValueError(f"session {name!r}: rank {rank} for {module}; allowed: >= 1")
            self._where[module] = (size, size + rank * k, n, k, rank, scaling)
            size += rank * (n + k)
        self.theta, self.grad, self.m, self.v = (torch.zeros(size, device=device) for _ in range(4))
        self.pairs: dict[str, LoraPair] = {}
        for module, (start_a, start_b, n, k, rank, scaling) in self._where.items():
            a, b = self._leaf(start_a, (rank, k)), self._leaf(start_b, (n, rank))
            bound = 1.0 / math.sqrt(k)
            with torch.no_grad():  # drawn on the CPU: a seed means the same adapter on every device
                a.copy_(torch.empty(rank, k).uniform_(-bound, bound, generator=self.generator))
            self.pairs[module] = LoraPair(a, b, scaling)

    def _leaf(self, start: int, shape: tuple[int, int]) -> torch.Tensor:
        stop = start + shape[0] * shape[1]
        leaf = self.theta[start:stop].view(shape).requires_grad_()
        leaf.grad = self.grad[start:stop].view(shape)
        return leaf

    @property
    def num_parameters(self) -> int:
        return int(self.theta.numel())

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
        norm = float(self.grad.norm())
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
        wanted = {
            f"base_model.model.{module}.lora_{side}.weight": leaf
            for module, pair in self.pairs.items()
            for side, leaf in (("A", pair.a), ("B", pair.b))
        }
        missing, surplus = sorted(set(wanted) - set(tensors)), sorted(set(tensors) - set(wanted))
        if missing or surplus:
            raise ValueError(f"session {self.name!r}: tensors missing {missing[:3]}, unknown {surplus[:3]}")
        for name, leaf in wanted.items():
            if tuple(tensors[name].shape) != tuple(leaf.shape):
                raise ValueError(
                    f"session {self.name!r}: {name} has shape {tuple(tensors[name].shape)}, the session's {tuple(leaf.shape)}"
                )
        for name, leaf in wanted.items():
            leaf.copy_(torch.as_tensor(tensors[name]))

    def export(self) -> dict[str, np.ndarray]:
        """PEFT keys -> fp32 arrays (copies), scaling not folded."""
        return {name: leaf.cpu().numpy().copy() for name, leaf in self._leaves().items()}

    def share(self) -> DeviceTensors:
        """PEFT keys -> handles of the tensors as they lie on this GPU, for an engine there; the same at every call.

        Waits for what runs on the GPU. Whoever reads them must have done so before the next `apply`.
        Raises RuntimeError off a GPU, or for memory that cannot be shared.
        """
        if self._shared is None:
            self._shared = share(self.name, self._leaves())
        torch.cuda.synchronize(self.theta.device)
        return self._shared

    def _leaves(self) -> dict[str, torch.Tensor]:
        return {
            f"base_model.model.{module}.lora_{side}.weight": leaf.detach()
            for module, pair in self.pairs.items()
            for side, leaf in (("A", pair.a), ("B", pair.b))
        }


def _only(spec: AdapterSpec, target: str) -> AdapterSpec:
    return AdapterSpec(spec.rank, spec.alpha, (target,))
