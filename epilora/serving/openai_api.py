"""OpenAI's wire format: requests checked by hand, answers built as plain dicts. Standard library only.

Every field is either honoured, harmless or refused by name; nothing a client asks for is dropped in silence.
References: https://platform.openai.com/docs/api-reference/{completions,chat} and vLLM's additions (top_k, ignore_eos).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from epilora.types import Sampling

MAX_BODY_BYTES = 8 << 20
MAX_CHOICES = 128
MAX_STOPS = 16
MAX_LOGPROBS = 20


class ApiError(Exception):
    """An answer in OpenAI's error shape."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.type, self.code, self.param = status, message, type, code, param
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


@dataclass(frozen=True)
class Call:
    """A checked request.

    chat: chat or plain completion. prompts: texts or token ids (plain); messages, tools: the conversation (chat).
    sampling.max_tokens is 0 where the client gave none (chat: as much as fits). n: choices per prompt.
    logprobs: None or how many alternatives per token.
    """

    chat: bool
    model: str
    sampling: Sampling
    n: int
    stream: bool
    include_usage: bool
    prompts: tuple[str | tuple[int, ...], ...] = ()
    messages: tuple[dict[str, Any], ...] = ()
    tools: tuple[dict[str, Any], ...] | None = None

    @property
    def logprobs(self) -> int | None:
        return self.sampling.logprobs

    @property
    def estimated_tokens(self) -> float:
        """Guess of prompt plus completion tokens, for rate limits: 4 characters a token."""
        prompt = sum(len(p) / 4.0 if isinstance(p, str) else len(p) for p in self.prompts)
        prompt += sum(len(str(message.get("content") or "")) for message in self.messages) / 4.0
        choices = self.n * max(1, len(self.prompts))
        return prompt * self.n + (self.sampling.max_tokens or 16) * choices


# Fields that change nothing here and are accepted with any value of their type.
_HARMLESS = {"user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"}
# Fields we do not implement, with the values that mean "off".
_OFF: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0, 0.0, None),
    "frequency_penalty": (0, 0.0, None),
    "repetition_penalty": (1, 1.0, None),
    "min_p": (0, 0.0, None),
    "min_tokens": (0, None),
    "logit_bias": ({}, None),
    "best_of": (1, None),
    "echo": (False, None),
    "suffix": ("", None),
    "store": (False, None),
    "functions": ([], None),
    "function_call": ("none", None),
    "modalities": (["text"], None),
    "audio": (None,),
    "prediction": (None,),
    "web_search_options": (None,),
    "reasoning_effort": (None,),
    "verbosity": (None,),
    "response_format": ({"type": "text"}, None),
    "parallel_tool_calls": (True, False, None),
    "skip_special_tokens": (True, None),
    "add_generation_prompt": (True, None),
}
_COMMON = {"model", "temperature", "top_p", "top_k", "stop", "seed", "n", "stream", "stream_options", "max_tokens"}
_COMMON |= {"ignore_eos", "logprobs"} | _HARMLESS | set(_OFF)
_PLAIN = _COMMON | {"prompt"}
_CHAT = _COMMON | {"messages", "tools", "tool_choice", "top_logprobs", "max_completion_tokens"}


def parse_json(body: bytes) -> dict[str, Any]:
    """The JSON object of a request body. Raises ApiError 413 or 400."""
    if len(body) > MAX_BODY_BYTES:
        raise ApiError(413, f"request body has {len(body)} bytes; at most {MAX_BODY_BYTES} are allowed")
    try:
        data = json.loads(body.decode("utf-8"), parse_constant=_no_constant)
    except (UnicodeDecodeError, ValueError, RecursionError) as err:
        raise ApiError(400, f"could not parse the JSON body: {err}") from err
    if not isinstance(data, dict):
        raise ApiError(400, f"the JSON body is a {type(data).__name__}, not an object")
    return data


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def parse_completion(data: Mapping[str, Any]) -> Call:
    """Check a /v1/completions body. Raises ApiError 400 naming the field."""
    _known(data, _PLAIN)
    prompts = _prompts(data.get("prompt"))
    logprobs = _integer(data, "logprobs", None, 0, MAX_LOGPROBS)
    call = _common(data, chat=False, default_max_tokens=16, logprobs=logprobs)
    return _bounded(Call(**call, prompts=prompts))


