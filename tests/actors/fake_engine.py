"""A stand-in for an engine in router tests: answers with text that spells which adapter it was asked for.

`<first 8 of the digest or "base">:<n>` per token; slots, aborts, lengths and errors behave as the Engine protocol says. A
prompt that begins with "hold" gets its second token only after `release` of that prompt.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import ray

from actors.channel import AnswersInBatches
from epilora.errors import AdapterNotFound, NoFreeSlot, PromptTooLong
from epilora.types import AdapterVersion, Completion, EngineInfo, EngineStats, GenerateRequest, LoadReceipt, TokenChunk

BASE_DIGEST = "b" * 64
CONTEXT = 64


class PlainFakeEngine:
    """name, slots: as an engine's. token_s: seconds per token. applies: False leaves the base's log-probabilities."""

    def __init__(
        self, name: str = "base", slots: int = 2, token_s: float = 0.0, base_digest: str = BASE_DIGEST
    ) -> None:
        self.name = name
        self._name, self._slots, self._token_s, self._base_digest = name, slots, token_s, base_digest
        self.loaded: OrderedDict[str, int] = OrderedDict()
        self.loads: list[str] = []
        self.running: set[str] = set()
        self.aborted: list[str] = []
        self.live: dict[str, int] = {}
        self.released: set[str] = set()
        self.load_s = 0.0
        self.predicts: float | None = None
        self.applies = True

    async def info(self) -> EngineInfo:
        return EngineInfo(
            name=self._name,
            model_path="none",
            model_name="tiny",
            base_digest=self._base_digest,
            activations="w8a16",
            dtype="float32",
            quantization="fp8_per_channel",
            max_model_len=CONTEXT,
            max_loras=self._slots,
            max_lora_rank=16,
            vllm_version="none",
            plugin_active=True,
            linear_modules=(),
        )

    async def stats(self) -> EngineStats:
        return EngineStats(
            steps=1,
            mixed_steps=0,
            tenant_rows=0,
            rollout_rows=0,
            running=len(self.running),
            waiting=0,
            kv_usage=0.0,
            loaded=tuple(self.loaded),
            paths={"fake": 1},
        )

    async def tokenize(self, text: str) -> tuple[int, ...]:
        return tuple(text.encode())

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        return "".join(f"<{token}>" for token in token_ids)

    async def render_chat(self, messages: Sequence[Mapping[str, Any]], tools: Any = None) -> tuple[int, ...]:
        return tuple("|".join(str(message["content"]) for message in messages).encode())

    async def tool_call_start(self) -> str:
        return "<tool_call>"

    async def parse_tools(self, text: str, tools: Any) -> tuple[str, list[dict[str, Any]]]:
        """Calls as a real engine's parser gives them: JSON between tags, everything else is text."""
        rest, *documents = text.split("<tool_call>")
        found = [json.loads(document.removesuffix("</tool_call>")) for document in documents]
        function = [{"name": call["name"], "arguments": json.dumps(call.get("arguments", {}))} for call in found]
        return rest.strip(), [{"id": "call_1", "type": "function", "function": each} for each in function]

    async def load_adapter(self, version: AdapterVersion, tensors: Mapping[str, Any]) -> LoadReceipt:
        assert tensors, "an adapter has tensors"
        self.loads.append(version.digest)
        await asyncio.sleep(self.load_s)
        if version.digest not in self.loaded:
            if len(self.loaded) >= self._slots:
                idle = [digest for digest in self.loaded if not self.live.get(digest)]
                if not idle:
                    raise NoFreeSlot(f"all {self._slots} adapter slots are in use")
                del self.loaded[idle[0]]
            self.loaded[version.digest] = len(self.loads)
        return LoadReceipt(version.digest, 0, "r", "r", 2, 2, 1.0)

    async def unload_adapter(self, digest: str) -> None:
        if self.loaded.pop(digest, None) is None:
            raise AdapterNotFound(f"adapter {digest[:12]} is not loaded")

    def _check(self, request: GenerateRequest) -> tuple[int, ...]:
        prompt = tuple(request.prompt.encode()) if isinstance(request.prompt, str) else tuple(request.prompt)
        if len(prompt) + request.sampling.max_tokens > CONTEXT:
            raise PromptTooLong(
                f"{len(prompt)} prompt tokens + {request.sampling.max_tokens} new ones exceed {CONTEXT}"
            )
        if any(token >= 50_000 for token in prompt):
            raise ValueError("token id out of vocabulary")
        if request.adapter is not None and request.adapter not in self.loaded:
            raise AdapterNotFound(f"adapter {request.adapter[:12]} is not loaded")
        return prompt

    def _holds(self, request: GenerateRequest) -> bool:
        prompt = request.prompt
        held = isinstance(prompt, str) and prompt.startswith("hold") and prompt not in self.released
        return held and request.request_id not in self.aborted

    async def release(self, prompt: str) -> None:
        """Requests with this prompt, which begins with "hold", go on."""
        self.released.add(prompt)

    async def stream(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        prompt = self._check(request)
        if request.prompt == "die":
            os._exit(1)
        self.running.add(request.request_id)
        key = request.adapter or ""
        self.live[key] = self.live.get(key, 0) + 1
        word = request.adapter[:8] if request.adapter else "base"
        wanted = request.sampling.logprobs
        try:
            for index in range(request.sampling.max_tokens):
                await asyncio.sleep(self._token_s)
                while index == 1 and self._holds(request):
                    await asyncio.sleep(0.005)
                if request.request_id in self.aborted:
                    return
                if request.prompt == "die later" and index == 2:
                    os._exit(1)
                last = index + 1 == request.sampling.max_tokens
                shift = int(request.adapter[:6], 16) / (1 << 24) if request.adapter and self.applies else 0.0
                top = ((7, -0.25 - shift), (8, -math.inf))[: wanted or 0]
                yield TokenChunk(
                    request_id=request.request_id,
                    token_ids=(index,),
                    text=f"{word}:{index} ",
                    logprobs=(-0.5 - shift,),
                    finish_reason="length" if last else None,
                    prompt_tokens=len(prompt),
                    completion_tokens=index + 1,
                    top_logprobs=(top,),
                    adapter=request.adapter,
                )
        finally:
            self.running.discard(request.request_id)
            self.live[key] -= 1
            if not self.live[key]:
                del self.live[key]

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Completion]:
        return list(await asyncio.gather(*(self._one(request) for request in requests)))

    async def _one(self, request: GenerateRequest) -> Completion:
        prompt = self._check(request)
        chunks = [chunk async for chunk in self.stream(request)]
        return Completion(
            request_id=request.request_id,
            prompt_token_ids=prompt,
            token_ids=tuple(token for chunk in chunks for token in chunk.token_ids),
            text="".join(chunk.text for chunk in chunks),
            logprobs=tuple(value for chunk in chunks for value in chunk.logprobs),
            finish_reason=chunks[-1].finish_reason or "abort" if chunks else "abort",
            adapter=request.adapter,
            ttft_ms=1.0,
            tpot_ms=1.0,
            top_logprobs=tuple(row for chunk in chunks for row in chunk.top_logprobs),
        )

    async def abort(self, request_ids: Sequence[str]) -> None:
        self.aborted.extend(request_ids)

    async def score(self, sequences: Sequence[Any], adapter: str | None) -> list[list[float]]:
        shift = int(adapter[:6], 16) / (1 << 24) if adapter and self.applies else 0.0
        return [[-0.5 - shift] * len(completion) for _, completion in sequences]

    async def predict(self, version: AdapterVersion, tensors: Any, sequences: Sequence[Any]) -> Any:
        """The trainer beside it, if `predicts` was set: the change of log p it computes."""
        if self.predicts is None:
            return None
        return [[-0.5] * len(c) for _, c in sequences], [[-0.5 + self.predicts] * len(c) for _, c in sequences]

    async def seen(self) -> dict[str, Any]:
        """For assertions: loads in order, aborted and running request ids."""
        return {"loads": list(self.loads), "aborted": list(self.aborted), "running": sorted(self.running)}

    async def pid(self) -> int:
        return os.getpid()


class FakeEngineActor(PlainFakeEngine, AnswersInBatches):
    """The stand-in as an actor that routers talk to."""


FakeEngine: Any = ray.remote(num_cpus=0)(FakeEngineActor)
