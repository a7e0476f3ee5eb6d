"""Replies of the core as Starlette responses, and the core as an ASGI application."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from epilora.serving.core import ServingCore
from epilora.serving.messages import EventStream, Reply, Request


class EventResponse(Response):
    """Sends an event stream and closes it however sending ends (Serve cancels it when the client goes away)."""

    def __init__(self, stream: EventStream, reply: Reply) -> None:
        super().__init__(status_code=reply.status, headers=reply.headers, media_type=reply.content_type)
        del self.headers["content-length"]
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for data in self._stream:
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await self._stream.aclose()


def to_response(reply: Reply) -> Response:
    """The Starlette response of a reply."""
    if isinstance(reply.body, EventStream):
        return EventResponse(reply.body, reply)
    body = reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body, separators=(",", ":")).encode()
    return Response(body, reply.status, reply.headers, reply.content_type)


async def from_http(request: HttpRequest) -> Request:
    """What the core needs of an HTTP request."""
    scope = request.scope
    return Request(
        method=scope["method"],
        path=scope["path"],
        headers={name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]},
        body=await request.body(),
        query=dict(request.query_params) if scope["query_string"] else {},
    )


def http_app(core: ServingCore) -> Callable[[Scope, Receive, Send], Awaitable[None]]:
    """The core as an ASGI application of its own, for the operators' port."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", f"{scope['type']} is not served"
        request = HttpRequest(scope, receive)
        response = to_response(await core.handle(await from_http(request)))
        await response(scope, receive, send)

    return app
