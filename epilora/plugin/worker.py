"""What an engine's worker does for us, as named methods: `collective_rpc("epilora_...")`, plain arguments, plain
results.

vLLM adds this class to its worker's bases (`worker_extension_cls`), so the same calls reach an in-process, a
multi-process and a tensor-parallel engine. Names begin with `epilora_`: they must not clash with the worker's own.

Manifest names: a linear layer, norm or embedding is listed under its module path (`model.layers.0.self_attn.qkv_proj`);
a parameter that is not called `weight` under its full name (`model.layers.0.self_attn.qkv_proj.bias`). LoRA wrappers do
not show.
"""

from __future__ import annotations

import logging
import os
import uuid
from typing import TYPE_CHECKING, Any

import torch

from epilora.adapters.device_tensors import DeviceTensors, Mapper
from epilora.adapters.digest import as_tensor, slot_digest, weights_digest
from epilora.adapters.fold import FoldedModule, LinearModule, check_against_base, fold, largest_magnitudes
from epilora.adapters.peft_io import spec_of
from epilora.errors import AdapterRejected, UnsupportedKernel
from epilora.quant.cuda_ipc import export_tensor
from epilora.quant.manifest import TensorEntry, WeightManifest

from . import compat
from .kv_memory import KvMemory, pool_allocations
from .requests import KINDS
from .sharing import SharedFile, SharedTensor, drop_pages, remove_abandoned, weight_entries
from .vmm import CudaMemory

if TYPE_CHECKING:
    from collections.abc import Iterator

logger = logging.getLogger(__name__)


def _plain(name: str) -> str:
    """A parameter's or module's name without LoRA wrappers."""
    return name.replace(".base_layer", "")


class _InSlot(dict):
    """Stands in for the weights of an adapter that lives in its slot only: vLLM must never need to load it again."""

    def __init__(self, int_id: int) -> None:
        super().__init__()
        self._int_id = int_id

    def get(self, name: str, default: Any = None) -> Any:
        raise RuntimeError(f"adapter {self._int_id} was put out of its slot by vLLM and has no other copy: {name}")


