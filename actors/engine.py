"""Ray shell around one Engine. All behaviour is the wrapped class's; this only carries calls."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import ray

from actors.channel import AnswersInBatches
from epilora.loading import load_object
from epilora.quant.manifest import WeightManifest
from epilora.types import (
    AdapterDraft,
    AdapterVersion,
    Completion,
    DraftReceipt,
    EngineInfo,
    EngineStats,
    GenerateRequest,
    LoadReceipt,
    TokenChunk,
)


@ray.remote(num_cpus=0, max_restarts=0)
class EngineActor(AnswersInBatches):
    """An async actor; `stream` is a streaming generator. Calls run between or beside engine steps, never during one."""

    def __init__(self, factory: str, kwargs: Mapping[str, Any]) -> None:
        self._engine = load_object(factory)(**kwargs)

    async def ready(self) -> EngineInfo:
        return self._engine.info()

    async def info(self) -> EngineInfo:
        return self._engine.info()

    async def pid(self) -> int:
        return os.getpid()

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Completion]:
        return await self._engine.generate(requests)

    async def stream(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        async for chunk in self._engine.stream(request):
            yield chunk

    async def abort(self, request_ids: Sequence[str]) -> None:
        await self._engine.abort(request_ids)

    async def load_adapter(self, version: AdapterVersion, tensors: Mapping[str, Any]) -> LoadReceipt:
        return await self._engine.load_adapter(version, tensors)

    async def load_draft(self, draft: AdapterDraft, tensors: Any) -> DraftReceipt:
        return await self._engine.load_draft(draft, tensors)

    async def seal_draft(self, draft_id: str, version: AdapterVersion, folded_digest: str) -> LoadReceipt:
        return await self._engine.seal_draft(draft_id, version, folded_digest)

    async def pin_adapter(self, digest: str, holder: str) -> None:
        await self._engine.pin_adapter(digest, holder)

    async def unpin_adapter(self, digest: str, holder: str) -> None:
        await self._engine.unpin_adapter(digest, holder)

    async def unload_adapter(self, digest: str) -> None:
        await self._engine.unload_adapter(digest)

    async def score(
        self, sequences: Sequence[tuple[tuple[int, ...], tuple[int, ...]]], adapter: str | None
    ) -> list[list[float]]:
        return await self._engine.score(sequences, adapter)

    async def export_weights(self) -> list[WeightManifest]:
        return await self._engine.export_weights()

    async def base_checksum(self) -> str:
        return await self._engine.base_checksum()

    async def release_kv(self, keep_fraction: float = 0.0) -> int:
        return await self._engine.release_kv(keep_fraction)

    async def restore_kv(self) -> None:
        await self._engine.restore_kv()

    async def trainer_turn(self, max_wait_s: float) -> float:
        return await self._engine.trainer_turn(max_wait_s)

    async def reset_prefix_cache(self) -> None:
        await self._engine.reset_prefix_cache()

    async def stats(self) -> EngineStats:
        return self._engine.stats()

    async def tokenize(self, text: str) -> tuple[int, ...]:
        return self._engine.tokenize(text)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        return self._engine.detokenize(token_ids)

    async def render_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> tuple[int, ...]:
        return self._engine.render_chat(messages, tools)

    async def tool_call_start(self) -> str:
        return self._engine.tool_call_start()

    async def parse_tools(self, text: str, tools: Sequence[Mapping[str, Any]]) -> tuple[str, list[dict[str, Any]]]:
        return self._engine.parse_tools(text, tools)

    async def close(self) -> None:
        self._engine.close()
