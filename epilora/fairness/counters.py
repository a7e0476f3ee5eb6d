"""Virtual token counters over tenants and RL jobs: who has had least goes next.

    counter[c] += (INPUT_WEIGHT * prompt tokens + OUTPUT_WEIGHT * completion tokens) / weight[c]

The waiting client with the smallest counter goes next, first come first served within a client. A client that comes
back after having had nothing waiting or running starts at the smallest counter among the active ones, so idleness
earns no credit (Sheng et al., "Fairness in Serving Large Language Models", arXiv 2401.00588, section 4: VTC). An
admitted request is charged an estimate at once and the difference when it has finished.
"""

from __future__ import annotations

from dataclasses import dataclass

INPUT_WEIGHT, OUTPUT_WEIGHT = 1.0, 2.0


def service(prompt_tokens: float, completion_tokens: float) -> float:
    """Cost of a request in virtual tokens: an output token counts for two, as it takes an engine step of its own."""
    return INPUT_WEIGHT * prompt_tokens + OUTPUT_WEIGHT * completion_tokens


@dataclass
class _Client:
    counter: float = 0.0
    weight: float = 1.0
    active: int = 0  # waiting and running requests


class TokenCounters:
    """The counters alone. Raises ValueError for weights that are not above 0."""

    def __init__(self) -> None:
        self._clients: dict[str, _Client] = {}
        self._floor = 0.0
        self._active_weight = 0.0

    def arrive(self, client: str, weight: float = 1.0) -> None:
        """A request of this client came in."""
        if weight <= 0:
            raise ValueError(f"fairness: weight of {client} is {weight}; it must be above 0")
        entry = self._clients.setdefault(client, _Client())
        self._active_weight += weight - (entry.weight if entry.active else 0.0)
        entry.weight = weight
        if entry.active == 0:
            active = [other.counter for other in self._clients.values() if other.active]
            self._floor = min(active) if active else self._floor
            entry.counter = max(entry.counter, self._floor)
        entry.active += 1

    def charge(self, client: str, cost: float) -> None:
        """Add served tokens (negative: give an estimate back)."""
        entry = self._clients[client]
        entry.counter += cost / entry.weight
        self._floor = max(self._floor, min((c.counter for c in self._clients.values() if c.active), default=0.0))

    def leave(self, client: str) -> None:
        """A request of this client has ended, or gave up waiting."""
        entry = self._clients[client]
        entry.active -= 1
        if entry.active == 0:
            self._active_weight -= entry.weight
            # Clients are few, but names come from configuration that may change: forget those that owe nothing.
            idle = [name for name, c in self._clients.items() if not c.active and c.counter <= self._floor]
            for name in idle:
                del self._clients[name]

    def share(self, client: str) -> float:
        """Its weight over those of all clients with something waiting or running; 0 for one that has nothing."""
        entry = self._clients[client]
        return entry.weight / self._active_weight if entry.active else 0.0

    def counter(self, client: str) -> float:
        """Virtual tokens charged so far, 0 for a client never seen or forgotten."""
        entry = self._clients.get(client)
        return entry.counter if entry else 0.0

    def smallest(self, clients: list[str]) -> str:
        """The client that goes next. clients: those that wait, in order of arrival (which breaks ties)."""
        return min(clients, key=lambda client: self._clients[client].counter)


def jain(shares: list[float]) -> float:
    """Jain's index of fairness: 1 when all shares are equal, 1/n when one client has everything."""
    total = sum(shares)
    return total * total / (len(shares) * sum(share * share for share in shares)) if total else 1.0
