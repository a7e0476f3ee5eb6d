"""Before vLLM is imported: its environment, and what can be read from a checkpoint folder without it."""

from __future__ import annotations

import json
import os
import pathlib
import struct

from epilora.errors import UnsupportedKernel

MARLIN = "marlin"  # what `VllmEngine` calls vLLM's own weight-only FP8 kernel
DEFAULT_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_EMBEDDINGS = ("embed_tokens", "lm_head", "wte", "wpe", "embeddings", "word_embeddings")


def prepare_environment(ranks: int = 1) -> None:
    """Environment vLLM needs for one in-process engine. Before vllm is imported; what is set already stays.

    Off a GPU: Dynamo off (the engine is eager; the log-prob kernel's compile would cost seconds), threads not bound to
    cores (others share the machine). Several ranks: their processes start afresh (this one has threads, and perhaps a GPU
    open), meet on this machine, and NCCL leaves NVLink multicast alone, whose memory cannot be shared.
    """
    if ranks > 1:
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if not os.path.exists("/dev/nvidiactl"):
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")


def force_marlin() -> None:
    """Have vLLM run FP8 layers by Marlin, for this whole process. Raises UnsupportedKernel without a GPU."""
    if not os.path.exists("/dev/nvidiactl"):
        raise UnsupportedKernel(
            "activations=marlin: vLLM's Marlin kernel needs a GPU; use w8a16, which reads the codes in place"
        )
    os.environ["VLLM_TEST_FORCE_FP8_MARLIN"] = "1"


def linear_suffixes(model_path: str | pathlib.Path) -> tuple[str, ...]:
    """Last names of the linear layers in a checkpoint: its two-dimensional `*.weight` tensors but embeddings and head.

    Reads safetensors headers only; DEFAULT_TARGETS where there is no safetensors file.
    """
    found: set[str] = set()
    for path in sorted(pathlib.Path(model_path).glob("*.safetensors")):
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        for name, entry in header.items():
            parts = name.split(".")
            if parts[-1] == "weight" and len(parts) > 1 and len(entry["shape"]) == 2 and parts[-2] not in _EMBEDDINGS:
                found.add(parts[-2])
    return tuple(sorted(found)) or DEFAULT_TARGETS


def spare_positions(model_path: str | pathlib.Path, max_model_len: int) -> int:
    """1 if the model has a position past max_model_len (vLLM samples one more token when it scores a prompt), else 0."""
    config = json.loads((pathlib.Path(model_path) / "config.json").read_text())
    return int(config.get("max_position_embeddings", 0) > max_model_len)
