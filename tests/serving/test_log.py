"""The router's log: one JSON object a line, every request once, with its id, its tenant and what it took."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from epilora.log import JsonLines, Together
from epilora.serving.messages import Request
from tests.serving.serving_parts import Parts, events, run


@pytest.fixture
def lines() -> Iterator[Any]:
    """A function that gives the lines logged so far and forgets them."""
    sink = io.StringIO()
    handler = logging.StreamHandler(sink)
    handler.setFormatter(JsonLines())
    logger = logging.getLogger("epilora.serving")
    before = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)

    def take() -> list[dict[str, Any]]:
        taken = [json.loads(line) for line in sink.getvalue().splitlines()]
        sink.truncate(0)
        sink.seek(0)
        return taken

    yield take
    logger.removeHandler(handler)
    logger.setLevel(before)


def asked(parts: Parts, request_id: str, **fields: Any) -> Any:
    body = json.dumps({"model": "tiny", "prompt": "hi", "max_tokens": 2, **fields}).encode()
    headers = {"authorization": "Bearer acme-key", "x-request-id": request_id}
    return parts.core.handle(Request("POST", "/v1/completions", headers, body))


def test_every_completion_is_one_line_with_its_ids(tmp_path: Path, lines: Any) -> None:
    async def scenario() -> None:
        parts = Parts(tmp_path)
        version = parts.publish("tone", 1)
        reply = await asked(parts, "mine-1", model="tone")
        (line,) = lines()
        assert reply.headers["x-request-id"] == "mine-1"
        wanted = {
            "logger": "epilora.serving.completions", "level": "info", "message": "completion", "request_id": "mine-1",
            "id": reply.body["id"], "tenant": "acme", "adapter": "tone", "version": 1, "digest": version.digest[:12],
            "engine": "base", "status": 200, "stream": False, "broken": False, "prompt_tokens": 2, "completion_tokens": 2,
        }  # fmt: skip
        assert {key: line[key] for key in wanted} == wanted
        assert 0 <= line["queue_ms"] <= line["ms"]
        assert line["time"].endswith("Z")
        stream = await asked(parts, "mine-2", stream=True)
        assert lines() == []  # it has not ended
        await events(stream)
        (line,) = lines()
        assert (line["request_id"], line["stream"], line["completion_tokens"]) == ("mine-2", True, 2)
        assert line["ttft_ms"] <= line["ms"]
        await asked(parts, "mine-3", model="ghost")
        await asked(parts, "mine-4", max_tokens=0)
        refused = [(line["request_id"], line["tenant"], line["status"], line["code"]) for line in lines()]
        assert refused == [("mine-3", "acme", 404, "model_not_found"), ("mine-4", "acme", 400, None)]

    run(scenario())


def test_other_requests_are_logged_and_health_checks_are_not(tmp_path: Path, lines: Any) -> None:
    async def scenario() -> None:
        parts = Parts(tmp_path)
        await parts.ask("/v1/models")
        await parts.ask("/health")
        await parts.ask("/ready")
        await parts.ask("/v1/completions", {}, key="wrong")
        got = [(line["message"], line["method"], line["path"], line["status"]) for line in lines()]
        assert got == [("request", "GET", "/v1/models", 200), ("request", "POST", "/v1/completions", 401)]

    run(scenario())


def test_a_failure_is_a_line_of_its_own_and_no_key_is_ever_logged(tmp_path: Path, lines: Any) -> None:
    async def scenario() -> None:
        parts = Parts(tmp_path)
        parts.store.hang = True
        await asked(parts, "late", model="ghost")
        taken = lines()
        failed = next(line for line in taken if line["level"] == "warning")
        assert (failed["request_id"], failed["path"], failed["status"]) == ("late", "/v1/completions", 504)
        assert "acme-key" not in json.dumps(taken)

    run(scenario())


def test_a_traceback_stays_on_one_line() -> None:
    sink = io.StringIO()
    logger = logging.Logger("one")
    handler = logging.StreamHandler(sink)
    handler.setFormatter(JsonLines())
    logger.addHandler(handler)
    try:
        raise KeyError("a\nb")
    except KeyError:
        logger.exception("it broke", extra={"fields": {"request_id": "r"}})
    (text,) = sink.getvalue().splitlines()
    line = json.loads(text)
    assert line["request_id"] == "r"
    assert "KeyError" in line["traceback"]


def test_lines_are_written_together_and_warnings_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    writes: list[str] = []

    class Sink(io.StringIO):
        def write(self, text: str) -> int:
            writes.append(text)
            return len(text)

    monkeypatch.setattr("sys.stderr", Sink())
    monkeypatch.setattr(Together, "WRITE_S", 3600.0)
    handler = Together()
    logger = logging.Logger("one")
    logger.addHandler(handler)
    for number in range(3):
        logger.info("line %d", number)
    assert writes == []
    logger.warning("now")
    assert writes == ["line 0\nline 1\nline 2\nnow\n"]
    for number in range(Together.WRITE_LINES):
        logger.info("%d", number)
    assert len(writes) == 2
    logger.info("last")
    handler.flush()  # what `logging.shutdown` does when the process ends
    assert writes[-1] == "last\n"
    handler.flush()
    assert len(writes) == 3
