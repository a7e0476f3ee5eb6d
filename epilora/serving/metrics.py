"""Prometheus metrics per tenant and adapter, with bounded cardinality.

Label values beyond the first `max_values` of a label are counted under "other", so that a tenant inventing names
cannot fill the memory of the server or of Prometheus. Adapter labels are names without versions.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class ServingMetrics:
    """The router's metrics in a registry of their own."""

    def __init__(self, max_values: int = 200) -> None:
        self._max_values = max_values
        self._values: dict[str, set[str]] = {"tenant": set(), "adapter": set()}
        self.registry = CollectorRegistry()
        by = ["tenant", "adapter"]
        self._requests = Counter("epilora_requests", "Requests by outcome", [*by, "status"], registry=self.registry)
        self._broken = Counter(
            "epilora_broken_streams", "Streams that ended with an error event", by, registry=self.registry
        )
        self._tokens = Counter("epilora_tokens", "Tokens", [*by, "kind"], registry=self.registry)
        self._ttft = Histogram(
            "epilora_ttft_seconds", "Time to first token", by, buckets=_SECONDS, registry=self.registry
        )
        self._tpot = Histogram(
            "epilora_time_per_token_seconds",
            "Time per output token after the first",
            by,
            buckets=_TOKEN_SECONDS,
            registry=self.registry,
        )
        self._queue = Histogram(
            "epilora_queue_seconds",
            "Wait for a turn in the router",
            ["tenant"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._load = Histogram(
            "epilora_adapter_load_seconds", "Adapter loads into a slot", buckets=_SECONDS, registry=self.registry
        )
        self._loads = Counter("epilora_adapter_loads", "Adapter loads by outcome", ["outcome"], registry=self.registry)
        self._predictions = Counter(
            "epilora_adapter_predictions", "Loads held against a resident trainer", ["outcome"], registry=self.registry
        )
        self._slot_hits = Counter(
            "epilora_adapter_slot_hits", "Requests whose adapter was in a slot already", registry=self.registry
        )
        self._slot_stale = Counter(
            "epilora_adapter_slot_stale", "... of which it had been put out meanwhile", registry=self.registry
        )
        self._store = Gauge("epilora_store", "State and tiers of the adapter store", ["what"], registry=self.registry)
        self.running = Gauge("epilora_running_requests", "Requests in the router", registry=self.registry)
        self._engine = Gauge("epilora_engine", "State of each engine", ["engine", "what"], registry=self.registry)

    def _label(self, label: str, value: str) -> str:
        values = self._values[label]
        if value in values:
            return value
        if len(values) >= self._max_values:
            return "other"
        values.add(value)
        return value

    def labels(self, tenant: str, adapter: str) -> tuple[str, str]:
        """The label values these two are counted under."""
        return self._label("tenant", tenant), self._label("adapter", adapter)

    def finished(self, tenant: str, adapter: str, status: int) -> None:
        self._requests.labels(*self.labels(tenant, adapter), str(status)).inc()

    def broken(self, tenant: str, adapter: str) -> None:
        self._broken.labels(*self.labels(tenant, adapter)).inc()

    def tokens(self, tenant: str, adapter: str, prompt: int, completion: int) -> None:
        labels = self.labels(tenant, adapter)
        self._tokens.labels(*labels, "prompt").inc(prompt)
        self._tokens.labels(*labels, "completion").inc(completion)

    def latency(self, tenant: str, adapter: str, ttft_s: float | None, tpot_s: float | None) -> None:
        labels = self.labels(tenant, adapter)
        if ttft_s is not None:
            self._ttft.labels(*labels).observe(ttft_s)
        if tpot_s is not None:
            self._tpot.labels(*labels).observe(tpot_s)

    def queued(self, tenant: str, seconds: float) -> None:
        self._queue.labels(self._label("tenant", tenant)).observe(seconds)

    def loaded(self, outcome: str, seconds: float) -> None:
        self._loads.labels(outcome).inc()
        if outcome == "ok":
            self._load.observe(seconds)

    def predicted(self, outcome: str) -> None:
        self._predictions.labels(outcome).inc()

    def engine(self, name: str, values: dict[str, float]) -> None:
        for what, value in values.items():
            self._engine.labels(name, what).set(value)

    def slot_hit(self) -> None:
        self._slot_hits.inc()

    def slot_stale(self) -> None:
        self._slot_stale.inc()

    def store(self, values: dict[str, float]) -> None:
        for what, value in values.items():
            self._store.labels(what).set(value)

    def render(self) -> bytes:
        """Prometheus text format."""
        return generate_latest(self.registry)
