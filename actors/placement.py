"""Where a base can go: the choices a request offers, what the cluster has, and why nothing fits. Pure; no Ray.

Ray gives placement groups label selectors per bundle but no fallback strategy (actors have one), so the order of preference
is kept here: first the best choice that a node has room for now; if none has, each choice is waited for in turn, so that an
autoscaler is asked for one kind of node at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

ACCELERATOR_LABEL = "ray.io/accelerator-type"


@dataclass(frozen=True)
class Choice:
    """One kind of node that may run the base.

    labels: label selector of its bundle (value, `!value`, `in(a,b)` or `!in(a,b)`; Ray's grammar). engine_kwargs: what the
    engine is told on such a node instead of the request's own, e.g. another base format.
    """

    labels: Mapping[str, str] = field(default_factory=dict)
    engine_kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return ", ".join(f"{key}={value}" for key, value in self.labels.items()) or "any node"


@dataclass(frozen=True)
class NodeView:
    """One live node: labels, resources in total and free."""

    node_id: str
    labels: Mapping[str, str]
    total: Mapping[str, float]
    free: Mapping[str, float]


def matches(selector: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    """Whether a node with `labels` satisfies every term of `selector`."""
    return all(_term(wanted, labels.get(key)) for key, wanted in selector.items())


def _term(wanted: str, value: str | None) -> bool:
    negated = wanted.startswith("!")
    body = wanted[1:] if negated else wanted
    allowed = body[3:-1].split(",") if body.startswith("in(") and body.endswith(")") else [body]
    return (value in [item.strip() for item in allowed]) != negated


def lacking(bundle: Mapping[str, float], have: Mapping[str, float]) -> list[str]:
    """What a node with `have` lacks for `bundle`: `GPU 2 wanted, 1`."""
    return [f"{key} {need:g} wanted, {have.get(key, 0):g}" for key, need in bundle.items() if have.get(key, 0) < need]


def first_that_fits(choices: Sequence[Choice], bundle: Mapping[str, float], nodes: Sequence[NodeView]) -> Choice | None:
    """The best choice that some node can take now."""
    for choice in choices:
        if any(matches(choice.labels, node.labels) and not lacking(bundle, node.free) for node in nodes):
            return choice
    return None


def waits(choices: Sequence[Choice], timeout_s: float) -> list[tuple[Choice, float]]:
    """How long to wait for each choice in turn: equal shares of `timeout_s`."""
    return [(choice, timeout_s / len(choices)) for choice in choices]


def explain(choices: Sequence[Choice], bundle: Mapping[str, float], nodes: Sequence[NodeView]) -> str:
    """Demand against supply, one line per choice and per node with the reason why it does not take the bundle."""
    lines = [f"demand: one bundle {dict(bundle)} on a node with " + " or else ".join(choice.name for choice in choices)]
    lines.append(f"supply: {len(nodes)} live nodes")
    for node in nodes:
        shown = ", ".join(
            f"{key} {node.free.get(key, 0):g} of {total:g} free"
            for key, total in sorted(node.total.items())
            if key in bundle or key in ("CPU", "GPU")
        )
        labels = node.labels.get(ACCELERATOR_LABEL, "none")
        lines.append(
            f"  node {node.node_id[:12]} {ACCELERATOR_LABEL}={labels}: {shown}; {_reason(choices, bundle, node)}"
        )
    return "\n".join(lines)


def _reason(choices: Sequence[Choice], bundle: Mapping[str, float], node: NodeView) -> str:
    if not any(matches(choice.labels, node.labels) for choice in choices):
        return "its labels match no choice"
    if short := lacking(bundle, node.total):
        return f"too small even when idle ({'; '.join(short)} in all)"
    if short := lacking(bundle, node.free):
        return f"busy ({'; '.join(short)} free)"
    return "has room"
