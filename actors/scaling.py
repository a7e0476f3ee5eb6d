"""How many engines a base should have: a pure function of what its engines report and of what was decided before.

More engines when adapters press on the slots, requests wait too long, or the KV cache is full; fewer when the rest could
carry the load; none when nobody holds a lease and nobody has asked for `to_zero_s` (if set: else one always stays). A signal must hold for `up_s` (or
`down_s`) before it counts, so that one burst neither starts nor stops an engine. One step at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf


@dataclass(frozen=True)
class ScalingLimits:
    """Bounds and thresholds. Times in seconds, shares 0..1.

    adapter_share: distinct adapters asked for lately over the slots of all engines. waiting_s: age of the oldest waiting
    request. kv_share: of the fullest engine. spare_share: all three signals below this share of their thresholds, as they
    would be with one engine less, let one go. to_zero_s: None keeps the last engine for ever.
    """

    min_engines: int = 1
    max_engines: int = 1
    adapter_share: float = 0.9
    waiting_s: float = 2.0
    kv_share: float = 0.9
    spare_share: float = 0.6
    up_s: float = 5.0
    down_s: float = 60.0
    to_zero_s: float | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.min_engines <= self.max_engines:
            raise ValueError(
                f"scaling: min_engines={self.min_engines}, max_engines={self.max_engines}; allowed: 1 <= min <= max "
                "(to_zero_s alone lets the last engine go)"
            )
        for name in ("adapter_share", "waiting_s", "kv_share", "spare_share"):
            if getattr(self, name) <= 0:
                raise ValueError(f"scaling.{name}={getattr(self, name)}; allowed: > 0")
        if self.spare_share >= 1:
            raise ValueError(f"scaling.spare_share={self.spare_share}; allowed: < 1, or engines would come and go")


@dataclass(frozen=True)
class EngineLoad:
    """What one engine reports. adapters: distinct ones asked for lately; slots: it has; waiting_s: oldest waiting request's
    age (0: none waits); kv_share: of its KV cache in use; running: requests, waiting ones included.
    """

    name: str
    adapters: frozenset[str] = frozenset()
    slots: int = 1
    waiting_s: float = 0.0
    kv_share: float = 0.0
    running: int = 0


ADAPTERS_SEEN_S = 30.0  # how long an adapter counts as asked for


@dataclass
class LoadWatch:
    """Turns what engines report from time to time into loads. seen: adapter -> when an engine last ran requests while
    holding it; waiting_since_s: engine -> since when a request has waited there.
    """

    seen: dict[str, float] = field(default_factory=dict)
    waiting_since_s: dict[str, float] = field(default_factory=dict)

    def load(
        self, name: str, loaded: Sequence[str], *, slots: int, running: int, waiting: int, kv_share: float, now_s: float
    ) -> EngineLoad:
        """The load of one engine that reports these figures now. loaded: digests in its slots."""
        if running:
            self.seen |= dict.fromkeys(loaded, now_s)
        if waiting:
            self.waiting_since_s.setdefault(name, now_s)
        else:
            self.waiting_since_s.pop(name, None)
        lately = frozenset(digest for digest in loaded if now_s - self.seen.get(digest, -inf) < ADAPTERS_SEEN_S)
        waited_s = now_s - self.waiting_since_s.get(name, now_s)
        return EngineLoad(name, lately, slots, waited_s, kv_share, running + waiting)


@dataclass(frozen=True)
class ScalingState:
    """What the policy remembers: since when (s) each signal has held (None: it does not), and when someone last asked."""

    pressed_since_s: float | None = None
    spare_since_s: float | None = None
    last_used_s: float = 0.0


@dataclass(frozen=True)
class Decision:
    """engines: how many there should be. reason: in words, for the log and the status."""

    engines: int
    reason: str
    state: ScalingState


def decide(
    loads: Sequence[EngineLoad], limits: ScalingLimits, state: ScalingState, now_s: float, *, leased: bool
) -> Decision:
    """How many engines the base should have now. loads: of those that run; leased: a job holds the base."""
    count = len(loads)
    if leased or any(load.running for load in loads):
        state = replace(state, last_used_s=now_s)
    if count < limits.min_engines and (count or leased or limits.to_zero_s is None):
        return Decision(limits.min_engines, f"fewer than min_engines={limits.min_engines}", state)
    pressure = _pressure(loads, limits, count)
    pressed = _since(state.pressed_since_s, bool(pressure), now_s)
    # Going to zero is another rule's: spare here means that one engine less would still not be pressed.
    spare = count > limits.min_engines and not _pressure(loads, limits, count - 1, share=limits.spare_share)
    spare_since = _since(state.spare_since_s, spare, now_s)
    state = replace(state, pressed_since_s=pressed, spare_since_s=spare_since)
    if pressed is not None and now_s - pressed >= limits.up_s and count < limits.max_engines:
        return Decision(count + 1, pressure, replace(state, pressed_since_s=None))
    if count and not leased and limits.to_zero_s is not None and now_s - state.last_used_s >= limits.to_zero_s:
        return Decision(0, f"nobody asked for {now_s - state.last_used_s:.0f} s", replace(state, spare_since_s=None))
    if spare_since is not None and now_s - spare_since >= limits.down_s:
        return Decision(count - 1, f"{count - 1} engines carry the load", replace(state, spare_since_s=None))
    return Decision(count, pressure or "steady", state)


def _since(since_s: float | None, holds: bool, now_s: float) -> float | None:
    if not holds:
        return None
    return now_s if since_s is None else since_s


def _pressure(loads: Sequence[EngineLoad], limits: ScalingLimits, count: int, share: float = 1.0) -> str:
    """Which signal passes `share` of its threshold if `count` engines carry what `loads` report; "" if none does."""
    if not loads or count < 1:
        return ""
    adapters = len(frozenset().union(*(load.adapters for load in loads)))
    slots = count * min(load.slots for load in loads)
    if adapters > share * limits.adapter_share * slots:
        return f"{adapters} adapters asked for, {slots} slots"
    waiting = max(load.waiting_s for load in loads)
    if waiting > share * limits.waiting_s:
        return f"a request waits for {waiting:.1f} s"
    kv = max(load.kv_share for load in loads) * len(loads) / count
    if kv > share * limits.kv_share:
        return f"KV cache {100 * kv:.0f} % full"
    return ""
