"""Metrics of several router replicas as one: counters and histograms add up, gauges of replicas that are alive too.

A replica reports its samples every second (`samples_of`). One that stops reporting keeps what it had counted, so that
rates and totals never fall.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

STALE_S = 5.0
MAX_REPLICAS = 256

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Family:
    """One metric with its samples: (name, labels, value)."""

    name: str
    kind: str
    about: str
    samples: tuple[tuple[str, Labels, float], ...]


def samples_of(registry: CollectorRegistry) -> list[Family]:
    """Everything in a registry, without the times at which series were made."""
    return [
        Family(
            metric.name,
            metric.type,
            metric.documentation,
            tuple(
                (sample.name, tuple(sorted(sample.labels.items())), float(sample.value))
                for sample in metric.samples
                if not sample.name.endswith("_created")
            ),
        )
        for metric in registry.collect()
    ]


@dataclass
class _Replica:
    families: Sequence[Family]
    at_s: float


@dataclass
class MergedMetrics:
    """What all replicas have counted."""

    clock: Callable[[], float] = time.monotonic
    _replicas: dict[str, _Replica] = field(default_factory=dict)

    def report(self, replica: str, families: Sequence[Family]) -> None:
        """The newest samples of a replica replace its earlier ones."""
        self._replicas[replica] = _Replica(families, self.clock())
        if len(self._replicas) > MAX_REPLICAS:
            oldest, second = sorted(self._replicas, key=lambda name: self._replicas[name].at_s)[:2]
            both = [*self._replicas.pop(oldest).families, *self._replicas[second].families]
            self._replicas[second].families = list(_merge([(both, False)]).values())

    def alive(self) -> list[str]:
        """Replicas that reported within the last seconds."""
        now = self.clock()
        return sorted(name for name, replica in self._replicas.items() if now - replica.at_s <= STALE_S)

    def families(self, own: Iterable[Family] = ()) -> list[Family]:
        """The sum over replicas, and of `own`."""
        alive = set(self.alive())
        parts = [(replica.families, name in alive) for name, replica in self._replicas.items()]
        return list(_merge([*parts, (list(own), True)]).values())


def _merge(parts: Iterable[tuple[Sequence[Family], bool]]) -> dict[str, Family]:
    heads: dict[str, Family] = {}
    sums: dict[str, dict[tuple[str, Labels], float]] = {}
    for families, alive in parts:
        for family in families:
            heads.setdefault(family.name, family)
            table = sums.setdefault(family.name, {})
            if family.kind == "gauge" and not alive:
                continue
            for name, labels, value in family.samples:
                table[name, labels] = table.get((name, labels), 0.0) + value
    return {
        name: Family(name, head.kind, head.about, tuple((n, labels, v) for (n, labels), v in sums[name].items()))
        for name, head in heads.items()
    }


def _metric(family: Family) -> Metric:
    metric = Metric(family.name, family.about, family.kind)
    for name, labels, value in family.samples:
        metric.add_sample(name, dict(labels), value)
    return metric


class _Once(Collector):
    def __init__(self, families: Sequence[Family]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return [_metric(family) for family in self._families]


def render(families: Sequence[Family]) -> bytes:
    """Prometheus text format."""
    registry = CollectorRegistry()
    registry.register(_Once(families))
    return generate_latest(registry)


def quantile(family: Family, q: float, **labels: str) -> float | None:
    """The q-quantile of a histogram's samples that carry these labels, linear within a bucket; None without samples.

    Infinity if it lies above the last bound.
    """
    counts: dict[float, float] = {}
    for name, pairs, value in family.samples:
        have = dict(pairs)
        if name.endswith("_bucket") and all(have.get(key) == wanted for key, wanted in labels.items()):
            bound = float(have["le"])
            counts[bound] = counts.get(bound, 0.0) + value
    bounds = sorted(counts)
    if not bounds or counts[bounds[-1]] == 0:
        return None
    rank, low, below = q * counts[bounds[-1]], 0.0, 0.0
    for bound in bounds:
        if counts[bound] >= rank and counts[bound] > below:
            if bound == float("inf"):
                return bound
            return low + (bound - low) * (rank - below) / (counts[bound] - below)
        low, below = bound, counts[bound]
    return float("inf")


def total(families: Sequence[Family], sample: str, **labels: str) -> float:
    """Sum of the samples of that name which carry these labels."""
    return sum(
        value
        for family in families
        for name, pairs, value in family.samples
        if name == sample and all(dict(pairs).get(key) == wanted for key, wanted in labels.items())
    )