def parse_chat(data: Mapping[str, Any]) -> Call:
    """Check a /v1/chat/completions body. Raises ApiError 400 naming the field."""
    _known(data, _CHAT)
    wants = _boolean(data, "logprobs", False)
    top = _integer(data, "top_logprobs", None, 0, MAX_LOGPROBS)
    if top and not wants:
        raise ApiError(400, "top_logprobs needs logprobs=true", param="top_logprobs")
    tools = _tools(data)
    call = _common(data, chat=True, default_max_tokens=0, logprobs=(top or 0) if wants else None)
    return _bounded(Call(**call, messages=_messages(data.get("messages")), tools=tools))


def _known(data: Mapping[str, Any], allowed: set[str]) -> None:
    for name, value in data.items():
        if name not in allowed:
            raise ApiError(400, f"unrecognized request argument: {name}", param=name)
        if name in _OFF and not any(type(value) is type(off) and value == off for off in _OFF[name]):
            raise ApiError(
                400, f"{name}={_short(value)} is not supported; leave it out", param=name, code="unsupported_parameter"
            )


def _common(data: Mapping[str, Any], *, chat: bool, default_max_tokens: int, logprobs: int | None) -> dict[str, Any]:
    model = data.get("model")
    if not isinstance(model, str) or not model or len(model) > 512:
        raise ApiError(400, f"model must be a name of 1 to 512 characters; got {_short(model)}", param="model")
    max_tokens = _integer(data, "max_tokens", default_max_tokens, 1, 1 << 24)
    if data.get("max_completion_tokens") is not None:
        max_tokens = _integer(data, "max_completion_tokens", default_max_tokens, 1, 1 << 24)
    stream = _boolean(data, "stream", False)
    options = data.get("stream_options")
    include_usage = False
    if options is not None:
        if not stream:
            raise ApiError(400, "stream_options is only allowed with stream=true", param="stream_options")
        if not isinstance(options, dict) or set(options) - {"include_usage", "include_obfuscation"}:
            raise ApiError(400, "stream_options allows include_usage only", param="stream_options")
        include_usage = _boolean(options, "include_usage", False)
    sampling = Sampling(
        max_tokens=max_tokens or 0,
        temperature=_number(data, "temperature", 1.0, 0.0, 2.0),
        top_p=_number(data, "top_p", 1.0, 0.0, 1.0, open_low=True),
        top_k=max(0, _integer(data, "top_k", 0, -1, 1 << 24) or 0),
        stop=_stops(data.get("stop")),
        seed=_integer(data, "seed", None, -(1 << 63), (1 << 63) - 1),
        logprobs=logprobs,
        ignore_eos=_boolean(data, "ignore_eos", False),
    )
    n = _integer(data, "n", 1, 1, MAX_CHOICES) or 1
    return {
        "chat": chat,
        "model": model,
        "sampling": sampling,
        "n": n,
        "stream": stream,
        "include_usage": include_usage,
    }


def _bounded(call: Call) -> Call:
    choices = call.n * max(1, len(call.prompts))
    if choices > MAX_CHOICES:
        raise ApiError(400, f"n times prompts is {choices}; at most {MAX_CHOICES} choices are allowed", param="n")
    return call


def _number(
    data: Mapping[str, Any], name: str, default: float, low: float, high: float, *, open_low: bool = False
) -> float:
    value = data.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ApiError(400, f"{name}={_short(value)} must be a number from {low:g} to {high:g}", param=name)
    if not low <= value <= high or (open_low and value <= low):
        raise ApiError(
            400,
            f"{name}={_short(value)} must be {'above' if open_low else 'at least'} {low:g} and at most {high:g}",
            param=name,
        )
    return float(value)


