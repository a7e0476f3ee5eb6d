"""Ray shell around one Trainer. One call at a time: an optimizer step is never interleaved with another."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import ray

from epilora.loading import load_object
from epilora.quant.manifest import WeightManifest
from epilora.types import AdapterSpec, RolloutGroup


@ray.remote(num_cpus=0, max_restarts=0)
class TrainerActor:
    def __init__(self, factory: str, kwargs: Mapping[str, Any]) -> None:
        self._trainer = load_object(factory)(**kwargs)

    def ready(self) -> bool:
        return True

    def pid(self) -> int:
        return os.getpid()

    def attach(self, manifests: Sequence[WeightManifest]) -> None:
        self._trainer.attach(manifests)

    def open_session(self, session: str, spec: AdapterSpec, optimizer: Mapping[str, Any], seed: int) -> None:
        self._trainer.open_session(session, spec, optimizer, seed)

    def close_session(self, session: str) -> None:
        self._trainer.close_session(session)

    def train_rl(self, session: str, groups: Sequence[RolloutGroup], loss: Mapping[str, Any]) -> dict[str, float]:
        return self._trainer.train_rl(session, groups, loss)

    def train_sft(self, session: str, examples: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> dict[str, float]:
        return self._trainer.train_sft(session, examples)

    def logprobs(
        self, session: str | None, sequences: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]
    ) -> list[list[float]]:
        return self._trainer.logprobs(session, sequences)

    def adapter(self, session: str) -> tuple[AdapterSpec, dict[str, Any]]:
        return self._trainer.adapter(session)

    def state(self, session: str) -> bytes:
        return self._trainer.state(session)

    def load_state(self, session: str, state: bytes) -> None:
        self._trainer.load_state(session, state)

    def memory(self) -> dict[str, int]:
        return self._trainer.memory()
