"""What this plugin needs of vLLM, as feature tests: names, signatures, attributes. Never a comparison of versions.

Each `*_problems` function returns reasons why one feature cannot be installed here (empty: it can). `register` leaves
stock vLLM in place for what is not understood and says so once. Small differences between releases are bridged here
too.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
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


BASE_LINEAR = "vllm.lora.layers.base_linear:BaseLinearLayerWithLoRA"
WRAPPER = "vllm.lora.punica_wrapper.punica_base:PunicaWrapperBase"
CPU_WRAPPER = "vllm.lora.punica_wrapper.punica_cpu:PunicaWrapperCPU"
GPU_WRAPPER = "vllm.lora.punica_wrapper.punica_gpu:PunicaWrapperGPU"
KERNEL_META = "vllm.lora.ops.triton_ops.lora_kernel_metadata:LoRAKernelMeta"
ONLINE_CONFIG = "vllm.model_executor.layers.quantization.online.base:OnlineQuantizationConfig"
SAMPLER = "vllm.v1.sample.ops.topk_topp_sampler"

# Per feature: what must exist, with the first parameters of functions (None: a class or a value; the name is enough).
# `tests/plugin/test_compat_facts.py` holds this table against what three releases' sources say.
WANTED: dict[str, dict[str, list[str] | None]] = {
    "layers": {
        "vllm.lora.utils:_all_lora_classes": None,
        f"{BASE_LINEAR}.apply": ["self", "x", "bias"],
        f"{BASE_LINEAR}.set_lora": ["self", "index", "lora_a", "lora_b"],
        f"{BASE_LINEAR}.reset_lora": ["self", "index"],
        f"{BASE_LINEAR}.create_lora_weights": ["self", "max_loras", "lora_config"],
        f"{BASE_LINEAR}._get_quant_method": ["self"],
        "vllm.lora.layers.base:BaseLayerWithLoRA.set_mapping": ["self", "punica_wrapper"],
        "vllm.config.vllm:get_current_vllm_config_or_none": [],
    },
    "cpu_rows": {
        f"{WRAPPER}.update_metadata": ["self", "mapping", "lora_index_to_id", "max_loras", "vocab_size"],
        f"{WRAPPER}.token_lora_indices": None,
        CPU_WRAPPER: None,
    },
    "matched": {
        "vllm.model_executor.model_loader.base_loader:BaseModelLoader.load_model": [
            "self",
            "vllm_config",
            "model_config",
        ],
        "vllm.model_executor.layers.linear:LinearMethodBase.apply": ["self", "layer", "x", "bias"],
    },
    "paths": {
        f"{KERNEL_META}.make": ["max_loras", "max_num_tokens", "device"],
        f"{KERNEL_META}.prepare_tensors": ["self", "token_lora_mapping"],
        f"{GPU_WRAPPER}.update_metadata": ["self", "mapping", "lora_index_to_id", "max_loras", "vocab_size"],
        "vllm.lora.model_manager:LoRAModelManager._create_lora_modules": ["self"],
        "vllm._custom_ops:cutlass_scaled_mm": ["a", "b", "scale_a", "scale_b", "out_dtype", "bias"],
        "vllm._custom_ops:scaled_fp8_quant": ["input"],
        "vllm.distributed.parallel_state:get_tp_group": [],
    },
    "mapping": {
        f"{GPU_WRAPPER}.update_metadata": ["self", "mapping", "lora_index_to_id", "max_loras", "vocab_size"],
        f"{WRAPPER}._update_base_metadata": ["self", "mapping", "lora_index_to_id", "max_loras", "vocab_size"],
        f"{KERNEL_META}.prepare_tensors": ["self", "token_lora_mapping"],
    },
    "cache_key": {"vllm.config.vllm:VllmConfig.compute_hash": ["self"]},
    "float32": {f"{ONLINE_CONFIG}.get_supported_act_dtypes": ["cls"]},
    "seeds": {
        f"{SAMPLER}:TopKTopPSampler.forward_cpu": ["self", "logits", "generators", "k", "p"],
        f"{SAMPLER}:apply_top_k_top_p": ["logits"],
    },
}
# Read where it is loaded already (the worker's process), never imported by `register`.
WORKER_WANTED: dict[str, list[str] | None] = {
    "vllm.v1.worker.gpu_worker:Worker.determine_available_memory": ["self"],
    "vllm.lora.ops.triton_ops.lora_shrink_op:_lora_shrink": [
        "inputs", "lora_a_weights", "output_tensor", "token_lora_mapping", "token_indices_sorted_by_lora_ids",
        "num_tokens_per_lora", "lora_token_start_loc", "lora_ids", "no_lora_flag_cpu", "num_active_loras", "scaling",
    ],
    "vllm.lora.ops.triton_ops.lora_expand_op:_lora_expand": [
        "inputs", "lora_b_weights", "output_tensor", "token_lora_mapping", "token_indices_sorted_by_lora_ids",
        "num_tokens_per_lora", "lora_token_start_loc", "lora_ids", "no_lora_flag_cpu", "num_active_loras", "offset_start",
        "add_inputs",
    ],
}  # fmt: skip
KERNEL_META_FIELDS = (
    "token_lora_mapping",
    "token_indices_sorted_by_lora_ids",
    "active_lora_ids",
    "num_tokens_per_lora",
    "lora_token_start_loc",
    "no_lora_flag_cpu",
    "num_active_loras_cpu",
    "default_num_active_loras_cpu",
)


def touched() -> list[str]:
    """Every name of vLLM that the plugin's features need, for `scripts/vllm_facts.py`."""
    names = {path for wanted in (*WANTED.values(), WORKER_WANTED) for path in wanted}
    return sorted(names | {f"{KERNEL_META}.{field}" for field in (*KERNEL_META_FIELDS, "captured_lora_counts")})


