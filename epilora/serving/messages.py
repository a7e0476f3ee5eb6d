"""HTTP as the router sees it: requests in, replies out, exceptions as errors of OpenAI's shape. No web framework."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

from epilora.errors import AdapterNotFound, AdapterRejected, BaseMismatch, NoFreeSlot, PromptTooLong, Unauthorized

from .limits import RateLimited
from .openai_api import ApiError
from .ports import EngineGone

_T = TypeVar("_T")
_random = random.Random(os.urandom(32))


def random_id() -> str:
    """32 hex digits, unique but no secret: without the system call that `uuid4` makes each time."""
    return f"{_random.getrandbits(128):032x}"


@dataclass(frozen=True)
class Request:
    """An HTTP request. headers: lower-case names. query: decoded parameters."""

    method: str
    path: str
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    query: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def request_id(self) -> str:
        """The caller's `x-request-id`, or one made up."""
        return self.headers.get("x-request-id", "")[:128] or random_id()


class EventStream:
    """Bytes to send one after another. `aclose` always runs `on_close`, even if nothing was read."""

    def __init__(self, events: AsyncGenerator[bytes, None], on_close: Callable[[], None]) -> None:
        self._events, self._on_close = events, on_close

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._events

    async def aclose(self) -> None:
        try:
            await self._events.aclose()
        finally:
            self._on_close()


@dataclass
class Reply:
    """status, headers and a body: bytes, a JSON-able value, or a stream of server-sent events that must be closed."""

    status: int
    body: bytes | dict[str, Any] | EventStream
    headers: dict[str, str] = field(default_factory=dict)
    content_type: str = "application/json"


async def bounded(awaitable: Awaitable[_T], what: str, seconds: float) -> _T:
    """Wait at most `seconds`. Raises ApiError 504 naming `what` did not answer."""
    try:
        async with asyncio.timeout(seconds):  # no task of its own, as `wait_for` makes one
            return await awaitable
    except TimeoutError:
        raise ApiError(
            504, f"{what} did not answer within {seconds:g} s", type="server_error", code="timeout"
        ) from None


def page(query: Mapping[str, str]) -> tuple[int, int]:
    return whole_number(query, "offset", 0, 1 << 31), whole_number(query, "limit", 1000, 1000) or 1


def whole_number(query: Mapping[str, str], name: str, default: int, high: int) -> int:
    text = query.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit()) or len(text) > 18 or int(text) > high:
        raise ApiError(400, f"{name}={text!r} must be a whole number from 0 to {high}", param=name)
    return int(text)


def text_field(data: Mapping[str, Any], name: str, default: str | None = None) -> str:
    value = data.get(name, default)
    if value is None and default is not None:
        value = default
    if not isinstance(value, str) or (not value and default is None) or len(value) > 4096:
        raise ApiError(400, f"{name} must be a text", param=name)
    return value


def wrong_adapter(got: str | None, wanted: str | None) -> ApiError:
    """An engine answered under something else than it was asked for."""
    return ApiError(
        500,
        f"the engine answered under {got}, asked was {wanted}; the answer is withheld",
        type="server_error",
        code="wrong_adapter",
    )


def error_reply(err: Exception) -> Reply:
    """The HTTP reply an exception means, in OpenAI's error shape."""
    api = api_error(err)
    return Reply(api.status, api.body(), dict(api.headers))


def api_error(err: Exception) -> ApiError:
    text = str(err)
    if isinstance(err, ApiError):
        return err
    if isinstance(err, Unauthorized):
        return ApiError(
            401, text, type="authentication_error", code="invalid_api_key", headers={"www-authenticate": "Bearer"}
        )
    if isinstance(err, RateLimited):
        retry = {"retry-after": str(max(1, int(err.retry_after_s + 0.999)))}
        return ApiError(429, text, type="rate_limit_error", code="rate_limit_exceeded", param=err.limit, headers=retry)
    if isinstance(err, AdapterNotFound):
        return ApiError(404, text, code="model_not_found", param="model")
    if isinstance(err, PromptTooLong):
        return ApiError(400, text, code="context_length_exceeded", param="prompt")
    if isinstance(err, AdapterRejected):
        return ApiError(400, text, code="adapter_rejected")
    if isinstance(err, BaseMismatch):
        return ApiError(409, text, code="base_mismatch", param="model")
    if isinstance(err, NoFreeSlot):
        return ApiError(503, text, type="server_error", code="no_free_slot", headers={"retry-after": "1"})
    if isinstance(err, EngineGone):
        return ApiError(503, text, type="server_error", code="engine_unavailable", headers={"retry-after": "5"})
    if isinstance(err, ValueError):
        return ApiError(400, text)
    return ApiError(500, f"internal error: {type(err).__name__}", type="server_error", code="internal_error")
