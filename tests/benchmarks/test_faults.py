"""How the fault campaign counts: its clients' outcomes against a scripted server, and its summary of rows made by hand."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest

from benchmarks.faults.plan import KINDS, STAND_IN, VLLM, plan
from benchmarks.faults.tenants import STREAM_TOKENS, WHOLE_TOKENS, Tenants
from benchmarks.faults_cpu import summarise

DIGEST = "0123456789abcdef"
GOOD = f"{DIGEST[:8]}:0 "


def test_the_plan_is_seeded_and_has_enough_of_every_kind() -> None:
    faults = plan(STAND_IN) + plan(VLLM)
    assert plan(STAND_IN) == plan(STAND_IN) != plan(STAND_IN, seed=1)
    kinds = Counter(fault.kind for fault in faults)
    assert set(kinds) == set(KINDS)
    assert min(kinds.values()) >= 15
    assert len(faults) >= 200
    assert sum(fault.activity != "requests" for fault in faults) >= 60


class Scripted(BaseHTTPRequestHandler):
    """Answers whole requests with what is next in `whole`, streams with `stream`; then well."""

    whole: ClassVar[list[str]] = []
    stream: ClassVar[list[str]] = []
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if body["stream"]:
            self._stream(type(self).stream.pop(0) if type(self).stream else "good", body["max_tokens"])
        else:
            self._whole(type(self).whole.pop(0) if type(self).whole else "good", body["max_tokens"])

    def _whole(self, what: str, tokens: int) -> None:
        text = GOOD * tokens if what != "wrong" else "ffffffff:0 " * tokens
        data = json.dumps({"choices": [{"text": text}]} if what != "503" else {"error": {"code": "x"}}).encode()
        self.send_response(503 if what == "503" else 200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _stream(self, what: str, tokens: int) -> None:
        self.send_response(200)
        self.send_header("connection", "close")
        self.end_headers()
        if what == "error first":
            self._event({"error": {"code": "engine_unavailable"}})
            return
        for _ in range(tokens if what == "good" else 2):
            self._event({"choices": [{"text": GOOD}]})
        if what == "good":
            self.wfile.write(b"data: [DONE]\n\n")
        elif what == "error":
            self._event({"error": {"code": "engine_unavailable"}})

    def _event(self, event: dict[str, object]) -> None:
        self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())

    def log_message(self, *args: object) -> None:
        """Quiet."""


@contextmanager
def tenants(whole: list[str]) -> Iterator[Tenants]:
    Scripted.whole, Scripted.stream = whole, []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Scripted)
    serving = threading.Thread(target=server.serve_forever, daemon=True)
    serving.start()
    with Tenants(f"http://127.0.0.1:{server.server_port}", "key", {"a": DIGEST}) as asking:
        yield asking
    server.shutdown()
    serving.join()


def wait_for_ends(asking: Tenants, count: int) -> None:
    deadline = time.monotonic() + 20
    while sum(bool(a.outcome) for a in asking.asked) < count and time.monotonic() < deadline:
        time.sleep(0.02)


def test_a_whole_request_is_asked_twice_at_most() -> None:
    with tenants(["503", "503", "503", "503", "503", "503", "503", "503", "wrong"]) as asking:
        wait_for_ends(asking, 12)
    seen = asking.asked
    failed = [a for a in seen if a.outcome == "failed"]
    again = [a for a in seen if a.attempts == 2]
    assert all(a.attempts == 2 and a.why.startswith("503") for a in failed)
    assert len(failed) * 2 + sum(a.outcome == "ok" for a in again) == 8  # every 503 was somebody's attempt
    assert [a.outcome for a in seen if not a.right] == ["ok"]
    assert WHOLE_TOKENS > 1


@pytest.mark.parametrize(
    ("what", "outcome", "event", "attempts"),
    [("good", "ok", False, 1), ("error", "cut", True, 1), ("broken", "cut", False, 1), ("error first", "ok", False, 2)],
)
def test_a_stream_that_broke_after_a_token_is_cut_and_not_asked_again(
    what: str, outcome: str, event: bool, attempts: int
) -> None:
    with tenants([]) as asking:
        Scripted.stream = [what]
        asking.open_streams()
        deadline = time.monotonic() + 20
        while any(a.streamed and not a.outcome for a in asking.asked) and time.monotonic() < deadline:
            time.sleep(0.02)
        streams = [a for a in asking.asked if a.streamed]
    seen = sorted((a.outcome, a.event, a.attempts, a.tokens) for a in streams)
    met = (outcome, event, attempts, STREAM_TOKENS if outcome == "ok" else 2)
    assert seen == sorted([met, *[("ok", False, 1, STREAM_TOKENS)] * 3])
    assert all(a.right for a in streams)


def row(kind: str, setting: str, **fields: object) -> dict:
    base = {"case": "fault", "kind": kind, "setting": setting, "outcome": "recovered", "recovery_s": 2.0, "leaks": []}
    return {**base, "in_flight": {}, **fields}


def test_the_summary_counts_what_went_wrong() -> None:
    rows = [
        row("engine", STAND_IN, slowest_request_s=3.0, requests=10, asked_again=2, failed_requests=1, cut_streams=2,
            cut_without_event=1, wrong_answers=1, in_flight={"streams": 2}, leaks=["1 GPU"]),
        row("engine", STAND_IN, slowest_request_s=1.0, requests=5, recovery_s=4.0, outcome="waited 90 s", publishes_failed=1),
        row("engine", VLLM, in_flight={"rl_steps": 1}, steps_lost=1),
        {"case": "versions", "acknowledged": 7, "lost": 1},
        {"case": "resumed", "steps": 9, "differing": [4]},
    ]  # fmt: skip
    seen = summarise(rows)
    by_kind = seen.pop("by_kind")
    assert seen == {
        "faults": 3, "in_flight": 2, "not_recovered": 1, "requests": 15, "asked_again": 2, "failed_requests": 1,
        "wrong_answers": 1, "cut_streams": 2, "cut_without_event": 1, "publishes_failed": 1, "acknowledged_versions": 7,
        "lost_versions": 1, "leaks": 1, "steps_lost": 1, "resumed_bit_equal": 0,
    }  # fmt: skip
    assert by_kind["engine (stand-in)"]["recovery_s_p50"] == 3.0
    assert by_kind["engine (stand-in)"]["slowest_request_s_max"] == 3.0
    assert set(by_kind) == {"engine (stand-in)", "engine (vllm)"}
    assert summarise([*rows[:3], {"case": "resumed", "steps": 9, "differing": []}])["resumed_bit_equal"] == 1
    assert summarise([{"case": "resumed", "steps": 0, "differing": []}])["resumed_bit_equal"] == 0
    assert summarise(rows[:3])["resumed_bit_equal"] is None