def problems(feature: str) -> list[str]:
    """Reasons why `feature` (a key of WANTED) cannot be installed here; empty if it can."""
    found = []
    for path, names in WANTED[feature].items():
        thing = _attribute(path)
        if thing is None:
            found.append(f"{path} is missing")
        elif names is not None and _parameters(thing)[: len(wanted := _bound(thing, names))] != wanted:
            found.append(f"{path} takes {_parameters(thing)}, expected {names}")
    if feature == "layers" and not found:
        classes = _attribute("vllm.lora.utils:_all_lora_classes")
        if not isinstance(classes, tuple) or not classes:
            found.append("vllm.lora.utils:_all_lora_classes is no tuple of classes")
    return found


def _bound(function: Any, names: list[str]) -> list[str]:
    """The parameter names without the one that a classmethod has bound."""
    return names[1:] if inspect.ismethod(function) and names[:1] == ["cls"] else names


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


def when_a_rank_dies(engine: Any, call: Callable[[], None]) -> None:
    """Have `call` made, in some thread, if a worker process of an LLMEngine ends by itself. One process: it cannot."""
    register = getattr(engine.model_executor, "register_failure_callback", None)
    if register is not None:
        register(call)


def lost_a_rank(engine: Any) -> bool:
    """Whether a worker process of an LLMEngine has ended by itself: no call reaches the others any more."""
    return bool(getattr(engine.model_executor, "is_failed", False))


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


def tool_parser(name: str) -> Any:
    """vLLM's class of a tool-call parser: (tokenizer, tools) -> parser. Raises ValueError for a name it does not know."""
    manager = _attribute("vllm.tool_parsers:ToolParserManager")
    manager = manager or _attribute("vllm.entrypoints.openai.tool_parsers:ToolParserManager")
    try:
        return manager.get_tool_parser(name)
    except (KeyError, AttributeError) as err:
        known = ", ".join(manager.list_registered()) if manager is not None else "none"
        raise ValueError(f"tool_parser={name!r}: this vLLM has {known}") from err


def chat_request() -> Any:
    """The class of a parsed chat request, which vLLM's tool parsers want."""
    found = _attribute("vllm.entrypoints.openai.chat_completion.protocol:ChatCompletionRequest")
    return found or _attribute("vllm.entrypoints.openai.protocol:ChatCompletionRequest")