def _integer(data: Mapping[str, Any], name: str, default: int | None, low: int, high: int) -> int | None:
    value = data.get(name)
    if value is None:
        return default
    if type(value) is not int or not low <= value <= high:
        raise ApiError(400, f"{name}={_short(value)} must be a whole number from {low} to {high}", param=name)
    return value


def _boolean(data: Mapping[str, Any], name: str, default: bool) -> bool:
    value = data.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ApiError(400, f"{name}={_short(value)} must be true or false", param=name)
    return value


def _stops(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if (
        not isinstance(stops, list)
        or len(stops) > MAX_STOPS
        or not all(isinstance(s, str) and 0 < len(s) <= 1024 for s in stops)
    ):
        raise ApiError(400, f"stop must be a text or up to {MAX_STOPS} texts, none of them empty", param="stop")
    return tuple(stops)


def _prompts(value: Any) -> tuple[str | tuple[int, ...], ...]:
    """A text, several texts, token ids, or several lists of token ids."""
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list) or not value:
        raise ApiError(400, "prompt must be a text, a list of texts, or token ids, and not empty", param="prompt")
    if all(type(item) is int for item in value):
        value = [value]
    if len(value) > MAX_CHOICES:
        raise ApiError(400, f"prompt has {len(value)} entries; at most {MAX_CHOICES} are allowed", param="prompt")
    out: list[str | tuple[int, ...]] = []
    for item in value:
        if isinstance(item, str):
            if not item:
                raise ApiError(400, "prompt has an empty text", param="prompt")
            out.append(_text(item, "prompt"))
        elif isinstance(item, list) and item and all(type(token) is int and 0 <= token < 1 << 31 for token in item):
            out.append(tuple(item))
        else:
            raise ApiError(
                400, f"prompt entry {_short(item)} is neither a text nor a list of token ids", param="prompt"
            )
    return tuple(out)


def _text(value: str, param: str) -> str:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as err:
        raise ApiError(400, f"{param} has half of a surrogate pair, which is not text", param=param) from err
    return value


_ROLES = ("system", "developer", "user", "assistant", "tool")


def _messages(value: Any) -> tuple[dict[str, Any], ...]:
    if not isinstance(value, list) or not value:
        raise ApiError(400, "messages must be a list with at least one message", param="messages")
    if len(value) > 4096:
        raise ApiError(400, f"messages has {len(value)} entries; at most 4096 are allowed", param="messages")
    out = []
    for index, message in enumerate(value):
        param = f"messages[{index}]"
        if not isinstance(message, dict):
            raise ApiError(400, f"{param} is not an object", param=param)
        role = message.get("role")
        if role not in _ROLES:
            raise ApiError(400, f"{param}.role={_short(role)}; allowed are {', '.join(_ROLES)}", param=f"{param}.role")
        content = message.get("content")
        if isinstance(content, list):
            content = "".join(_part(part, f"{param}.content") for part in content)
        if content is None and role == "assistant" and message.get("tool_calls"):
            content = ""
        if not isinstance(content, str):
            raise ApiError(400, f"{param}.content must be a text or a list of text parts", param=f"{param}.content")
        clean = {"role": "system" if role == "developer" else role, "content": _text(content, f"{param}.content")}
        for name in ("name", "tool_call_id"):
            if message.get(name) is not None:
                if not isinstance(message[name], str):
                    raise ApiError(400, f"{param}.{name} must be a text", param=f"{param}.{name}")
                clean[name] = message[name]
        if message.get("tool_calls"):
            clean["tool_calls"] = _tool_calls(message["tool_calls"], param)
        unknown = set(message) - {
            "role",
            "content",
            "name",
            "tool_call_id",
            "tool_calls",
            "refusal",
            "audio",
            "annotations",
        }
        if unknown:
            raise ApiError(400, f"{param} has the unknown field {sorted(unknown)[0]!r}", param=param)
        out.append(clean)
    return tuple(out)


def _part(part: Any, param: str) -> str:
    if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        kind = part.get("type") if isinstance(part, dict) else part
        raise ApiError(400, f"{param} part {_short(kind)} is not supported; only text parts are", param=param)
    return part["text"]


