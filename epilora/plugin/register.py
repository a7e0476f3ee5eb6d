"""The `vllm.general_plugins` entry point: puts our layers into vLLM, once per process, and says what it did.

Features, each behind its own test in `compat`:
  layers     LoRA linear classes replaced by our subclasses
  cpu_rows   (CPU) rows grouped by adapter whenever vLLM updates its mapping
  paths      (GPU) paths timed and kernels compiled after loading, before the KV cache is sized
  mapping    (GPU) a batch's slots sorted and counted on the host; stock vLLM waits for the GPU four times when a batch changes
  cache_key  vLLM's compile cache told apart from that of stock vLLM and of other switches
  matched    W8A16 activations where `additional_config={"epilora": {"activations": "w8a16"}}` asks for them
  float32    (CPU) float32 activations admitted with online quantisation; vLLM lists only bf16 and fp16
  seeds      (CPU) seeds honoured in batches in which only some rows have one; stock 0.28 draws all rows from the global
  generator

vLLM swallows plugin errors and runs without the plugin: look at `installed()`. EPILORA_DISABLE=1 leaves stock vLLM;
EPILORA_REQUIRE=1 makes it an error if the layers cannot be installed. Idempotent, cheap, touches no device.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from epilora.errors import UnsupportedKernel

from . import compat

logger = logging.getLogger(__name__)

DISABLE_VARIABLE = "EPILORA_DISABLE"
REQUIRE_VARIABLE = "EPILORA_REQUIRE"


@dataclass(frozen=True)
class Status:
    """What `register` did in this process. features: installed ones; reasons: why others are not, by feature."""

    features: tuple[str, ...]
    reasons: dict[str, str]

    @property
    def active(self) -> bool:
        return "layers" in self.features


_status: Status | None = None


def installed() -> Status | None:
    """What is installed in this process; None before `register` ran."""
    return _status


def register() -> None:
    """Install everything this vLLM supports. Called by vLLM in each of its processes; repeated calls do nothing."""
    global _status
    if _status is not None:
        return
    if os.environ.get(DISABLE_VARIABLE, "") == "1":
        _status = Status((), {"all": f"{DISABLE_VARIABLE}=1"})
        logger.info("EpiLoRA plugin disabled by %s=1: stock vLLM", DISABLE_VARIABLE)
        return
    features: list[str] = []
    reasons: dict[str, str] = {}
    cpu = compat.is_cpu()
    plan: list[tuple[str, str, Callable[[], None]]] = [
        ("cpu_rows", "cpu", _install_cpu_rows),
        ("layers", "", _install_layers),
        ("paths", "gpu", _install_paths),
        ("mapping", "gpu", _install_mapping),
        ("cache_key", "", _install_cache_key),
        ("matched", "", _install_matched),
        ("float32", "cpu", _install_float32),
        ("seeds", "cpu", _install_seeds),
    ]
    for name, backend, install in plan:
        if backend and (backend == "cpu") != cpu:
            reasons[name] = f"only needed on the {backend.upper()} backend"
            continue
        problems = compat.problems(name)
        if name == "layers" and cpu and "cpu_rows" not in features:
            problems.append("needs cpu_rows")
        if name == "paths" and "layers" not in features:
            problems.append("needs layers")
        if problems:
            reasons[name] = "; ".join(problems)
            logger.warning("EpiLoRA: %s not installed, stock vLLM does it: %s", name, reasons[name])
            continue
        install()
        features.append(name)
    if "layers" not in features and os.environ.get(REQUIRE_VARIABLE, "") == "1":
        raise UnsupportedKernel(
            f"{REQUIRE_VARIABLE}=1, but this vLLM's LoRA layers cannot be replaced: {reasons['layers']}; use vLLM 0.26 to"
            " 0.33, or unset it to run stock"
        )
    _status = Status(tuple(features), reasons)
    logger.info("EpiLoRA plugin installed: %s", ", ".join(features) or "nothing")


def _install_layers() -> None:
    import vllm.lora.utils as lora_utils

    from .layers import swapped_class

    lora_utils._all_lora_classes = tuple(swapped_class(stock) for stock in lora_utils._all_lora_classes)


def _install_cpu_rows() -> None:
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    from .cpu_lora import group_rows

    stock = PunicaWrapperCPU.update_metadata

    @functools.wraps(stock)
    def update_metadata(self: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        self._epilora_rows = group_rows(self.token_lora_indices)
        meta = getattr(self, "token_mapping_meta", None)  # only with path=op
        if meta is not None:
            meta.prepare_tensors(self.token_lora_indices.int())

    PunicaWrapperCPU.update_metadata = update_metadata  # type: ignore[method-assign]


def _install_paths() -> None:
    from vllm.lora.model_manager import LoRAModelManager

    stock = LoRAModelManager._create_lora_modules

    @functools.wraps(stock)
    def _create_lora_modules(self: Any) -> None:
        stock(self)
        from .gpu_load import hook_worker

        hook_worker()

    LoRAModelManager._create_lora_modules = _create_lora_modules  # type: ignore[method-assign]


def _install_mapping() -> None:
    from vllm.lora.punica_wrapper.punica_gpu import PunicaWrapperGPU

    from . import batch_mapping

    @functools.wraps(PunicaWrapperGPU.update_metadata)
    def update_metadata(self: Any, *args: Any, **kwargs: Any) -> None:
        batch_mapping.update_metadata(self, *args, **kwargs)

    PunicaWrapperGPU.update_metadata = update_metadata  # type: ignore[method-assign]


def _install_cache_key() -> None:
    from vllm.config.vllm import VllmConfig

    from .settings import settings_of

    stock = VllmConfig.compute_hash

    @functools.wraps(stock)
    def compute_hash(self: Any) -> str:
        ours = f"epilora {_version()} {settings_of(self).traced()}"
        return hashlib.sha256(f"{stock(self)} {ours}".encode()).hexdigest()[:10]

    VllmConfig.compute_hash = compute_hash  # type: ignore[method-assign]


def _version() -> str:
    from importlib.metadata import version

    try:
        return version("epilora")
    except ImportError:  # run from a source tree that is not installed
        return "source"


def _install_matched() -> None:
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    from .layers import match_activations, requested_activations

    stock = BaseModelLoader.load_model

    @functools.wraps(stock)
    def load_model(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        model = stock(self, vllm_config, *args, **kwargs)
        match_activations(model, requested_activations(vllm_config), vllm_config.model_config.quantization)
        return model

    BaseModelLoader.load_model = load_model  # type: ignore[method-assign]


def _install_float32() -> None:
    import torch
    from vllm.model_executor.layers.quantization.online.base import OnlineQuantizationConfig

    stock = OnlineQuantizationConfig.get_supported_act_dtypes()
    admitted = [*stock, *([] if torch.float32 in stock else [torch.float32])]
    replacement: Any = classmethod(lambda cls: list(admitted))
    OnlineQuantizationConfig.get_supported_act_dtypes = replacement  # type: ignore[method-assign]


def _install_seeds() -> None:
    import torch
    from vllm.v1.sample.ops import topk_topp_sampler

    stock = topk_topp_sampler.TopKTopPSampler.forward_cpu

    @functools.wraps(stock)
    def forward_cpu(self: Any, logits: Any, generators: dict[int, Any], k: Any, p: Any) -> tuple[Any, Any]:
        if not 0 < len(generators) < logits.shape[0]:
            return stock(self, logits, generators, k, p)
        logits = topk_topp_sampler.apply_top_k_top_p(logits, k, p)
        processed = None
        if self.logprobs_mode == "processed_logits":
            processed = logits
        elif self.logprobs_mode == "processed_logprobs":
            processed = logits.log_softmax(dim=-1, dtype=torch.float32)
        # argmax of p / e with e ~ Exp(1) draws from p; each seeded row takes e from its own generator.
        probs = logits.softmax(dim=-1, dtype=torch.float32)
        noise = torch.empty_like(probs).exponential_()
        for row, generator in generators.items():
            noise[row].exponential_(generator=generator)
        return probs.div_(noise).argmax(dim=-1), processed

    topk_topp_sampler.TopKTopPSampler.forward_cpu = forward_cpu  # type: ignore[method-assign]
