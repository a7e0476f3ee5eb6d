"""What travels between the engine's callers and its step thread, and how a request is checked before it does."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from epilora.errors import PromptTooLong
from epilora.types import Completion, GenerateRequest, Sampling, TokenChunk

from . import compat

KINDS = ("tenant", "rollout")


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
    tokens: int = 0  # in its completion, once there is one

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


_SCORING = Sampling(max_tokens=1, temperature=0.0)


class Preparer:
    """Checks requests and turns them into vLLM's parameters.

    vocab_size, engine_len: of vLLM's model config; max_model_len: tokens a request may have, prompt and answer together.
    """

    def __init__(self, *, max_model_len: int, engine_len: int, vocab_size: int, encode: Callable[[str], tuple]) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self._params, self._kind = SamplingParams, RequestOutputKind
        self._max_model_len, self._engine_len, self._vocab_size = max_model_len, engine_len, vocab_size
        self._encode = encode

    def completion(self, request: GenerateRequest, *, streamed: bool) -> Live:
        """A request to generate. Raises PromptTooLong, ValueError."""
        if request.kind not in KINDS:
            raise ValueError(f"request {request.request_id!r}: kind={request.kind!r}; allowed are {', '.join(KINDS)}")
        if not request.weight > 0:
            raise ValueError(f"request {request.request_id!r}: weight={request.weight}; it must be above 0")
        sampling = request.sampling
        prompt = self._encode(request.prompt) if isinstance(request.prompt, str) else tuple(request.prompt)
        self._check_prompt(request.request_id, prompt)
        if sampling.max_tokens < 1:
            raise ValueError(f"request {request.request_id!r}: max_tokens={sampling.max_tokens}; at least 1")
        if len(prompt) + sampling.max_tokens > self._max_model_len:
            raise PromptTooLong(
                f"request {request.request_id!r}: {len(prompt)} prompt tokens + max_tokens={sampling.max_tokens}"
                f" exceed the context of {self._max_model_len} tokens (max_model_len)"
            )
        try:
            params = self._params(
                max_tokens=sampling.max_tokens,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                stop=list(sampling.stop) or None,
                seed=sampling.seed,
                logprobs=sampling.logprobs,
                ignore_eos=sampling.ignore_eos,
                detokenize=streamed or bool(sampling.stop),
                flat_logprobs=not streamed and sampling.logprobs is not None,
                output_kind=self._kind.DELTA if streamed else self._kind.FINAL_ONLY,
            )
        except compat.validation_errors() as err:
            raise ValueError(f"request {request.request_id!r}: {err}") from err
        return Live(request, prompt, params, on_done=nothing, submitted_s=time.perf_counter())

    def score(self, request_id: str, prompt: Sequence[int], completion: Sequence[int], adapter: str | None) -> Live:
        """A request whose result is the log-probabilities of `completion`. Raises PromptTooLong, ValueError."""
        whole = (*prompt, *completion)
        self._check_prompt(request_id, whole)
        if not prompt or not completion:
            raise ValueError(
                f"score: prompt of {len(prompt)} and completion of {len(completion)} tokens; both need at least 1"
            )
        if len(whole) >= self._engine_len:
            limit = self._engine_len - 1
            raise PromptTooLong(f"score: {len(whole)} tokens exceed the {limit} that can be scored (max_model_len)")
        params = self._params(
            max_tokens=1,
            temperature=0.0,
            prompt_logprobs=0,
            detokenize=False,
            ignore_eos=True,
            output_kind=self._kind.FINAL_ONLY,
        )
        request = GenerateRequest(request_id, whole, _SCORING, adapter, "rollout")

        def extract(output: Any) -> list[float]:
            found = output.prompt_logprobs
            return [float(found[at][whole[at]].logprob) for at in range(len(prompt), len(whole))]

        return Live(request, whole, params, on_done=nothing, extract=extract, submitted_s=time.perf_counter())

    def _check_prompt(self, request_id: str, prompt: Sequence[int]) -> None:
        if not prompt:
            raise ValueError(f"request {request_id!r}: the prompt has no tokens")
        wrong = next((token for token in prompt if not 0 <= token < self._vocab_size), None)
        if wrong is not None:
            raise ValueError(f"request {request_id!r}: token id {wrong} is not in the vocabulary of {self._vocab_size}")
