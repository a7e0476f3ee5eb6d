"""What the router needs of engines and of the store. Ray actors in production, plain objects in tests."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any, Protocol

from epilora.types import AdapterVersion, Completion, EngineInfo, EngineStats, GenerateRequest, LoadReceipt, TokenChunk

TokenPair = tuple[tuple[int, ...], tuple[int, ...]]  # prompt and completion ids


class EngineGone(Exception):
    """The engine died or cannot be reached; a port raises it for whatever its transport raises then."""


class EnginePort(Protocol):
    """An engine as the router sees it. Raises the Engine protocol's errors, EngineGone, ValueError for bad input."""

    name: str

    async def info(self) -> EngineInfo: ...

    async def stats(self) -> EngineStats: ...

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Completion]: ...

    def stream(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]: ...

    async def abort(self, request_ids: Sequence[str]) -> None: ...

    async def score(self, sequences: Sequence[TokenPair], adapter: str | None) -> list[list[float]]: ...

    async def predict(
        self, version: AdapterVersion, tensors: Callable[[], Any], sequences: Sequence[TokenPair]
    ) -> tuple[list[list[float]], list[list[float]]] | None:
        """What the trainer beside this engine computes under (base, version); None if there is none.

        tensors: gives what `load_adapter` takes, called only where there is a trainer.
        """
        ...

    async def load_adapter(self, version: AdapterVersion, tensors: Any) -> LoadReceipt: ...

    async def unload_adapter(self, digest: str) -> None: ...

    async def render_chat(self, messages: Sequence[Mapping[str, Any]], tools: Any) -> tuple[int, ...]: ...

    async def tool_call_start(self) -> str: ...

    async def parse_tools(self, text: str, tools: Sequence[Mapping[str, Any]]) -> tuple[str, list[dict[str, Any]]]: ...

    async def detokenize(self, token_ids: Sequence[int]) -> str: ...


class StorePort(Protocol):
    """The store as the router sees it. `tensors` gives whatever the engine port's `load_adapter` takes."""

    async def resolve(self, ref: str, tenant: str | None) -> AdapterVersion: ...

    async def names(self, tenant: str | None) -> list[str]: ...

    async def current(self, tenant: str | None, offset: int, limit: int) -> list[AdapterVersion]: ...

    async def versions(self, name: str, tenant: str | None) -> list[AdapterVersion]: ...

    def tensors(self, digest: str) -> Any: ...

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any: ...
