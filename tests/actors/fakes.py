"""Small stand-ins for an engine and a trainer, for tests of the shells and the pool alone."""

from __future__ import annotations

import os
import time
from typing import Any

from epilora.errors import AdapterNotFound, EngineDead, TrainerDead
from epilora.quant.formats import Format, ScaleAxis
from epilora.quant.manifest import Location, TensorEntry, Transport, WeightEntry, WeightManifest
from epilora.types import AdapterVersion, EngineInfo, EngineStats, LoadReceipt


class Engine:
    """Holds adapters by digest; `load` sets what it reports. gpu_uuids: devices its weights lie on, one a rank."""

    def __init__(
        self, name: str, start_s: float = 0.0, broken: bool = False, gpu_uuids: tuple[str, ...] = (), **told: Any
    ):
        time.sleep(start_s)
        if broken:
            raise RuntimeError("model file is damaged")
        self.name, self.told, self.gpu_uuids = name, told, gpu_uuids
        self.made_at = time.time_ns()
        self.reported: dict[str, Any] = {}
        self.loaded: dict[str, set[str]] = {}
        self.closed = self.stopped = False

    def info(self) -> EngineInfo:
        return EngineInfo(
            name=self.name, model_path=f"made at {self.made_at}", model_name="fake", base_digest="b" * 64,
            activations="w8a16", dtype="float32", quantization=self.told.get("quantization", "fp8_per_channel"),
            max_model_len=8, max_loras=4, max_lora_rank=8, vllm_version="none", plugin_active=True, linear_modules=(),
        )  # fmt: skip

    def stats(self) -> EngineStats:
        if self.stopped:
            raise EngineDead("the step loop failed")
        shown = {"running": 0, "waiting": 0, "kv_usage": 0.0} | self.reported
        return EngineStats(steps=0, mixed_steps=0, tenant_rows=0, rollout_rows=0, loaded=tuple(self.loaded), **shown)

    async def score(self, sequences: Any, adapter: str | None) -> list[list[float]]:
        """Not scores: the tests' way to say what `stats` shall report from now on ("running=3,kv_usage=0.95"), or to fail."""
        if adapter == "stop":
            self.stopped = True
        elif adapter:
            self.reported = {
                k: type(0.0 if k == "kv_usage" else 0)(v) for k, v in (p.split("=") for p in adapter.split(","))
            }
        else:
            self.reported = {}
        return []

    async def load_adapter(self, version: AdapterVersion, tensors: Any) -> LoadReceipt:
        self.loaded.setdefault(version.digest, set())
        return LoadReceipt(version.digest, 0, "r", "r", 1, 1, 0.0)

    async def pin_adapter(self, digest: str, holder: str) -> None:
        if digest not in self.loaded:
            raise AdapterNotFound(digest)
        self.loaded[digest].add(holder)

    async def unpin_adapter(self, digest: str, holder: str) -> None:
        self.loaded[digest].discard(holder)

    def tokenize(self, text: str) -> tuple[int, ...]:
        """How many pins a digest has."""
        return (len(self.loaded[text]),)

    async def export_weights(self) -> list[WeightManifest]:
        ranks = self.gpu_uuids or ("",)
        return [self._manifest(rank, len(ranks), uuid) for rank, uuid in enumerate(ranks)]

    def _manifest(self, rank: int, size: int, uuid: str) -> WeightManifest:
        entries = ()
        if uuid:
            where = Location(Transport.CUDA_IPC, gpu_uuid=uuid)
            entries = (WeightEntry("w", Format.FP8_E4M3, ScaleAxis.NONE, TensorEntry((1, 1), (1, 1), "uint8", where)),)
        return WeightManifest(self.name, "folder", "digest", rank, size, entries=entries)

    async def restore_kv(self) -> None:
        """Nothing was released."""

    def close(self) -> None:
        self.closed = True


class Trainer:
    """Knows its sessions and the devices it was given."""

    def __init__(self, dtype: str) -> None:
        self.attached: list[str] = []
        self.sessions: set[str] = set()
        self.lost_a_rank = False

    def check(self) -> None:
        if self.lost_a_rank:
            raise TrainerDead("rank 1 ended")

    def attach(self, manifests: list[WeightManifest]) -> None:
        self.attached = [m.base_digest for m in manifests]

    def open_session(self, session: str, spec: Any, optimizer: Any, seed: int) -> None:
        self.sessions.add(session)
        self.lost_a_rank = session == "lose a rank"

    def close_session(self, session: str) -> None:
        self.sessions.discard(session)

    def memory(self) -> dict[str, int]:
        return {"attached": len(self.attached), "sessions": len(self.sessions)}

    def state(self, session: str) -> bytes:
        """The devices this process may see."""
        return os.environ.get("CUDA_VISIBLE_DEVICES", "").encode()
