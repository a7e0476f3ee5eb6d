"""A stand-in engine that answers requests, behind the real engine actor and the real pool."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import Any

from epilora.quant.manifest import WeightManifest
from epilora.types import EngineInfo, EngineStats
from tests.actors.fake_engine import PlainFakeEngine


class ServingEngine(PlainFakeEngine):
    """The stand-in that answers requests, with what an engine actor and the pool ask beside; `score` sets what `stats` reports."""

    def __init__(self, name: str) -> None:
        super().__init__(name, slots=4, token_s=0.02)
        self.reported: dict[str, Any] = {}

    def info(self) -> EngineInfo:  # type: ignore[override]
        return finished(super().info())

    def stats(self) -> EngineStats:  # type: ignore[override]
        return replace(finished(super().stats()), **self.reported)

    def tokenize(self, text: str) -> tuple[int, ...]:  # type: ignore[override]
        return finished(super().tokenize(text))

    def detokenize(self, token_ids: Sequence[int]) -> str:  # type: ignore[override]
        return finished(super().detokenize(token_ids))

    def render_chat(self, messages: Any, tools: Any = None) -> tuple[int, ...]:  # type: ignore[override]
        return finished(super().render_chat(messages, tools))

    def tool_call_start(self) -> str:  # type: ignore[override]
        return finished(super().tool_call_start())

    def parse_tools(self, text: str, tools: Any) -> Any:
        return finished(super().parse_tools(text, tools))

    async def score(self, sequences: Any, adapter: str | None) -> list[list[float]]:
        self.reported = {"kv_usage": float(adapter.split("=")[1])} if adapter else {}
        return []

    async def export_weights(self) -> list[WeightManifest]:
        return [WeightManifest(self.name, "folder", "digest", 0, 1)]

    async def restore_kv(self) -> None:
        """Nothing was released."""

    def close(self) -> None:
        """Nothing to give back."""


def finished(work: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine that waits for nothing."""
    try:
        work.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("it waits")
