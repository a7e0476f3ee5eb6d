"""The worker's side of the benchmark: random adapters straight into slots, and what the engine holds.

Named methods for `collective_rpc`, the same on stock vLLM and ours: adapters go through vLLM's own manager
(`add_adapter`, `activate_adapter`), so every layer's `set_lora` runs as it would for a real adapter.
"""

from __future__ import annotations

from typing import Any

import torch

from epilora.plugin.worker import WorkerExtension
from epilora.plugin.worker_adapters import whole_widths

ADAPTER_STD = 0.02


class BenchmarkWorker(WorkerExtension):
    """Mixed into vLLM's worker; `self` is the worker."""

    def bench_adapter(self, seed: int, rank: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """A random adapter on every LoRA linear layer: module -> (A [rank, K], B [N, rank]), on the worker's device.

        Equal seeds give equal tensors on equal devices, whichever classes the layers have.
        """
        manager = self._epilora_manager()
        dtype = manager.lora_config.lora_dtype
        adapter: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        for name, layer in sorted(self._epilora_lora_layers().items()):
            device, K = self.device, layer.lora_a_stacked[0].shape[-1]  # type: ignore[attr-defined]
            widths = [b_LNR.shape[-2] for b_LNR in layer.lora_b_stacked]
            if layer.tp_size > 1:  # adapters are given whole; every rank takes its part
                K, widths = int(layer.base_layer.input_size), whole_widths(layer.base_layer, len(widths))
            parts = manager.packed_modules.get(name) or [name]
            if len(parts) == 2 and len(widths) == 4:  # q, k, v come as one module, z as another
                widths = [sum(widths[:3]), widths[3]]
            if len(parts) != len(widths):
                raise ValueError(f"layer {name!r}: {len(parts)} modules {parts} for {len(widths)} outputs {widths}")
            for part, N in zip(parts, widths, strict=True):
                generator = torch.Generator(device).manual_seed(seed * 100_003 + len(adapter))
                a_RK = torch.randn(rank, K, generator=generator, device=device, dtype=torch.float32)
                b_NR = torch.randn(N, rank, generator=generator, device=device, dtype=torch.float32)
                adapter[part] = ((a_RK * ADAPTER_STD).to(dtype), (b_NR * ADAPTER_STD).to(dtype))
        return adapter

    def bench_load_adapters(self, count: int, rank: int, seed: int) -> list[int]:
        """Put `count` random adapters into slots under ids 1..count; returns their slots.

        The manager keeps their names and not their tensors: an evicted one could not come back, so `count` must not
        exceed the slots.
        """
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.lora_weights import LoRALayerWeights

        manager = self._epilora_manager()
        if count > manager.lora_slots:
            raise ValueError(f"bench_load_adapters: count={count}; this engine has {manager.lora_slots} slots")
        for adapter_id in range(1, count + 1):
            layers = {
                module: LoRALayerWeights(
                    module_name=module, rank=rank, lora_alpha=rank, lora_a=a_RK, lora_b=b_NR, scaling=1.0
                )
                for module, (a_RK, b_NR) in self.bench_adapter(seed + adapter_id, rank).items()
            }
            model = LoRAModel(adapter_id, rank, layers)
            manager.add_adapter(model)
            manager.activate_adapter(adapter_id)
            model.loras.clear()
        return [manager.lora_index_to_id.index(adapter_id) for adapter_id in range(1, count + 1)]

    def bench_load_peft(self, folders: list[str]) -> list[int]:
        """Put PEFT folders into slots under ids 1, 2, ...; returns their slots. Raises AdapterRejected."""
        from epilora.adapters.peft_io import config_of, read_peft

        slots = []
        for adapter_id, folder in enumerate(folders, start=1):
            spec, tensors = read_peft(folder)
            self.epilora_stage_adapter(folder, config_of(spec), dict(tensors))
            slots.append(self.epilora_place_adapter(adapter_id)["slot"])
        return slots

    def bench_empty_slots(self, slots: list[int]) -> list[int]:
        """Those of `slots` that are all zero: adapters that were lost. [] is what should come back.

        vLLM fills and empties a slot in all layers at once, so one layer is looked at.
        """
        layer = list(self._epilora_lora_layers().values())[-1]
        return [slot for slot in slots if not all(bool(b_LNR[slot].any()) for b_LNR in layer.lora_b_stacked)]

    def bench_dispatch(self) -> dict[str, Any]:
        """Of this rank's LoRA layers on a GPU: kinds, why some are left to vLLM, the chosen paths and what was timed."""
        from epilora.plugin import gpu_load, path_table

        report = gpu_load.reports()[-1]
        times = path_table.current().times_us  # shape -> tokens -> path -> us a projection (one adapter, all adapters)
        return {
            "kinds": report["kinds"],
            "fallbacks": sorted(report["reasons"]),
            "dispatch_s": report["total_s"],
            "dispatch_cached": report.get("cached", False),
            "dispatch": report.get("choices", {}),
            "dispatch_us": {"x".join(map(str, shape)): by_tokens for shape, by_tokens in times.items()},
        }

    def bench_facts(self) -> dict[str, Any]:
        """KV tokens, memory in bytes, LoRA classes and the plugin's paths."""
        cache = self.cache_config  # type: ignore[attr-defined]
        classes: dict[str, int] = {}
        for layer in self._epilora_lora_layers().values():
            classes[type(layer).__name__] = classes.get(type(layer).__name__, 0) + 1
        facts: dict[str, Any] = {
            "kv_tokens": int(cache.num_gpu_blocks or 0) * int(cache.block_size),
            "lora_classes": classes,
        }
        if torch.cuda.is_available():
            free, total = torch.cuda.mem_get_info()
            facts |= {
                "torch_reserved_bytes": torch.cuda.memory_reserved(),
                "torch_peak_bytes": torch.cuda.max_memory_allocated(),
                "gpu_free_bytes": free,
                "gpu_total_bytes": total,
            }
        return facts

    def bench_reference_scores(self, sequences: list[tuple[list[int], int]], rank: int, seed: int) -> list[list[float]]:
        """`scoring.Fp32Reference` over this engine's codes; adapter i is what `bench_load_adapters` drew for id i."""
        from benchmarks.serving.scoring import Fp32Reference

        config = self.model_config.hf_config.get_text_config()  # type: ignore[attr-defined]
        reference = Fp32Reference(self._epilora_model(), config)
        held: dict[int, dict[str, tuple[torch.Tensor, torch.Tensor]]] = {0: {}}
        scores: list[list[float]] = []
        for tokens, adapter in sequences:
            if adapter not in held:
                held = {0: {}, adapter: self.bench_adapter(seed + adapter, rank)}  # one at a time: they are large
            scores.append(reference.scores(tokens, held[adapter]))
        return scores
