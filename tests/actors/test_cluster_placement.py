"""Which node a base goes to, in plain Python: selectors, order of preference, and the explanation when nothing fits."""

from __future__ import annotations

import pytest

from actors.placement import Choice, NodeView, explain, first_that_fits, matches, waits

LABEL = "ray.io/accelerator-type"
BUNDLE = {"GPU": 1.0, "CPU": 2.0}


def node(name: str, kind: str | None, gpus: float, free: float | None = None, cpus: float = 8) -> NodeView:
    labels = {LABEL: kind} if kind else {}
    total = {"CPU": cpus, "GPU": gpus, "memory": 1e9}
    return NodeView(name, labels, total, {**total, "GPU": gpus if free is None else free})


def on(*kinds: str) -> list[Choice]:
    return [Choice({LABEL: kind}) for kind in kinds]


@pytest.mark.parametrize(
    ("wanted", "value", "fits"),
    [
        ("H100", "H100", True), ("H100", "H200", False), ("!H100", "H200", True), ("!H100", "H100", False),
        ("in(H100,H200)", "H200", True), ("in(H100, H200)", "H200", True), ("in(H100,H200)", "L40S", False),
        ("!in(H100,H200)", "L40S", True), ("!in(H100,H200)", "H100", False), ("H100", None, False), ("!H100", None, True),
    ],
)  # fmt: skip
def test_selectors_follow_rays_grammar(wanted: str, value: str | None, fits: bool) -> None:
    assert matches({LABEL: wanted}, {LABEL: value} if value else {}) is fits


def test_the_best_choice_with_room_wins_and_order_matters() -> None:
    nodes = [node("a", "L40S", 1), node("b", "H200", 1), node("c", "H100", 1, free=0)]
    assert first_that_fits(on("H100", "H200", "L40S"), BUNDLE, nodes) == Choice({LABEL: "H200"})
    assert first_that_fits(on("L40S", "H200"), BUNDLE, nodes) == Choice({LABEL: "L40S"})
    assert first_that_fits(on("H100"), BUNDLE, nodes) is None
    assert first_that_fits([Choice()], BUNDLE, nodes) == Choice()
    assert first_that_fits(on("H200"), {"GPU": 2.0}, nodes) is None


def test_waiting_is_shared_and_adds_up() -> None:
    shares = waits(on("a", "b", "c"), 90.0)
    assert [choice.labels[LABEL] for choice, _ in shares] == ["a", "b", "c"]
    assert sum(seconds for _, seconds in shares) == pytest.approx(90.0)


def test_the_explanation_names_every_nodes_reason() -> None:
    nodes = [
        node("head", None, 0), node("small", "H100", 1), node("full", "H200", 2, free=0.5), node("free", "H200", 2),
    ]  # fmt: skip
    text = explain(on("H100", "H200"), {"GPU": 2.0}, nodes)
    rows = {line.split()[1]: line for line in text.splitlines() if line.startswith("  node")}
    assert text.startswith("demand: one bundle {'GPU': 2.0} on a node with ray.io/accelerator-type=H100 or else ")
    assert rows["head"].endswith("its labels match no choice")
    assert rows["small"].endswith("too small even when idle (GPU 2 wanted, 1 in all)")
    assert rows["full"].endswith("busy (GPU 2 wanted, 0.5 free)")
    assert "GPU 0.5 of 2 free" in rows["full"]
    assert rows["free"].endswith("has room")
