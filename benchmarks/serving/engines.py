"""Engines under measurement: what is built, and a handle on each engine's own process.

Every engine lives in a process of its own, because what tells the variants apart is read when vLLM is imported: stock or
ours (`EPILORA_DISABLE`), tuned LoRA kernels (`VLLM_TUNED_CONFIG_FOLDER`), two streams (`VLLM_LORA_ENABLE_DUAL_STREAM`). The
processes import vLLM side by side, build their engines side by side when told to, and then wait; a command goes to one of
them at a time, so that only one engine ever works while something is timed. An idle engine holds memory and no more: its
process blocks on its pipe.

    with EngineProcess(spec, work_folder) as engine:
        engine.build()
        engine.wait_ready()
        engine.call("tpot", adapter=1, prompt_tokens=64, new_tokens=128)
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection, Pipe
from typing import Any

OURS = "epilora"
OURS_FP8 = "epilora_fp8_adapters"
OURS_QUANTISING = "epilora_quantise_op"  # activations quantised in our kernels instead of vLLM's compiled graph
NO_LORA = "vllm_no_lora"
STOCK = (
    "vllm_lora_default",
    "vllm_lora_tuned",
    "vllm_lora_default_two_streams",
    "vllm_lora_tuned_two_streams",
)
VARIANTS = (OURS, OURS_FP8, OURS_QUANTISING, NO_LORA, *STOCK)
# Tokens per batch that get a CUDA graph; decode batches in between run padded to the next.
CAPTURE_SIZES = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256)


class EngineFailed(RuntimeError):
    """An engine's process ended or refused a command; the text has the end of its log."""


@dataclass(frozen=True)
class EngineSpec:
    """One engine. Everything but `variant` is equal among the engines that are compared.

    model: folder with a config.json. variant: one of VARIANTS. slots: adapter slots, 0 turns LoRA off. rank: of the slots.
    max_num_seqs, max_num_batched_tokens, max_model_len: vLLM's limits. kv_bytes: KV cache; 0 lets vLLM size it by
    `gpu_memory_utilization`. capture_sizes: batch sizes with a CUDA graph, () for an eager engine without compilation.
    load_format: "dummy" draws weights, "auto" reads them. gpu: index. tuned_folder: tables of the tuned variants.
    dtype: of activations. seed: of weights. tensor_parallel: ranks, on GPUs from `gpu` on.
    """

    model: str
    variant: str
    slots: int
    rank: int = 64
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_model_len: int = 4096
    kv_bytes: int = 0
    gpu_memory_utilization: float = 0.9
    capture_sizes: tuple[int, ...] = CAPTURE_SIZES
    load_format: str = "dummy"
    gpu: int = 0
    tuned_folder: str = ""
    dtype: str = "bfloat16"
    quantization: str = "fp8_per_channel"
    seed: int = 0
    tensor_parallel: int = 1

    def __post_init__(self) -> None:
        if self.variant not in VARIANTS:
            raise ValueError(f"variant={self.variant!r}; allowed are {', '.join(VARIANTS)}")
        if (self.slots == 0) != (self.variant == NO_LORA):
            raise ValueError(f"variant={self.variant!r} with slots={self.slots}: exactly {NO_LORA} has none")
        if "_tuned" in self.variant and not self.tuned_folder:
            raise ValueError(f"variant={self.variant!r} needs tuned_folder (python -m benchmarks.serving.tune)")

    def as_variant(self, variant: str) -> EngineSpec:
        """The same engine as another variant."""
        slots = 0 if variant == NO_LORA else self.slots
        return replace(self, variant=variant, slots=slots)

    def environment(self) -> dict[str, str]:
        """Variables that make the variant; "" unsets one."""
        stock = not self.variant.startswith(OURS)
        return {
            "EPILORA_DISABLE": "1" if stock else "",
            "EPILORA_QUANTISE": "op" if self.variant == OURS_QUANTISING else "",
            "VLLM_TUNED_CONFIG_FOLDER": self.tuned_folder if "_tuned" in self.variant else "",
            "VLLM_LORA_ENABLE_DUAL_STREAM": "1" if self.variant.endswith("_two_streams") else "",
            "CUDA_VISIBLE_DEVICES": ",".join(str(self.gpu + rank) for rank in range(self.tensor_parallel)),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": "INFO",  # into the engine's own log file
        }

    def settings(self) -> dict[str, Any]:
        """What a results row says about the engine."""
        told = asdict(self)
        told["model"] = pathlib.Path(self.model).name
        told["tuned"] = bool(told.pop("tuned_folder")) and "_tuned" in self.variant
        return told


