"""The operators' port of an in-process core on a real socket, for the page, `epilora top` and the dashboard."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from actors.responses import http_app
from epilora.serving.core import ServingCore


@contextmanager
def operators_port(core: ServingCore) -> Iterator[tuple[str, asyncio.AbstractEventLoop]]:
    """(URL, the event loop that owns the core) until the block ends."""
    server = uvicorn.Server(uvicorn.Config(http_app(core), port=0, log_level="error", lifespan="off"))
    started: list[asyncio.AbstractEventLoop] = []

    async def serve() -> None:
        started.append(asyncio.get_running_loop())
        await server.serve()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server ended before it began"
        threading.Event().wait(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}", started[0]
    finally:
        server.should_exit = True
        thread.join(10)
