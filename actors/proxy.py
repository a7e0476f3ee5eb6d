"""What Serve's HTTP proxy does beside carrying calls: a stream whose router replica died ends with an error event.

Serve itself only breaks the connection off then. Named by RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=actors.proxy:middlewares in
the environment of the cluster's processes (deploy/, cluster.yaml; jobs that start Ray themselves set it).
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from epilora.serving import openai_api as wire

if TYPE_CHECKING:
    from starlette.middleware import Middleware
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

ENVIRONMENT = {"RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "actors.proxy:middlewares"}
EVENT_STREAM = b"text/event-stream"

logger = logging.getLogger(__name__)


class CompleteStreams:
    """Ends an event stream that the application left open."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        streaming = False

        async def watched(message: Message) -> None:
            nonlocal streaming
            if message["type"] == "http.response.start":
                headers = dict(message.get("headers", ()))
                streaming = headers.get(b"content-type", b"").startswith(EVENT_STREAM)
            elif message["type"] == "http.response.body" and not message.get("more_body", False):
                streaming = False
            await send(message)

        await self._app(scope, receive, watched)
        if streaming:
            logger.warning("a stream's router replica ended before the stream did")
            lost = wire.ApiError(
                503, "the router's replica was lost; ask again", type="server_error", code="router_unavailable"
            )
            await send({"type": "http.response.body", "body": wire.sse(lost.body()), "more_body": False})


def middlewares() -> list[Middleware]:
    """For Serve."""
    from starlette.middleware import Middleware  # here: jobs that start no router read ENVIRONMENT too

    return [Middleware(CompleteStreams)]
