"""A stream that its replica left open ends with an error event; everything else passes through the proxy unchanged."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from actors.proxy import ENVIRONMENT, CompleteStreams, middlewares
from epilora.loading import load_object

STREAM, TEXT = b"text/event-stream; charset=utf-8", b"application/json"


def sent_by(kind: bytes, *bodies: dict[str, Any], raises: bool = False) -> list[dict[str, Any]]:
    """What a client gets of an application that sends these bodies and returns."""
    out: list[dict[str, Any]] = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]})
        for body in bodies:
            await send({"type": "http.response.body", **body})
        if raises:
            raise RuntimeError("broken")

    async def send(message: Any) -> None:
        out.append(message)

    async def receive() -> Any:
        raise AssertionError("nobody asks")

    asyncio.run(CompleteStreams(application)({"type": "http"}, receive, send))
    return out


def test_a_stream_left_open_ends_with_an_error_event() -> None:
    first = {"body": b"data: {}\n\n", "more_body": True}
    start, sent, last = sent_by(STREAM, first)
    assert (start["status"], sent["body"]) == (200, b"data: {}\n\n")
    assert last["more_body"] is False
    assert last["body"].startswith(b"data: ")
    assert last["body"].endswith(b"\n\n")
    assert json.loads(last["body"][6:])["error"]["code"] == "router_unavailable"


@pytest.mark.parametrize(
    ("kind", "bodies"),
    [
        (STREAM, ({"body": b"data: {}\n\n", "more_body": True}, {"body": b"data: [DONE]\n\n"})),
        (TEXT, ({"body": b"{", "more_body": True},)),
        (TEXT, ({"body": b"{}"},)),
    ],
)
def test_what_is_whole_or_no_stream_is_left_alone(kind: bytes, bodies: Any) -> None:
    assert sent_by(kind, *bodies)[1:] == [{"type": "http.response.body", **body} for body in bodies]


def test_an_error_of_the_proxy_stays_one() -> None:
    with pytest.raises(RuntimeError, match="broken"):
        sent_by(STREAM, {"body": b"data: {}\n\n", "more_body": True}, raises=True)


def test_serve_finds_it_by_the_path_in_the_environment() -> None:
    (path,) = ENVIRONMENT.values()
    assert load_object(path) is middlewares
    assert [middleware.cls for middleware in middlewares()] == [CompleteStreams]