class WorkerExtension:
    """Mixed into vLLM's worker; `self` is the worker."""

    # ---- the base -------------------------------------------------------------------------------------------------

    def _epilora_model(self) -> torch.nn.Module:
        return self.model_runner.get_model()  # type: ignore[attr-defined]

    def _epilora_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter, SharedTensor, bool]]:
        """(plain name, parameter, how to store it, whether that is transposed) of every parameter, tied ones once.

        A weight held as [K, N] with strides (1, K) is stored as [N, K]. Padding rows of a vocabulary are stored, not
        listed.
        """
        model = self._epilora_model()
        modules = dict(model.named_modules())
        for name, parameter in model.named_parameters():
            data = parameter.data
            owner = modules[name.rpartition(".")[0]]
            transposed = data.dim() == 2 and data.stride(0) == 1 and data.stride(1) >= data.shape[0] > 1
            rows = getattr(owner, "org_vocab_size", None) if name.endswith(".weight") else None
            yield (
                _plain(name),
                parameter,
                SharedTensor((data.t() if transposed else data).contiguous(), rows),
                transposed,
            )

    def epilora_base_checksum(self) -> str:
        """sha256 of all base parameters as they lie in memory now (see `adapters.digest.weights_digest`).

        A parameter that vLLM repacked and emptied (unquantised layers on some CPUs) counts with its name only.
        """
        return weights_digest(
            (name, shared.bytes_view[: shared.rows]) for name, _, shared, _ in self._epilora_parameters()
        )

    def epilora_export_weights(self, folder: str, engine: str) -> WeightManifest:
        """What others need to compute on this rank's parameters; later calls return the same manifest.

        CPU: every parameter moves into one file in `folder`, once. GPU: handles to the memory they are in.
        Raises MemoryInfeasible if `folder` cannot hold them, UnsupportedKernel where vLLM repacked a weight or its memory
        cannot be shared.
        """
        state = self.__dict__.setdefault("_epilora_export", {})
        if state:
            return state["manifest"]
        listed = list(self._epilora_parameters())
        for name, parameter, _, _ in listed:
            if not parameter.numel():
                raise UnsupportedKernel(
                    f"export_weights: {name} is empty: vLLM repacked it for this CPU and others cannot read that copy;"
                    " quantise the base (fp8_per_channel)"
                )
        if self.device.type == "cpu":  # type: ignore[attr-defined]
            for abandoned in remove_abandoned(folder, "epilora-base-"):
                logger.warning("removed %s: the engine that made it was killed", abandoned)
            path = os.path.join(folder, f"epilora-base-{engine}-{os.getpid()}-{uuid.uuid4().hex[:8]}.weights")
            state["file"] = shared_file = SharedFile(path, [shared for _, _, shared, _ in listed])
            for (_, parameter, _, transposed), view in zip(listed, shared_file.views, strict=True):
                parameter.data = view.t() if transposed else view
            stored = {name: shared_file.entry(at, shared.rows) for at, (name, _, shared, _) in enumerate(listed)}
        else:
            stored = {name: self._epilora_handle(name, parameter, shared) for name, parameter, shared, _ in listed}
        slices: dict[str, list[tuple[str, int]]] = {}
        for row in self.epilora_linear_modules():
            slices.setdefault(row["engine"], []).append((row["name"].rsplit(".", 1)[-1], row["out_features"]))
        state["manifest"] = WeightManifest(
            engine=engine,
            model_path=self.model_config.model,  # type: ignore[attr-defined]
            base_digest=self.epilora_base_checksum(),
            tp_rank=self.parallel_config.rank,  # type: ignore[attr-defined]
            tp_size=self.parallel_config.world_size,  # type: ignore[attr-defined]
            entries=weight_entries(stored, slices),
        )
        return state["manifest"]

    def _epilora_handle(self, name: str, parameter: torch.nn.Parameter, shared: SharedTensor) -> TensorEntry:
        if shared.bytes_view.data_ptr() != parameter.data_ptr():
            raise UnsupportedKernel(
                f"export_weights: {name} has shape {tuple(parameter.shape)}, strides {parameter.stride()}; only row-major"
                " tensors and their transposes can be shared without a copy"
            )
        try:
            return export_tensor(shared.bytes_view[: shared.rows])
        except RuntimeError as err:
            raise UnsupportedKernel(f"export_weights: {name}: {err}") from err

    def epilora_release_export(self) -> None:
        """Remove the shared file's name (the mappings that exist keep working)."""
        shared_file = self.__dict__.get("_epilora_export", {}).get("file")
        if shared_file is not None:
            shared_file.unlink()

    def epilora_linear_modules(self) -> list[dict[str, Any]]:
        """Linear modules of the base by checkpoint name.

        Each: name, engine (the layer that holds it), slice (its place there), out_features, in_features, adaptable
        (whether an adapter may target it here). A packed layer whose parts cannot be told apart is listed under its own
        name.
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
            name = _plain(full_name)
            parent, _, leaf = name.rpartition(".")
            widths = [int(n) for n in getattr(layer, "output_partition_sizes", None) or [layer.output_size]]
            parts = packed.get(leaf, [])
            if len(parts) == len(widths) > 1:
                names = [f"{parent}.{part}" if parent else part for part in parts]
            else:
                names, widths = [name], [sum(widths)]
            in_features = int(getattr(layer, "input_size_per_partition", layer.input_size))
            for index, (part, width) in enumerate(zip(names, widths, strict=True)):
                row = {"name": part, "engine": name, "slice": index, "out_features": width, "in_features": in_features}
                lora = wrapped.get(name)
                row["adaptable"] = lora is not None and len(lora.lora_a_stacked) == len(names)
                found.append(row)
        return found

    def epilora_activations(self) -> dict[str, int]:
        """How many FP8 linear layers run which activations."""
        from .layers import fp8_activations

        return fp8_activations(self._epilora_model())

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

    def _epilora_fold(self, config: dict[str, Any], tensors: dict[str, Any]) -> dict[str, FoldedModule]:
        """Checked adapter by the engine's module names (before packing), on the engine's device."""
        model, lora_config = self._epilora_model(), self._epilora_manager().lora_config
        device = self.device  # type: ignore[attr-defined]
        here = {
            name: (value if isinstance(value, torch.Tensor) else as_tensor(value)).to(device)
            for name, value in tensors.items()
        }
        folded = fold(spec_of(config), here)
        renamed = {compat.engine_module_name(model, module): weights for module, weights in folded.items()}
        base = [
            LinearModule(row["name"], row["out_features"], row["in_features"])
            for row in self.epilora_linear_modules()
            if row["adaptable"]
        ]
        check_against_base(renamed, base, lora_config.max_lora_rank)
        limit = torch.finfo(lora_config.lora_dtype).max
        sides = [
            (module, side, tensor)
            for module, weights in renamed.items()
            for side, tensor in (("lora_A", weights.a_RK), ("scaling * lora_B", weights.b_NR))
        ]
        for (module, side, _), largest in zip(sides, largest_magnitudes([t for *_, t in sides]), strict=True):
            if largest > limit:
                raise AdapterRejected(
                    f"module {module!r}: {side} reaches {largest:.3g}; this engine keeps adapters in"
                    f" {lora_config.lora_dtype}, up to {limit:.3g}"
                )
        return renamed

    def epilora_stage_adapter(self, name: str, config: dict[str, Any], tensors: dict[str, Any] | DeviceTensors) -> None:
        """Check and fold an adapter for the `epilora_place_adapter` that follows; no slot changes.

        name: for messages. config: PEFT's adapter_config as a dict; tensors: PEFT's keys, scaling not folded (not
        written to), or `DeviceTensors` of another process. Raises AdapterRejected.
        """
        given = self._epilora_mapper().all(tensors) if isinstance(tensors, DeviceTensors) else tensors
        try:
            self.__dict__["_epilora_staged"] = self._epilora_fold(config, given)
        except AdapterRejected as err:
            raise AdapterRejected(f"adapter {name}: {err}") from err

    def _epilora_mapper(self) -> Mapper:
        return self.__dict__.setdefault("_epilora_mapped", Mapper())

    def epilora_place_adapter(self, int_id: int) -> dict[str, Any]:
        """Put the staged adapter into a slot under `int_id`. Returns slot, modules, base_modules.

        The slot is the only place that holds its weights then: if vLLM put it out by itself, the next request would
        raise.
        """
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.lora_weights import LoRALayerWeights

        folded: dict[str, FoldedModule] = self.__dict__.pop("_epilora_staged")
        manager = self._epilora_manager()
        dtype = manager.lora_config.lora_dtype
        layers = {
            module: LoRALayerWeights(
                module_name=module,
                rank=weights.rank,
                lora_alpha=weights.rank,
                lora_a=weights.a_RK.to(dtype),
                lora_b=weights.b_NR.to(dtype),
                scaling=1.0,  # already in B
            )
            for module, weights in folded.items()
        }
        manager.remove_adapter(int_id)
        model = LoRAModel(int_id, max(weights.rank for weights in folded.values()), layers)
        manager.add_adapter(model)
        try:
            manager.activate_adapter(int_id)
        except BaseException:
            manager.remove_adapter(int_id)
            raise
        model.loras = _InSlot(int_id)
        return {
            "slot": manager.lora_index_to_id.index(int_id),
            "modules": len(folded),
            "base_modules": len(self.epilora_linear_modules()),
        }

    def epilora_staged_digest(self) -> str:
        """Slot digest that the staged adapter should have once it is placed."""
        manager = self._epilora_manager()
        rank, dtype = manager.lora_config.max_lora_rank, manager.lora_config.lora_dtype
        staged: dict[str, FoldedModule] = self.__dict__["_epilora_staged"]
        return slot_digest({name: weights.padded(rank, dtype) for name, weights in staged.items()})

    def epilora_source_digest(self, tensors: DeviceTensors) -> str:
        """`weights_digest` of what another process handed over, as it lies there now."""
        return weights_digest(self._epilora_mapper().all(tensors).items())

    def epilora_read_slot_digest(self, slot: int) -> str:
        """sha256 of what lies in a slot's buffers now, by checkpoint module (see `adapters.digest.slot_digest`)."""
        wrapped = self._epilora_lora_layers()
        held = {}
        for row in self.epilora_linear_modules():
            if row["adaptable"]:
                layer = wrapped[row["engine"]]
                a_RK, b_NR = layer.lora_a_stacked[row["slice"]][slot, 0], layer.lora_b_stacked[row["slice"]][slot, 0]
                held[row["name"]] = (a_RK, b_NR)
        return slot_digest(held)

    def epilora_unload_adapter(self, int_id: int) -> bool:
        """Free the slot of `int_id` and zero it; whether it was loaded."""
        manager = self._epilora_manager()
        slot = manager.lora_index_to_id.index(int_id) if int_id in manager.lora_index_to_id else None
        removed = manager.remove_adapter(int_id)
        if slot is not None:
            for layer in manager.modules.values():
                layer.reset_lora(slot)
        return bool(removed)

    def epilora_list_adapters(self) -> dict[int, int]:
        """int id -> slot of every active adapter."""
        return {
            int_id: slot for slot, int_id in enumerate(self._epilora_manager().lora_index_to_id) if int_id is not None
        }

    # ---- counters, KV ---------------------------------------------------------------------------------------------

    def epilora_count_steps(self) -> None:
        """Start counting: wraps the model runner's `execute_model`, once."""
        if "_epilora_counts" in self.__dict__:
            return
        counts = self.__dict__["_epilora_counts"] = {"steps": 0, "mixed_steps": 0, "tenant_rows": 0, "rollout_rows": 0}
        runner = self.model_runner  # type: ignore[attr-defined]
        stock = runner.execute_model

        def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            rows = dict.fromkeys(KINDS, 0)
            for request_id in scheduler_output.num_scheduled_tokens:
                kind = request_id.split("-", 1)[0]
                if kind in rows:
                    rows[kind] += 1
            if scheduler_output.num_scheduled_tokens:
                counts["steps"] += 1
                counts["mixed_steps"] += all(rows.values())
                for kind in KINDS:
                    counts[f"{kind}_rows"] += rows[kind]
            return stock(scheduler_output, *args, **kwargs)

        runner.execute_model = execute_model

    def epilora_stats(self) -> dict[str, Any]:
        """steps, mixed_steps, tenant_rows, rollout_rows (rows: sequences times steps) and paths (calls per dispatch
        path).

        A request's kind is what its id begins with: `tenant-` or `rollout-`.
        """
        from .layers import CALLS

        return {**self.__dict__.get("_epilora_counts", {}), "paths": dict(CALLS)}

    def epilora_release_kv(self, kept_blocks: int, num_blocks: int) -> int:
        """GPU: give back the KV cache's memory but that of the first `kept_blocks` of `num_blocks`; bytes that went.

        What lies there is lost. Raises UnsupportedKernel if its memory is not vLLM's CuMem pool.
        """
        torch.cuda.synchronize(self.device)  # type: ignore[attr-defined]
        if "_epilora_kv" not in self.__dict__:
            memory = CudaMemory(self.device.index)  # type: ignore[attr-defined]
            caches = self.model_runner.kv_caches  # type: ignore[attr-defined]
            self.__dict__["_epilora_kv"] = KvMemory(caches, num_blocks, pool_allocations(), memory)
        return self.__dict__["_epilora_kv"].release(kept_blocks)

    def epilora_restore_kv(self) -> int:
        """GPU: fetch what was released; bytes. Raises RuntimeError if the device has too little."""
        return self.__dict__["_epilora_kv"].restore()

    def epilora_close(self) -> None:
        """Before the engine goes: leave nothing that outlives it or that vLLM would free twice."""
        self.epilora_release_export()
        kv = self.__dict__.pop("_epilora_kv", None)
        if kv is not None:
            torch.cuda.synchronize(self.device)  # type: ignore[attr-defined]
            kv.give_back()

    def epilora_drop_kv(self, keep_fraction: float) -> int:
        """Give the pages of the KV cache past `keep_fraction` of each tensor back to the system; returns their bytes.

        Only with no live cache content (the caller resets the prefix cache and preempts what runs). CPU: the addresses
        stay valid and pages come back, zeroed, when they are written again; the cache's capacity does not shrink.
        """
        if not 0.0 <= keep_fraction <= 1.0:
            raise ValueError(f"release_kv: keep_fraction={keep_fraction}; allowed is 0 to 1")
        seen: set[int] = set()
        released = 0
        for tensor in self.model_runner.kv_caches:  # type: ignore[attr-defined]
            pointer = tensor.untyped_storage().data_ptr()
            if pointer not in seen:
                seen.add(pointer)
                released += drop_pages(tensor, keep_fraction)
        return released
