"""Small stand-ins for an engine and a trainer, for tests of the shells and the pool alone."""

from __future__ import annotations

import time
from typing import Any

from epilora.quant.manifest import WeightManifest


class Engine:
    def __init__(self, name: str, start_s: float = 0.0, broken: bool = False) -> None:
        time.sleep(start_s)
        if broken:
            raise RuntimeError("model file is damaged")
        self.name = name
        self.closed = False

    def info(self) -> dict[str, Any]:
        return {"name": self.name, "made_at": id(self)}

    async def export_weights(self) -> list[WeightManifest]:
        return [WeightManifest(self.name, "folder", "digest", 0, 1)]

    def close(self) -> None:
        self.closed = True


class Trainer:
    def __init__(self, dtype: str) -> None:
        self.attached: list[str] = []

    def attach(self, manifests: list[WeightManifest]) -> None:
        self.attached = [m.base_digest for m in manifests]

    def memory(self) -> dict[str, int]:
        return {"attached": len(self.attached)}
