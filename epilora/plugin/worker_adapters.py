"""A worker's LoRA layers: which modules an adapter may target, filling slots and reading them back.

Mixed into the worker with `worker.WorkerExtension`. Module names are the checkpoint's as the engine spells them, before
packing.
"""

from __future__ import annotations

from typing import Any

import torch

from epilora.adapters.device_tensors import DeviceTensors, HandedOver, Mapper
from epilora.adapters.digest import as_tensor, slot_digest
from epilora.adapters.fold import (
    FoldedModule,
    LinearModule,
    check_against_base,
    fold,
    folded_digest,
    largest_magnitudes,
)
from epilora.adapters.peft_io import spec_of
from epilora.errors import AdapterRejected

from . import compat


def plain_name(name: str) -> str:
    """A parameter's or module's name without LoRA wrappers."""
    return name.replace(".base_layer", "")


class _InSlot(dict):
    """Stands in for the weights of an adapter that lives in its slot only: vLLM must never need to load it again."""

    def __init__(self, int_id: int) -> None:
        super().__init__()
        self._int_id = int_id

    def get(self, name: str, default: Any = None) -> Any:
        raise RuntimeError(f"adapter {self._int_id} was put out of its slot by vLLM and has no other copy: {name}")


def whole_widths(layer: Any, parts: int) -> list[int]:
    """Out features of a base layer's parts over all ranks; keys and values count once where ranks repeat them."""
    if hasattr(layer, "total_num_kv_heads"):
        kv = layer.total_num_kv_heads
        widths = [layer.total_num_heads * layer.head_size, kv * layer.head_size, kv * layer.v_head_size]
    else:
        widths = [int(n) for n in getattr(layer, "output_sizes", None) or [layer.output_size]]
    return widths if len(widths) == parts else [sum(widths)]


def _check_range(renamed: dict[str, FoldedModule], dtype: torch.dtype) -> None:
    """Raise AdapterRejected if a module's values do not fit the dtype adapters are kept in."""
    limit = torch.finfo(dtype).max
    sides = [
        (module, side, tensor)
        for module, weights in renamed.items()
        for side, tensor in (("lora_A", weights.a_RK), ("scaling * lora_B", weights.b_NR))
    ]
    for (module, side, _), largest in zip(sides, largest_magnitudes([t for *_, t in sides]), strict=True):
        if largest > limit:
            raise AdapterRejected(
                f"module {module!r}: {side} reaches {largest:.3g}; this engine keeps adapters in {dtype}, up to {limit:.3g}"
            )


