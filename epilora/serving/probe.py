"""Was it applied? A fixed prompt's log-probabilities under a freshly loaded version, held against the base's.

The read-back digest proves which bytes lie in the slot; the probe proves that the engine computes with them. A version
whose greedy tokens and likeliest log-probabilities all equal the base's exactly is not applied, or changes nothing:
either way, asking for it must not be answered by what is the base.

Where a trainer is resident it says what the version must change (`Confirmation`): its own log-probabilities of the probed
tokens under base and version, from the version's stored tensors.

The prompt is token ids, so it needs no tokenizer: 3 to 18 are in every vocabulary with more than 18 tokens.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from epilora.types import GenerateRequest, Sampling

from .messages import wrong_adapter
from .ports import EnginePort

PROMPT = tuple(range(3, 19))
SHARE = 0.25  # of the predicted change that may be missing
NOISE = 4.0  # times what engine and trainer disagree by on the base
SAMPLING = Sampling(max_tokens=4, temperature=0.0, logprobs=5, ignore_eos=True)


@dataclass(frozen=True)
class Probe:
    """Greedy continuation of `PROMPT`: per token its id, its log-probability and the likeliest (id, log-prob) pairs."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    top: tuple[tuple[tuple[int, float], ...], ...]

    def as_dict(self) -> dict[str, Any]:
        return {"tokens": list(self.tokens), "logprobs": list(self.logprobs), "top": [list(row) for row in self.top]}


def probe_from_dict(data: Mapping[str, Any]) -> Probe:
    top = tuple(tuple((int(token), float(value)) for token, value in row) for row in data["top"])
    return Probe(tuple(data["tokens"]), tuple(data["logprobs"]), top)


async def run_probe(engine: EnginePort, digest: str | None) -> Probe:
    """Ask the engine under a loaded version, or under the base (None).

    Raises what `generate` raises, ApiError if the engine says that it answered under something else.
    """
    request = GenerateRequest(f"probe-{uuid.uuid4().hex}", PROMPT, SAMPLING, digest, "tenant")
    (answer,) = await engine.generate([request])
    if answer.adapter != digest:
        raise wrong_adapter(answer.adapter, digest)
    return Probe(answer.token_ids, answer.logprobs, answer.top_logprobs)


def difference(one: Probe, other: Probe) -> float:
    """Largest |delta log p| of tokens both list, as long as the continuations agree; 0 if nothing differs at all.

    A position where the tokens differ ends the comparison, as later ones have other contexts.
    """
    largest = 0.0
    for position, (mine, theirs) in enumerate(zip(one.tokens, other.tokens)):
        row = {mine: one.logprobs[position], **dict(one.top[position] if position < len(one.top) else ())}
        against = {theirs: other.logprobs[position], **dict(other.top[position] if position < len(other.top) else ())}
        shared = [
            abs(row[token] - against[token])
            for token in row.keys() & against.keys()
            if math.isfinite(row[token]) and math.isfinite(against[token])
        ]
        largest = max([largest, *shared])
        if mine != theirs:
            return largest
    return largest


@dataclass(frozen=True)
class Confirmation:
    """What a trainer predicts a version to change on the probed tokens, against what the engine changes (nats).

    predicted: largest |change of log p| the trainer computes. error: largest |engine's change - trainer's|.
    base_error: largest |engine's log p - trainer's| under the base, the two arithmetics' own distance.
    """

    predicted: float
    error: float
    base_error: float

    @property
    def allowed(self) -> float:
        return SHARE * self.predicted + NOISE * self.base_error

    @property
    def holds(self) -> bool:
        return self.error <= self.allowed

    def as_dict(self) -> dict[str, Any]:
        return {**vars(self), "allowed": self.allowed, "holds": self.holds}


def confirm(
    engine: tuple[Sequence[float], Sequence[float]], trainer: tuple[Sequence[float], Sequence[float]]
) -> Confirmation:
    """Each: log-probabilities of the same tokens under (base, version). Raises ValueError if their numbers differ."""
    columns = list(zip(*engine, *trainer, strict=True))
    return Confirmation(
        predicted=max(abs(after - before) for _, _, before, after in columns),
        error=max(
            abs((mine_after - mine_before) - (after - before)) for mine_before, mine_after, before, after in columns
        ),
        base_error=max(abs(mine - theirs) for mine, _, theirs, _ in columns),
    )
