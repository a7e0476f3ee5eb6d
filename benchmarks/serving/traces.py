"""Traces of requests: made once from a seed, committed as CSV, read by every run.

    python -m benchmarks.serving.traces            # writes benchmarks/traces/*.csv again; a test compares

Columns: arrival (at one request a second on average; divide by a rate), prompt tokens, new tokens, tenant from 1.
Tenants follow Zipf's law with exponent 1.0: tenant k of n is asked with probability proportional to 1 / k.

  poisson     exponential gaps; prompts of 0 tokens stand for the run's own prompt length (512 or 2,048), 128 new tokens
  wildchat    gamma gaps with shape 0.5 (coefficient of variation 1.41: bursty); lengths lognormal through the median and 90th
              percentile of WildChat's first turns, 23 / 247 prompt and 253 / 759 reply tokens, cut off at 1,024 prompt
              and 2,048 tokens in all
"""

from __future__ import annotations

import csv
import math
import pathlib

import numpy as np

FOLDER = pathlib.Path(__file__).resolve().parents[1] / "traces"
REQUESTS, TENANTS, ZIPF_EXPONENT = 512, 32, 1.0
GAMMA_SHAPE = 0.5
PROMPT_MEDIAN_P90, REPLY_MEDIAN_P90 = (23, 247), (253, 759)
MAX_PROMPT, MAX_TOTAL = 1024, 2048
POISSON_NEW_TOKENS = 128
Z90 = 1.2815515655446004

Row = tuple[float, int, int, int]


def zipf_tenants(generator: np.random.Generator, requests: int) -> list[int]:
    """Tenant ids from 1."""
    weights = 1.0 / np.arange(1, TENANTS + 1) ** ZIPF_EXPONENT
    return [int(t) + 1 for t in generator.choice(TENANTS, requests, p=weights / weights.sum())]


def _lognormal(generator: np.random.Generator, median: float, p90: float) -> int:
    sigma = math.log(p90 / median) / Z90
    return max(1, round(median * math.exp(sigma * generator.standard_normal())))


def _lengths(generator: np.random.Generator) -> tuple[int, int]:
    prompt = min(_lognormal(generator, *PROMPT_MEDIAN_P90), MAX_PROMPT)
    return prompt, min(_lognormal(generator, *REPLY_MEDIAN_P90), MAX_TOTAL - prompt)


def make(name: str) -> list[Row]:
    """The rows of a trace, from its seed. Raises ValueError for another name."""
    if name == "poisson":
        generator = np.random.default_rng(1)
        gaps = generator.exponential(1.0, REQUESTS)
        lengths = [(0, POISSON_NEW_TOKENS)] * REQUESTS
    elif name == "wildchat":
        generator = np.random.default_rng(2)
        gaps = generator.gamma(GAMMA_SHAPE, 1.0 / GAMMA_SHAPE, REQUESTS)
        lengths = [_lengths(generator) for _ in range(REQUESTS)]
    else:
        raise ValueError(f"trace={name!r}; there are poisson and wildchat")
    arrivals = np.cumsum(gaps) - gaps[0]
    tenants = zipf_tenants(generator, REQUESTS)
    return [(round(float(a), 4), p, n, t) for a, (p, n), t in zip(arrivals, lengths, tenants, strict=True)]


def path_of(name: str) -> pathlib.Path:
    """Where the committed trace lies."""
    return FOLDER / f"{name}.csv"


def write(name: str) -> None:
    """Write the committed trace again."""
    path_of(name).parent.mkdir(parents=True, exist_ok=True)
    with path_of(name).open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["arrival", "prompt_tokens", "new_tokens", "tenant"])
        writer.writerows(make(name))


def read(name: str, *, rate: float, prompt_tokens: int = 0, requests: int = 0, tenants: int = TENANTS) -> list[Row]:
    """The committed trace at `rate` requests a second.

    prompt_tokens: for rows that say 0. requests: only the first so many, 0 for all. tenants: fold tenant ids into so many.
    Raises ValueError for a rate that is not positive, or rows without a length of their own and no prompt_tokens.
    """
    if rate <= 0:
        raise ValueError(f"rate={rate}; requests a second must be positive")
    with path_of(name).open() as file:
        rows = [
            (
                float(r["arrival"]) / rate,
                int(r["prompt_tokens"]) or prompt_tokens,
                int(r["new_tokens"]),
                int(r["tenant"]),
            )
            for r in csv.DictReader(file)
        ]
    rows = rows[: requests or None]
    if any(not prompt for _, prompt, _, _ in rows):
        raise ValueError(f"trace {name} leaves the prompt's length open: give prompt_tokens")
    return [(arrival, prompt, new, 1 + (tenant - 1) % tenants) for arrival, prompt, new, tenant in rows]


if __name__ == "__main__":
    for each in ("poisson", "wildchat"):
        write(each)
        print(path_of(each))
