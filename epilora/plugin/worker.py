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
import sys
import uuid
from typing import TYPE_CHECKING, Any

import torch

from epilora.adapters.digest import weights_digest
from epilora.errors import UnsupportedKernel
from epilora.quant.cuda_ipc import export_tensor
from epilora.quant.manifest import TensorEntry, WeightManifest

from .kv_memory import KvMemory, keep_weights_plain, pool_allocations
from .requests import KINDS
from .sharing import SharedFile, SharedTensor, drop_pages, remove_abandoned, weight_entries
from .vmm import CudaMemory
from .worker_adapters import AdapterExtension, plain_name

if TYPE_CHECKING:
    from collections.abc import Iterator

logger = logging.getLogger(__name__)


class WorkerExtension(AdapterExtension):
    """Mixed into vLLM's worker; `self` is the worker."""

    def epilora_call(self, method: str, args: tuple[Any, ...]) -> tuple[bool, Any]:
        """(True, a method's result) or (False, what it raised).

        A worker process that raised would lose the exception's class and leave the other ranks' answers in the queue.
        """
        try:
            return True, getattr(self, method)(*args)
        except Exception as err:  # handed to the caller, which raises it
            return False, err

    # ---- the base -------------------------------------------------------------------------------------------------

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
            rows = None
            if name.endswith(".weight") and hasattr(owner, "org_vocab_size"):
                rows = owner.shard_indices.num_org_elements
            yield (
                plain_name(name),
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

    def epilora_activations(self) -> dict[str, int]:
        """How many FP8 linear layers run which activations."""
        from .layers import fp8_activations

        return fp8_activations(self._epilora_model())

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
        path, and layers_KIND: how many LoRA layers are of which kind).

        A request's kind is what its id begins with: `tenant-` or `rollout-`.
        """
        from .layers import CALLS, kind_counts

        kinds = self.__dict__.get("_epilora_kinds")
        if kinds is None:
            kinds = self.__dict__["_epilora_kinds"] = kind_counts(self._epilora_model())
        return {**self.__dict__.get("_epilora_counts", {}), "paths": {**CALLS, **kinds}}

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


# vLLM imports this module in each of its worker processes: after the worker's class, before anything is loaded.
if "vllm.v1.worker.gpu_worker" in sys.modules:
    keep_weights_plain()
