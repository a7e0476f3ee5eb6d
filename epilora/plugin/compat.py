"""What this plugin needs of vLLM, as feature tests: names, signatures, attributes. Never a comparison of versions.

Each `*_problems` function returns reasons why one feature cannot be installed here (empty: it can). `register` leaves
stock vLLM in place for what is not understood and says so once. Small differences between releases are bridged here
too.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any


def _attribute(path: str) -> Any:
    """The object `package.module:a.b`, or None if any part of it is missing."""
    module_name, _, names = path.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
    except ImportError:
        return None
    for name in names.split("."):
        found = getattr(found, name, None)
        if found is None:
            return None
    return found


def _parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def _signature_problems(wanted: dict[str, list[str]]) -> list[str]:
    problems = []
    for path, names in wanted.items():
        function = _attribute(path)
        if function is None:
            problems.append(f"{path} is missing")
        elif _parameters(function)[: len(names)] != names:
            problems.append(f"{path} takes {_parameters(function)}, expected {names}")
    return problems


BASE_LINEAR = "vllm.lora.layers.base_linear:BaseLinearLayerWithLoRA"
CPU_WRAPPER = "vllm.lora.punica_wrapper.punica_cpu:PunicaWrapperCPU"


def layer_problems() -> list[str]:
    """Reasons not to swap the LoRA linear classes."""
    classes = _attribute("vllm.lora.utils:_all_lora_classes")
    problems = (
        [] if isinstance(classes, tuple) and classes else ["vllm.lora.utils:_all_lora_classes is no tuple of classes"]
    )
    return problems + _signature_problems(
        {
            f"{BASE_LINEAR}.apply": ["self", "x", "bias"],
            f"{BASE_LINEAR}.set_lora": ["self", "index", "lora_a", "lora_b"],
            f"{BASE_LINEAR}.reset_lora": ["self", "index"],
            f"{BASE_LINEAR}.create_lora_weights": ["self", "max_loras", "lora_config"],
            f"{BASE_LINEAR}.set_mapping": ["self", "punica_wrapper"],
            f"{BASE_LINEAR}._get_quant_method": ["self"],
        }
    )


def cpu_mapping_problems() -> list[str]:
    """Reasons not to read the CPU wrapper's row mapping."""
    problems = _signature_problems(
        {f"{CPU_WRAPPER}.update_metadata": ["self", "mapping", "lora_index_to_id", "max_loras", "vocab_size"]}
    )
    if _attribute(f"{CPU_WRAPPER}.token_lora_indices") is None:
        problems.append(f"{CPU_WRAPPER}.token_lora_indices is missing")
    return problems


def loader_problems() -> list[str]:
    """Reasons not to choose the activations of FP8 layers after loading."""
    return _signature_problems(
        {
            "vllm.model_executor.model_loader.base_loader:BaseModelLoader.load_model": [
                "self",
                "vllm_config",
                "model_config",
            ],
            "vllm.model_executor.layers.linear:LinearMethodBase.apply": ["self", "layer", "x", "bias"],
        }
    )


def float32_problems() -> list[str]:
    """Reasons not to admit float32 activations with online quantisation."""
    name = "vllm.model_executor.layers.quantization.online.base:OnlineQuantizationConfig"
    config = _attribute(name)
    if config is None:
        return [f"{name} is missing"]
    if not isinstance(inspect.getattr_static(config, "get_supported_act_dtypes", None), classmethod):
        return [f"{name}.get_supported_act_dtypes is no classmethod"]
    return []


def sampler_problems() -> list[str]:
    """Reasons not to repair seeds in the CPU sampler."""
    module = "vllm.v1.sample.ops.topk_topp_sampler"
    problems = _signature_problems(
        {f"{module}:TopKTopPSampler.forward_cpu": ["self", "logits", "generators", "k", "p"]}
    )
    if _attribute(f"{module}:apply_top_k_top_p") is None:
        problems.append(f"{module}:apply_top_k_top_p is missing")
    return problems


def is_cpu() -> bool:
    """Whether vLLM runs on its CPU backend. Asks the platform's kind only; no device is touched."""
    from vllm.platforms import current_platform

    return current_platform.is_cpu()


def rename_mapper(model: Any) -> Any:
    """The model's mapper from checkpoint to engine module names without its packing part, or None if it has none."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    if mapper is None:
        return None
    for name in ("get_unstacked_mapper", "get_rename_mapper"):
        if hasattr(mapper, name):
            return getattr(mapper, name)()
    return mapper


def engine_module_name(model: Any, name: str) -> str:
    """A checkpoint module's name as the engine spells it (before packing)."""
    mapper = rename_mapper(model)
    if mapper is None:
        return name
    mapped = mapper._map_name(name + ".weight")
    return name if mapped is None else mapped.removesuffix(".weight")


def engine_counts(engine: Any) -> tuple[int, int, float]:
    """(running, waiting, used fraction of the KV cache) of an in-process LLMEngine's scheduler."""
    scheduler = engine.engine_core.engine_core.scheduler
    return len(scheduler.running), len(scheduler.waiting), float(scheduler.kv_cache_manager.usage)


def partial_output(engine: Any, internal_id: str) -> tuple[list[int], Any]:
    """(tokens so far, their logprobs or None) of a running request."""
    state = engine.output_processor.request_states.get(internal_id)
    if state is None:
        return [], None
    return list(state.detokenizer.output_token_ids), state.logprobs_processor.logprobs


def supported_arguments(function: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments that this release's function or dataclass takes."""
    known = set(_parameters(function))
    return {name: value for name, value in arguments.items() if name in known}


def validation_errors() -> tuple[type[Exception], ...]:
    """What SamplingParams raises for values it does not allow."""
    found = _attribute("vllm.exceptions:VLLMValidationError")
    return (ValueError,) if found is None else (ValueError, found)


def lora_request(name: str, int_id: int) -> Any:
    """vLLM's record of an adapter that lives in memory only."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(lora_name=name, lora_int_id=int_id, lora_path="in-memory")
