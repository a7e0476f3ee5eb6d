"""Ray shell around one Trainer. All of it runs on one thread: an optimizer step is never interleaved with another.

Policy-gradient steps of several jobs that wait for the trainer at once run as one step over mixed batches (`together.py`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray

from actors.together import Together
from epilora.loading import load_object
from epilora.quant.manifest import WeightManifest
from epilora.types import AdapterSpec, RolloutGroup

MOST_CALLERS = 16  # calls that may wait for the trainer inside the actor; more wait outside, in order


@ray.remote(num_cpus=0, max_restarts=0, max_concurrency=MOST_CALLERS)  # type: ignore[call-overload]  # not in Ray's stubs
class TrainerActor:
    def __init__(self, factory: str, kwargs: Mapping[str, Any]) -> None:
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="trainer")
        self._trainer = self._call(load_object(factory), **kwargs)
        self._together = Together(self._train_together, self._worker)

    def _call(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        return self._worker.submit(method, *args, **kwargs).result()

    def _train_together(self, requests: Sequence[Any]) -> Sequence[Any]:
        return self._trainer.train_rl_together(requests)

    def ready(self) -> bool:
        """Answers beside a step that runs. Raises TrainerDead if the trainer has lost a rank."""
        self._trainer.check()
        return True

    def pid(self) -> int:
        return os.getpid()

    def attach(self, manifests: Sequence[WeightManifest]) -> None:
        self._call(self._trainer.attach, manifests)

    def open_session(self, session: str, spec: AdapterSpec, optimizer: Mapping[str, Any], seed: int) -> None:
        self._call(self._trainer.open_session, session, spec, optimizer, seed)

    def close_session(self, session: str) -> None:
        self._call(self._trainer.close_session, session)

    def train_rl(self, session: str, groups: Sequence[RolloutGroup], loss: Mapping[str, Any]) -> dict[str, float]:
        return self._together.submit(session, (session, groups, loss))

    def train_sft(self, session: str, examples: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> dict[str, float]:
        return self._call(self._trainer.train_sft, session, examples)

    def logprobs(
        self, session: str | None, sequences: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]
    ) -> list[list[float]]:
        return self._call(self._trainer.logprobs, session, sequences)

    def predict(
        self,
        spec: AdapterSpec,
        tensors: Mapping[str, Any],
        sequences: Sequence[tuple[tuple[int, ...], tuple[int, ...]]],
    ) -> tuple[list[list[float]], list[list[float]]]:
        return self._call(self._trainer.predict, spec, tensors, sequences)

    def adapter(self, session: str) -> tuple[AdapterSpec, dict[str, Any]]:
        return self._call(self._trainer.adapter, session)

    def adapter_and_digest(self, session: str) -> tuple[AdapterSpec, dict[str, Any], str]:
        return self._trainer.adapter_and_digest(session)

    def shared_adapter(self, session: str) -> tuple[AdapterSpec, Any]:
        return self._trainer.shared_adapter(session)

    def state(self, session: str) -> bytes:
        return self._call(self._trainer.state, session)

    def load_state(self, session: str, state: bytes) -> None:
        self._call(self._trainer.load_state, session, state)

    def memory(self) -> dict[str, int]:
        return self._call(self._trainer.memory)
