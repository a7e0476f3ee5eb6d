"""The Grafana dashboard asks only for series that /metrics has, by names and labels that exist there."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import yaml
from prometheus_client.parser import text_string_to_metric_families

from epilora.serving.ports import EngineGone
from epilora.types import GenerateRequest, TokenChunk
from tests.actors.fake_engine import PlainFakeEngine
from tests.serving.serving_parts import Parts, events, run

DASHBOARD = Path(__file__).resolve().parents[2] / "deploy" / "grafana" / "epilora.json"
ALERTS = DASHBOARD.parents[1] / "prometheus" / "alerts.yaml"
SERVING = Path(__file__).resolve().parents[2] / "epilora" / "serving"
SELECTOR = re.compile(r"\b(epilora_\w+)(?:\{([^}]*)\})?")
MATCHER = re.compile(r"(\w+)(=~|!~|!=|=)\"([^\"]*)\"")


class Breaks(PlainFakeEngine):
    """Dies after the first token of the prompt `break`."""

    async def stream(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        async for chunk in super().stream(request):
            yield chunk
            if request.prompt == "break":
                raise EngineGone("died")

    async def predict(self, version: Any, tensors: Any, sequences: Any) -> Any:
        raise ValueError("a trainer that cannot hold this adapter")


async def scraped(root: Path) -> str:
    parts = Parts(root, engines=[Breaks(slots=1)])
    for name in ("one", "other"):
        parts.publish(name, len(name))
    for fields in ({"model": "one"}, {"model": "other"}, {"model": "one"}, {"max_tokens": 0}):
        await parts.complete(**fields)
    for prompt in ("hi", "break"):
        await events(await parts.complete(stream=True, max_tokens=3, prompt=prompt))
    await parts.core.fleet.settle()
    reply = await parts.ask("/metrics")
    assert isinstance(reply.body, bytes)
    return reply.body.decode()


def test_every_series_of_the_dashboard_exists(tmp_path: Path) -> None:
    samples = [
        (sample.name, sample.labels)
        for family in text_string_to_metric_families(run(scraped(tmp_path)))
        for sample in family.samples
    ]
    names = {name for name, _ in samples}
    dashboard = json.loads(DASHBOARD.read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert len(expressions) >= 25
    for expression in expressions:
        assert expression.count("(") == expression.count(")"), expression
        found = SELECTOR.findall(expression)
        assert found, expression
        for name, matchers in found:
            assert name in names, f"{name} of {expression} is not in /metrics"
            wanted = [(key, kind, value) for key, kind, value in MATCHER.findall(matchers) if not value.startswith("$")]
            for key, _, _ in MATCHER.findall(matchers):
                assert any(key in labels for n, labels in samples if n == name), (key, expression)
            assert any(
                all(_fits(labels[key], kind, value) for key, kind, value in wanted)
                for sample, labels in samples
                if sample == name
            ), f"no series fits {name}{{{matchers}}}"
        for label in re.findall(r"by \(([^)]*)\)", expression):
            for key in label.split(", "):
                assert any(key in labels for n, labels in samples if n in {name for name, _ in found}), expression


def _fits(have: str, kind: str, value: str) -> bool:
    matched = re.fullmatch(value, have) is not None if "~" in kind else have == value
    return matched != kind.startswith("!")


def test_every_series_of_the_alerts_exists(tmp_path: Path) -> None:
    """Names and labels as scraped; values as scraped, or (outcomes that this server did not have) as the source spells them."""
    samples = [
        (sample.name, sample.labels)
        for family in text_string_to_metric_families(run(scraped(tmp_path)))
        for sample in family.samples
    ]
    source = "".join(path.read_text() for path in (*SERVING.glob("*.py"), SERVING.parent / "errors.py"))
    rules = yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]
    assert len({rule["alert"] for rule in rules}) == len(rules) > 8
    for rule in rules:
        found = SELECTOR.findall(rule["expr"])
        assert found, rule
        for name, matchers in found:
            labels = [labels for sample, labels in samples if sample == name]
            assert labels, f"{name} of {rule['alert']} is not in /metrics"
            for key, kind, value in MATCHER.findall(matchers):
                assert all(key in has for has in labels), (rule["alert"], key)
                known = any(_fits(has[key], kind, value) for has in labels)
                assert known or "~" in kind or f'"{value}"' in source or f"class {value}(" in source, (rule, value)


def test_the_dashboard_shows_every_metric_there_is(tmp_path: Path) -> None:
    """A new metric that no panel shows is forgotten; name it here if that is meant."""
    shown = set(SELECTOR.findall(DASHBOARD.read_text()))
    asked = {re.sub(r"_(bucket|total|sum|count)$", "", name) for name, _ in shown}
    there = {family.name for family in text_string_to_metric_families(run(scraped(tmp_path)))}
    assert {name for name in there if name.startswith("epilora_")} - asked == set()
