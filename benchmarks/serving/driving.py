"""Driving one in-process LLMEngine: batches that are submitted together, and traces whose requests arrive by the clock.

Every request ignores end-of-sequence and decodes greedily, so that its length is what was asked for. Times are seconds of
`time.perf_counter`; a token's time is when the step that made it returned.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_serial = 0


@dataclass(frozen=True)
class Request:
    """One request. adapter: id from 1, 0 for none. arrival_s: seconds after the trace's start."""

    prompt: tuple[int, ...]
    new_tokens: int
    adapter: int = 0
    arrival_s: float = 0.0


@dataclass
class Timing:
    """When a request arrived, got its first and its last token, and how many it got."""

    arrival_s: float
    first_s: float = 0.0
    last_s: float = 0.0
    tokens: int = 0
    finished: bool = False

    @property
    def ttft_ms(self) -> float:
        """Milliseconds from arrival to the first token."""
        return (self.first_s - self.arrival_s) * 1e3

    @property
    def tpot_ms(self) -> float | None:
        """Milliseconds per token after the first; None for a single token."""
        return (self.last_s - self.first_s) * 1e3 / (self.tokens - 1) if self.tokens > 1 else None


def random_prompt(generator: random.Random, tokens: int, vocabulary: int) -> tuple[int, ...]:
    """Token ids past the first few (which may be special). Different draws share no prefix worth caching."""
    return tuple(generator.randrange(min(8, vocabulary - 1), vocabulary) for _ in range(tokens))


def add_request(engine: Any, request: Request) -> str:
    """Submit to the engine; returns its id."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import RequestOutputKind

    global _serial
    _serial += 1
    name = f"bench-{_serial}"
    params = SamplingParams(
        max_tokens=request.new_tokens,
        temperature=0.0,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
    lora = None
    if request.adapter:
        adapter = f"adapter-{request.adapter}"
        lora = LoRARequest(lora_name=adapter, lora_int_id=request.adapter, lora_path="in-memory")
    engine.add_request(name, {"prompt_token_ids": list(request.prompt)}, params, lora_request=lora)
    return name


def run_trace(engine: Any, requests: Sequence[Request]) -> list[Timing]:
    """Serve requests as they arrive (all at once where arrivals are 0); timings in the order given.

    A request waits for the step that runs while it arrives, as it would in a server; TTFT counts from its arrival.
    """
    began = time.perf_counter()
    order = sorted(range(len(requests)), key=lambda i: requests[i].arrival_s)
    timings = [Timing(began + request.arrival_s) for request in requests]
    by_name: dict[str, Timing] = {}
    waiting = iter(order)
    upcoming = next(waiting, None)
    while upcoming is not None or engine.has_unfinished_requests():
        now = time.perf_counter()
        while upcoming is not None and timings[upcoming].arrival_s <= now:
            by_name[add_request(engine, requests[upcoming])] = timings[upcoming]
            upcoming = next(waiting, None)
        if not engine.has_unfinished_requests():
            if upcoming is not None:
                time.sleep(max(0.0, timings[upcoming].arrival_s - time.perf_counter()))
            continue
        outputs = engine.step()
        now = time.perf_counter()
        for output in outputs:
            timing = by_name[output.request_id]
            fresh = len(output.outputs[0].token_ids)
            if fresh and not timing.tokens:
                timing.first_s = now
            timing.tokens += fresh
            timing.last_s = now
            timing.finished = output.finished
    for request, timing in zip(requests, timings, strict=True):
        if not timing.finished or timing.tokens != request.new_tokens:
            raise RuntimeError(f"a request of {request.new_tokens} tokens ended with {timing.tokens}")
    return timings


def tokens_per_second(timings: Sequence[Timing]) -> float:
    """Generated tokens over the time from the first arrival to the last token."""
    seconds = max(t.last_s for t in timings) - min(t.arrival_s for t in timings)
    return sum(t.tokens for t in timings) / seconds