def _tool_calls(calls: Any, param: str) -> list[dict[str, Any]]:
    """Earlier calls of the assistant, arguments parsed as chat templates expect them."""
    if not isinstance(calls, list):
        raise ApiError(400, f"{param}.tool_calls must be a list", param=f"{param}.tool_calls")
    out = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ApiError(400, f"{param}.tool_calls has an entry without function.name", param=f"{param}.tool_calls")
        arguments = function.get("arguments", "{}")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except (ValueError, RecursionError) as err:
                raise ApiError(
                    400, f"{param}.tool_calls arguments are not JSON: {err}", param=f"{param}.tool_calls"
                ) from err
        entry = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
        if isinstance(call.get("id"), str):
            entry["id"] = call["id"]
        out.append(entry)
    return out


def _tools(data: Mapping[str, Any]) -> tuple[dict[str, Any], ...] | None:
    tools, choice = data.get("tools"), data.get("tool_choice")
    if choice not in (None, "none", "auto"):
        raise ApiError(
            400, f"tool_choice={_short(choice)} is not supported; allowed are none and auto", param="tool_choice"
        )
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list) or len(tools) > 128:
        raise ApiError(400, "tools must be a list of at most 128 functions", param="tools")
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            raise ApiError(
                400, f"tools[{index}] must be {{'type': 'function', 'function': {{'name': ...}}}}", param="tools"
            )
    return None if choice == "none" else tuple(tools)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


# --- answers ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TokenLogprob:
    """One token as text, its log-probability, and the likeliest alternatives (text, logprob)."""

    text: str
    logprob: float
    top: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class Identity:
    """What every answer of one request repeats. fingerprint: digest of the version (or of the base) that answered."""

    id: str
    created: int
    model: str
    fingerprint: str

    def head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def completion_choice(
    index: int, text: str, finish: str | None, logprobs: Sequence[TokenLogprob] | None, offset: int = 0
) -> dict[str, Any]:
    """A choice of /v1/completions, whole or a streamed piece. offset: characters of the answer before this piece."""
    block = None
    if logprobs is not None:
        offsets = []
        for token in logprobs:
            offsets.append(offset)
            offset += len(token.text)
        block = {
            "tokens": [token.text for token in logprobs],
            "token_logprobs": [_finite(token.logprob) for token in logprobs],
            "top_logprobs": [{text: _finite(value) for text, value in token.top} for token in logprobs],
            "text_offset": offsets,
        }
    return {"index": index, "text": text, "logprobs": block, "finish_reason": finish}


def chat_choice(
    index: int,
    message: Mapping[str, Any],
    finish: str | None,
    logprobs: Sequence[TokenLogprob] | None,
    *,
    streamed: bool = False,
) -> dict[str, Any]:
    """A choice of /v1/chat/completions: a whole message, or a streamed delta."""
    block = None
    if logprobs is not None:
        block = {"content": [_chat_logprob(token) for token in logprobs], "refusal": None}
    return {
        "index": index,
        "delta" if streamed else "message": dict(message),
        "logprobs": block,
        "finish_reason": finish,
    }


def _chat_logprob(token: TokenLogprob) -> dict[str, Any]:
    return {
        **_named(token.text, token.logprob),
        "top_logprobs": [_named(text, logprob) for text, logprob in token.top],
    }


def _named(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode("utf-8", "replace"))}


def _finite(logprob: float) -> float:
    """JSON has no infinity: what cannot happen is shown as -9999, as OpenAI does."""
    return float(logprob) if math.isfinite(logprob) else -9999.0


def sse(data: Mapping[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"


SSE_DONE = b"data: [DONE]\n\n"


def model_entry(
    name: str, created: int, *, parent: str | None = None, root: str | None = None, **extra: Any
) -> dict[str, Any]:
    """An entry of /v1/models; `parent` marks an adapter, as vLLM does."""
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "epilora",
        "root": root,
        "parent": parent,
        **extra,
    }