class AdapterExtension:
    """`self` is the worker."""

    def _epilora_model(self) -> torch.nn.Module:
        return self.model_runner.get_model()  # type: ignore[attr-defined]

    def epilora_linear_modules(self) -> list[dict[str, Any]]:
        """Linear modules of the base by checkpoint name.

        Each: name, engine (the layer that holds it), slice (its place there), out_features, in_features (of this rank),
        whole_out, whole_in (of all ranks), adaptable (whether an adapter may target it here). A packed layer whose parts
        cannot be told apart is listed under its own name.
        """
        if "_epilora_modules" not in self.__dict__:
            self.__dict__["_epilora_modules"] = self._epilora_find_modules()
        return self.__dict__["_epilora_modules"]

    def _epilora_find_modules(self) -> list[dict[str, Any]]:
        from vllm.model_executor.layers.linear import LinearBase
        from vllm.model_executor.utils import get_packed_modules_mapping

        model = self._epilora_model()
        packed = get_packed_modules_mapping(model)
        wrapped = self._epilora_lora_layers()
        found: list[dict[str, Any]] = []
        for full_name, layer in model.named_modules():
            if not isinstance(layer, LinearBase):
                continue
            name = plain_name(full_name)
            parent, _, leaf = name.rpartition(".")
            widths = [int(n) for n in getattr(layer, "output_partition_sizes", None) or [layer.output_size]]
            parts = packed.get(leaf, [])
            if len(parts) == len(widths) > 1:
                names = [f"{parent}.{part}" if parent else part for part in parts]
            else:
                names, widths = [name], [sum(widths)]
            in_features = int(getattr(layer, "input_size_per_partition", layer.input_size))
            whole = whole_widths(layer, len(names))
            for index, (part, width) in enumerate(zip(names, widths, strict=True)):
                row = {"name": part, "engine": name, "slice": index, "out_features": width, "in_features": in_features}
                row |= {"whole_out": whole[index], "whole_in": int(layer.input_size)}
                lora = wrapped.get(name)
                row["adaptable"] = lora is not None and len(lora.lora_a_stacked) == len(names)
                found.append(row)
        return found

    # ---- adapters -------------------------------------------------------------------------------------------------

    def _epilora_manager(self) -> Any:
        return self.model_runner.lora_manager._adapter_manager  # type: ignore[attr-defined]

    def _epilora_lora_layers(self) -> dict[str, Any]:
        """Engine module path -> LoRA linear layer."""
        from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA

        if getattr(self.model_runner, "lora_manager", None) is None:  # type: ignore[attr-defined]
            return {}
        modules = self._epilora_manager().modules
        return {name: layer for name, layer in modules.items() if isinstance(layer, BaseLinearLayerWithLoRA)}

    def epilora_stage_adapter(self, name: str, config: dict[str, Any], tensors: dict[str, Any] | HandedOver) -> None:
        """Check and fold an adapter for the `epilora_place_adapter` that follows, on the engine's device; no slot changes.

        name: for messages. config: PEFT's adapter_config as a dict; tensors: PEFT's keys, scaling not folded (not
        written to), or what another process handed over (of several, this rank takes its own). Raises AdapterRejected.
        """
        if isinstance(tensors, tuple):
            tensors = tensors[self.parallel_config.rank]  # type: ignore[attr-defined]
        if isinstance(tensors, DeviceTensors):
            given = self.__dict__.setdefault("_epilora_mapped", Mapper()).all(tensors)
        else:
            device = self.device  # type: ignore[attr-defined]
            given = {
                key: (value if isinstance(value, torch.Tensor) else as_tensor(value)).to(device)
                for key, value in tensors.items()
            }
        try:
            folded = fold(spec_of(config), given)
            model, lora_config = self._epilora_model(), self._epilora_manager().lora_config
            renamed = {compat.engine_module_name(model, module): weights for module, weights in folded.items()}
            base = [
                LinearModule(row["name"], row["whole_out"], row["whole_in"])
                for row in self.epilora_linear_modules()
                if row["adaptable"]
            ]
            check_against_base(renamed, base, lora_config.max_lora_rank)
            _check_range(renamed, lora_config.lora_dtype)
        except AdapterRejected as err:
            raise AdapterRejected(f"adapter {name}: {err}") from err
        self.__dict__["_epilora_staged"] = (folded, renamed)

    def epilora_place_adapter(self, int_id: int) -> dict[str, Any]:
        """Put the staged adapter into a free slot under `int_id`. Returns slot, modules, base_modules.

        The slot is the only place that serves its weights then: if vLLM put it out by itself, the next request would
        raise. What was staged is kept for `epilora_verify_adapter`.
        """
        folded, renamed = self.__dict__.pop("_epilora_staged")
        manager = self._epilora_manager()
        manager.remove_adapter(int_id)
        layers = self._epilora_lora_layers().values()
        if all(layer.lora_a_stacked[0].is_cuda and layer.tp_size == 1 for layer in layers) and not any(
            getattr(layer, "_epilora_stored", None) for layer in layers
        ):
            self._epilora_write(int_id, renamed)
        else:
            self._epilora_activate(int_id, renamed)
        slot = manager.lora_index_to_id.index(int_id)
        self.__dict__.setdefault("_epilora_unverified", {})[int_id] = (slot, folded, renamed)
        return {"slot": slot, "modules": len(renamed), "base_modules": len(self.epilora_linear_modules())}

    def _epilora_activate(self, int_id: int, renamed: dict[str, FoldedModule]) -> None:
        """By vLLM's own way: merged where it packs, sliced for this rank, one copy a tensor."""
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.lora_weights import LoRALayerWeights

        manager = self._epilora_manager()
        weights = {
            name: LoRALayerWeights(
                module_name=name,
                rank=module.rank,
                lora_alpha=module.rank,
                lora_a=module.a_RK,
                lora_b=module.b_NR,
                scaling=1.0,  # already in B
            )
            for name, module in renamed.items()
        }
        model = LoRAModel(int_id, max(module.rank for module in renamed.values()), weights)
        manager.add_adapter(model)
        try:
            manager.activate_adapter(int_id)
        except BaseException:
            manager.remove_adapter(int_id)
            raise
        model.loras = _InSlot(int_id)

    def _epilora_write(self, int_id: int, renamed: dict[str, FoldedModule]) -> None:
        """Straight into the slot: a few launches for all tensors together, where vLLM's way takes thousands."""
        from vllm.lora.lora_model import LoRAModel

        manager = self._epilora_manager()
        slot = manager.lora_index_to_id.index(None)
        into, source, empty = [], [], []
        for name, (a_RK, b_NR) in self._epilora_slot(slot).items():
            module = renamed.get(name)
            if module is None:
                empty += [a_RK, b_NR]
                continue
            if module.rank < a_RK.shape[0]:
                empty += [a_RK[module.rank :], b_NR[:, module.rank :]]
            into += [a_RK[: module.rank], b_NR[:, : module.rank]]
            source += [module.a_RK, module.b_NR]
        if empty:
            torch._foreach_zero_(empty)
        torch._foreach_copy_(into, source)
        manager._registered_adapters[int_id] = LoRAModel(int_id, 1, _InSlot(int_id))
        manager._active_adapters[int_id] = None
        manager.lora_index_to_id[slot] = int_id

    def _epilora_slot(self, slot: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Checkpoint module -> (A [R, K], B [N, R]) as they lie in a slot."""
        wrapped = self._epilora_lora_layers()
        found = {}
        for row in self.epilora_linear_modules():
            if row["adaptable"]:
                layer, part = wrapped[row["engine"]], row["slice"]
                found[row["name"]] = (layer.lora_a_stacked[part][slot, 0], layer.lora_b_stacked[part][slot, 0])
        return found

    def epilora_verify_adapter(self, int_id: int) -> dict[str, str]:
        """What lies in the slot of `int_id` against what was staged for it, once.

        Returns readback_digest, expected_digest (see `adapters.digest.slot_digest`) and folded_digest (see
        `adapters.fold.folded_digest`).
        """
        slot, folded, renamed = self.__dict__["_epilora_unverified"].pop(int_id)
        return {
            "readback_digest": self.epilora_read_slot_digest(slot),
            "expected_digest": slot_digest(self._epilora_share_of(renamed)),
            "folded_digest": folded_digest(folded),
        }

    def _epilora_share_of(self, renamed: dict[str, FoldedModule]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """What this rank's slot should hold of an adapter: padded, in the slots' dtype, cut where layers are cut."""
        lora_config = self._epilora_manager().lora_config
        packs: dict[str, list[str]] = {}
        for row in self.epilora_linear_modules():
            if row["adaptable"]:
                packs.setdefault(row["engine"], []).append(row["name"])
        wrapped = self._epilora_lora_layers()
        share: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        for engine, names in packs.items():
            layer = wrapped[engine]
            found = [renamed.get(name) for name in names]
            pairs = [None if m is None else m.padded(lora_config.max_lora_rank, lora_config.lora_dtype) for m in found]
            a_RK, b_NR = ([None if pair is None else pair[side] for pair in pairs] for side in (0, 1))
            if layer.tp_size > 1 and any(pairs):
                if len(names) == 1:
                    a_RK, b_NR = [layer.slice_lora_a(a_RK[0])], [layer.slice_lora_b(b_NR[0])]
                else:
                    a_RK, b_NR = layer.slice_lora_a(a_RK), layer.slice_lora_b(b_NR)
            share |= {
                name: (a, b) for name, a, b in zip(names, a_RK, b_NR, strict=True) if a is not None and b is not None
            }
        return share

    def epilora_read_slot_digest(self, slot: int) -> str:
        """sha256 of what lies in a slot's buffers now, by checkpoint module (see `adapters.digest.slot_digest`)."""
        return slot_digest(self._epilora_slot(slot))

    def epilora_unload_adapter(self, int_id: int, refill: bool = False) -> bool:
        """Free the slot of `int_id` and zero it (not if it is about to be filled anew); whether it was loaded."""
        manager = self._epilora_manager()
        slot = manager.lora_index_to_id.index(int_id) if int_id in manager.lora_index_to_id else None
        removed = manager.remove_adapter(int_id)
        self.__dict__.get("_epilora_unverified", {}).pop(int_id, None)
        if slot is not None and not refill:
            for layer in manager.modules.values():
                layer.reset_lora(slot)
        return bool(removed)

    def epilora_list_adapters(self) -> dict[int, int]:
        """int id -> slot of every active adapter."""
        return {
            int_id: slot for slot, int_id in enumerate(self._epilora_manager().lora_index_to_id) if int_id is not None
        }
