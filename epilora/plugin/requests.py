"""What travels between the engine's callers and its step thread."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from epilora.types import Completion, GenerateRequest, TokenChunk


@dataclass
class Live:
    """A request in the engine. on_chunk and on_done run in the step thread and must not block."""

    request: GenerateRequest
    prompt: tuple[int, ...]
    params: Any
    on_done: Callable[[Completion | Exception], None]
    on_chunk: Callable[[TokenChunk], None] | None = None
    extract: Callable[[Any], Any] | None = None  # for score: RequestOutput -> result
    lora_request: Any = None
    submitted_s: float = 0.0
    first_s: float = 0.0
    internal_id: str = ""
    produced: int = 0

    @property
    def engine_id(self) -> str:
        return f"{self.request.kind}-{self.request.request_id}"


@dataclass
class Command:
    """A call to run in the step thread between two steps."""

    run: Callable[[], Any]
    future: Future = field(default_factory=Future)


def nothing(*_: Any) -> None:
    return None


def to_loop(loop: asyncio.AbstractEventLoop, call: Callable[[], Any]) -> None:
    """Run in the caller's event loop; a loop that is gone has nobody left to tell."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(call)


def read_logprobs(
    tokens: Sequence[int], logprobs: Any, asked: int | None
) -> tuple[tuple[float, ...], tuple[tuple[tuple[int, float], ...], ...]]:
    """(the sampled tokens' log-probs, per token the `asked` likeliest as (id, log-prob)) of vLLM's list or flat
    log-probs.
    """
    if asked is None or logprobs is None:
        return (), ()
    sampled: list[float] = []
    top: list[tuple[tuple[int, float], ...]] = []
    if hasattr(logprobs, "start_indices"):  # flat: the sampled token comes first, then the likeliest
        for at in range(len(tokens)):
            start, end = logprobs.start_indices[at], logprobs.end_indices[at]
            sampled.append(logprobs.logprobs[start])
            if asked:
                top.append(
                    tuple(zip(logprobs.token_ids[start + 1 : end], logprobs.logprobs[start + 1 : end], strict=True))
                )
    else:
        for token, position in zip(tokens, logprobs, strict=True):
            sampled.append(position[token].logprob)
            if asked:
                ranked = sorted(position.items(), key=lambda item: item[1].rank)
                top.append(tuple((other, entry.logprob) for other, entry in ranked[:asked]))
    return tuple(sampled), tuple(top)
