"""The hybrid path of eager steps with little host time: launches prepared once per layer and size, checked once per shape.

A step that no CUDA graph holds (a long prompt's) makes some 150 projections; through the kernels' public functions each costs the
host over 100 us, more than the GPU needs below about a thousand tokens. Here a layer's addresses are put into an argument list
once. Before a shape's launches are used, their result is compared bit for bit with that of the public functions on the same
data; if it differs, or this Triton launches otherwise, the public functions are used and the log says so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from epilora.kernels import lora_expand as beside
from epilora.kernels.direct import DirectLaunch

if TYPE_CHECKING:
    from .gpu_ops import Call

logger = logging.getLogger(__name__)

Variant = tuple[DirectLaunch, DirectLaunch]
_variants: dict[tuple[Any, ...], Variant | None] = {}  # per shape, size and order; None: refused
_plans: dict[tuple[Any, ...], Plan] = {}
_PLANS_KEPT = 20_000  # layers times sizes; cleared beyond (addresses of engines that are gone)


class Plan:
    """Argument lists of one layer's shrink and expand-add; x, h, y and the number of tokens are filled in for each call."""

    def __init__(
        self, call: Call, variant: Variant, shrink: beside.ShrinkConfig, expand: beside.ExpandConfig, *, pdl: bool
    ) -> None:
        self.shrink, self.expand, self.variant = shrink, expand, variant
        a, b = call.adapters()
        self.L, self.R, self.K = a[0].values.shape
        self.S, self.widths = len(a), [o.values.shape[1] for o in b]
        self.h_dtype = call.x.dtype if shrink.split_k == 1 else torch.float32
        nothing = torch.empty(1, self.S, self.R, dtype=self.h_dtype, device=call.x.device)
        h = nothing.expand(shrink.split_k, 1, self.S, self.R)
        y = torch.empty(1, sum(self.widths), dtype=call.x.dtype, device=call.x.device)
        _, first, _ = beside.shrink_launch(call.x, a, call.batch.groups, h, shrink)
        _, second, _ = beside.expand_launch(y, h, b, call.batch.groups, expand, use_pdl=pdl)
        self._first, self._second = ([_address(value) for value in values] for values in (first, second))
        names = [launch.names for launch in variant]
        self._x = [names[0].index(name) for name in ("x_ptr", "xq_ptr")]
        self._h = [part.index("h_ptr") for part in names]
        self._m = [part.index("M") for part in names]
        self._y = names[1].index("y_ptr")
        self.device = call.x.device.index or 0

    def run_shrink(self, x: torch.Tensor, h: torch.Tensor) -> None:
        """h = x A^T."""
        arguments, M = self._first.copy(), x.shape[0]
        arguments[self._x[0]] = arguments[self._x[1]] = x.data_ptr()
        arguments[self._h[0]], arguments[self._m[0]] = h.data_ptr(), M
        self.variant[0](beside.shrink_programs(M, self.S, self.R, self.L, self.shrink), arguments, self.device)

    def run_expand(self, y: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        """y += h B^T; returns y."""
        arguments, M = self._second.copy(), y.shape[0]
        arguments[self._y], arguments[self._h[1]], arguments[self._m[1]] = y.data_ptr(), h.data_ptr(), M
        self.variant[1](beside.expand_programs(M, self.widths, self.L, self.expand), arguments, self.device)
        return y

    def run(self, x: torch.Tensor, gemm: Callable[[], torch.Tensor], side: torch.cuda.Stream | None) -> torch.Tensor:
        """The hybrid path, as `kernels.lora_beside_gemm` runs it."""
        h = torch.empty((self.shrink.split_k, x.shape[0], self.S, self.R), dtype=self.h_dtype, device=x.device)
        if side is None:
            self.run_shrink(x, h)
            return self.run_expand(gemm(), h)
        current = torch.cuda.current_stream(x.device)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            self.run_shrink(x, h)
        y = gemm()
        current.wait_stream(side)
        return self.run_expand(y, h)


def _address(value: Any) -> Any:
    return value.data_ptr() if isinstance(value, torch.Tensor) else value


def _fits(call: Call) -> bool:
    """Whether a call is of the kind that the launches were compiled for: whole rows side by side, addresses of 16 bytes."""
    return call.x.stride(0) == call.x.shape[1] and call.x.data_ptr() % 16 == 0


def plan_for(
    call: Call, size: int, shrink: beside.ShrinkConfig, expand: beside.ExpandConfig, *, streams: bool
) -> Plan | None:
    """The prepared launches of a call's layer for batches of up to `size` tokens; None where the public functions must run."""
    if not call.x.is_cuda or not _fits(call) or call.lora_a[0].dtype == torch.uint8:
        return None
    order = (size, streams, call.x.dtype)
    pointers = (*[t.data_ptr() for t in (*call.lora_a, *call.lora_b)], call.token_slots.data_ptr())
    plan = _plans.get((*pointers, *order))
    if plan is not None:
        return plan
    if torch.cuda.is_current_stream_capturing():
        return None
    shape = (*call.key, *[b.shape[-2] for b in call.lora_b], *order)
    if shape not in _variants:
        _variants[shape] = _checked(call, shrink, expand, streams=streams)
    variant = _variants[shape]
    if variant is None:
        return None
    if len(_plans) >= _PLANS_KEPT:
        _plans.clear()
    pdl = not streams and torch.cuda.get_device_capability(call.x.device)[0] >= 9
    plan = _plans[*pointers, *order] = Plan(call, variant, shrink, expand, pdl=pdl)
    return plan


def _random_like(call: Call) -> Call:
    """A call of the same shape with random tokens, adapters and slots: a loaded engine's slots are empty."""
    from .gpu_ops import Batch

    x = torch.randn_like(call.x)
    stacks = [
        [torch.randn(t.shape, device=t.device).mul_(0.05).to(t.dtype) for t in side]
        for side in (call.lora_a, call.lora_b)
    ]
    L = call.lora_a[0].shape[0]
    groups = beside.group_tokens(torch.randint(-1, L, (x.shape[0],), device=x.device), L)
    batch = Batch(groups, call.batch.no_lora, call.batch.num_active)
    return replace(call, x=x, codes=None, x_scale=None, lora_a=stacks[0], lora_b=stacks[1], batch=batch)


def _checked(call: Call, shrink: beside.ShrinkConfig, expand: beside.ExpandConfig, *, streams: bool) -> Variant | None:
    """Both launches of a shape, if they give the public functions' bits on random data; else None."""
    call = _random_like(call)
    x, groups = call.x, call.batch.groups
    a, b = call.adapters()
    pdl = not streams and torch.cuda.get_device_capability(x.device)[0] >= 9
    want = torch.randn(x.shape[0], sum(o.values.shape[1] for o in b), device=x.device).to(x.dtype)
    y = want.clone()
    h = beside.lora_shrink_grouped(x, a, groups, config=shrink)
    beside.lora_expand_add(want, h, b, groups, config=expand)
    try:
        scratch = torch.empty_like(h)
        grid, arguments, constants = beside.shrink_launch(x, a, groups, scratch, shrink)
        first = DirectLaunch(beside._lora_shrink_grouped_kernel, grid, arguments, constants)
        grid, arguments, constants = beside.expand_launch(y.clone(), scratch, b, groups, expand, use_pdl=pdl)
        second = DirectLaunch(beside._lora_expand_add_kernel, grid, arguments, constants)
        plan = Plan(call, (first, second), shrink, expand, pdl=pdl)
        result = torch.full_like(h, float("nan"))
        plan.run_shrink(x, result)
        if torch.equal(plan.run_expand(y, result), want):
            return first, second
        why = "the results differ"
    except (TypeError, ValueError, AttributeError) as err:  # another Triton launches otherwise
        why = f"{type(err).__name__}: {err}"
    logger.warning(
        "EpiLoRA: prepared launches are not used for %s (%s); eager steps cost more host time", call.key, why
    )
    return None