class EngineProcess:
    """An engine in its own process. Construction and `build` return at once; `wait_ready` waits for the engine."""

    _made = 0

    def __init__(self, spec: EngineSpec, work: pathlib.Path, extra_env: dict[str, str] | None = None) -> None:
        """spec: what to build. work: folder for the log and vLLM's compile cache. extra_env: more variables."""
        self.spec = spec
        self.facts: dict[str, Any] = {}
        work.mkdir(parents=True, exist_ok=True)
        EngineProcess._made += 1
        self.log = work / f"{EngineProcess._made}-{spec.variant}.log"
        # A cache for each: engines that start side by side must not write one another's artefacts.
        environment = dict(os.environ) | {
            "VLLM_CACHE_ROOT": str(work / "cache" / f"{spec.variant}-s{spec.slots}-tp{spec.tensor_parallel}"),
            "PYTHONUNBUFFERED": "1",
        }
        for key, value in (spec.environment() | (extra_env or {})).items():
            environment.pop(key, None)
            if value:
                environment[key] = value
        ours, theirs = Pipe()
        self._connection: Connection = ours
        self._began = time.monotonic()
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.serving.engine_main", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
            )
        theirs.close()

    def build(self, spec: EngineSpec | None = None) -> None:
        """Start building. spec: instead of the constructor's; of the same variant, GPU and tuned tables.

        Raises ValueError if it needs another environment.
        """
        if spec is not None and spec.environment() != self.spec.environment():
            raise ValueError(f"this process was started for {self.spec.environment()}, not {spec.environment()}")
        self.spec = spec or self.spec
        self._began = time.monotonic()
        self._connection.send(self.spec)

    def _failed(self, what: str) -> EngineFailed:
        tail = self.log.read_text(errors="replace")[-3000:]
        return EngineFailed(f"engine {self.spec.variant} (slots {self.spec.slots}): {what}; its log ends:\n{tail}")

    def _receive(self, timeout_s: float, doing: str, until: str = "result") -> Any:
        deadline = time.monotonic() + timeout_s
        while True:
            if not self._connection.poll(max(0.0, deadline - time.monotonic())):
                raise self._failed(f"no answer to {doing} in {timeout_s:.0f} s")
            try:
                kind, value = self._connection.recv()
            except (EOFError, OSError) as err:
                raise self._failed(f"its process ended during {doing}") from err
            if kind == "error":
                raise EngineFailed(f"engine {self.spec.variant} (slots {self.spec.slots}): {doing}: {value}")
            if kind == until:
                return value

    def wait_loaded(self, timeout_s: float = 600.0) -> float:
        """Block until its weights are loaded and its dispatch is timed; seconds since `build`. Raises EngineFailed."""
        self._receive(timeout_s, "loading", until="loaded")
        return time.monotonic() - self._began

    def wait_ready(self, timeout_s: float = 600.0) -> dict[str, Any]:
        """Block until it is built; facts about it. Raises EngineFailed."""
        self.facts = self._receive(timeout_s, "start")
        self.facts["ready_after_s"] = round(time.monotonic() - self._began, 1)
        return self.facts

    def call(self, command: str, *, timeout_s: float = 300.0, **arguments: Any) -> Any:
        """One of `engine_main.COMMANDS`; blocks for its result. Raises EngineFailed."""
        try:
            self._connection.send((command, arguments))
        except OSError as err:
            raise self._failed(f"its process ended before {command}") from err
        return self._receive(timeout_s, command)

    def close(self) -> None:
        """End the process. Idempotent."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(15)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._connection.close()

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def describe(spec: EngineSpec) -> str:
    """One line for logs."""
    return json.dumps(
        {k: v for k, v in spec.settings().items() if k in ("model", "variant", "slots", "kv_bytes", "gpu")}
    )
