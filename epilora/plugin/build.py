"""Build an in-process LLMEngine with the plugin in it, and say what was built."""

from __future__ import annotations

import gc
import pathlib
from typing import Any

from epilora.adapters.digest import ranks_digest
from epilora.types import EngineInfo

from . import compat
from .environment import prepare_environment
from .kv_memory import keep_weights_plain, pool_argument


def build_engine(name: str, arguments: dict[str, Any], gpu_arguments: dict[str, Any]) -> Any:
    """An LLMEngine (vLLM's V1 engine, in this process).

    arguments: EngineArgs' fields; None leaves vLLM's default, a name this release does not know is dropped.
    gpu_arguments: more of them, on a GPU only. Raises RuntimeError if the plugin is not active in it, and what vLLM
    raises.
    """
    prepare_environment(arguments["tensor_parallel_size"])
    from vllm import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    from . import register

    if not compat.is_cpu():
        keep_weights_plain()  # worker processes do it for themselves, see `worker`
        arguments = {**arguments, **gpu_arguments, pool_argument(EngineArgs): True}
    given = {key: value for key, value in arguments.items() if value is not None}
    engine = LLMEngine.from_engine_args(EngineArgs(**compat.supported_arguments(EngineArgs, given)))
    status = register.installed()
    if status is None or not status.active:
        why = "vLLM did not load it (is epilora installed, VLLM_PLUGINS unset?)" if status is None else status.reasons
        raise RuntimeError(f"engine {name}: the EpiLoRA plugin is not active: {why}")
    engine.collective_rpc("epilora_count_steps")
    gc.collect()
    gc.freeze()  # what start-up made lives as long as the process: collections need not walk it
    return engine


def describe(engine: Any, name: str, arguments: dict[str, Any], requested: str, *, max_model_len: int) -> EngineInfo:
    """Identity, limits and arithmetic of a built engine.

    requested: the activations asked for. max_model_len: what requests may use. Raises RuntimeError if its FP8 layers run other activations than asked for.
    """
    import vllm

    def rpc(method: str) -> Any:
        return engine.collective_rpc(method)[0]

    running = rpc("epilora_activations")
    if arguments["quantization"] and set(running) != {requested}:
        raise RuntimeError(f"engine {name}: asked for activations {requested}, FP8 layers run {running or 'nothing'}")
    return EngineInfo(
        name=name,
        model_path=arguments["model"],
        model_name=pathlib.Path(arguments["model"]).name,
        base_digest=ranks_digest(engine.collective_rpc("epilora_base_checksum")),
        activations=requested,
        dtype=arguments["dtype"],
        quantization=arguments["quantization"] or "none",
        max_model_len=max_model_len,
        max_loras=arguments["max_loras"],
        max_lora_rank=arguments["max_lora_rank"],
        vllm_version=vllm.__version__,
        plugin_active=True,
        linear_modules=tuple(row["name"] for row in rpc("epilora_linear_modules") if row["adaptable"]),
        eos_token_id=getattr(engine.get_tokenizer(), "eos_token_id", None),
    )
