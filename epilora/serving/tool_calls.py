"""Tool calls in a model's text, in the Hermes form that Qwen and many others are trained on.

    <tool_call>
    {"name": "f", "arguments": {...}}
    </tool_call>

Only looked for when the request gave tools. What does not parse as a call stays in the text: nothing is lost.
"""

from __future__ import annotations

import json
import re
import uuid
from dataclasses import dataclass
from typing import Any

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_CALL = re.compile(rf"{_OPEN}\s*(.*?)\s*(?:{_CLOSE}|\Z)", re.DOTALL)


def parse_tool_calls(text: str) -> tuple[str, list[dict[str, Any]]]:
    """(text without the calls, calls in OpenAI's form)."""
    calls: list[dict[str, Any]] = []

    def take(match: re.Match[str]) -> str:
        call = _call(match[1])
        if call is None:
            return match[0]
        calls.append(call)
        return ""

    rest = _CALL.sub(take, text)
    return (rest.strip() if calls else text), calls


def _call(document: str) -> dict[str, Any] | None:
    try:
        data = json.loads(document)
    except (ValueError, RecursionError):
        return None
    if not isinstance(data, dict) or not isinstance(data.get("name"), str) or not data["name"]:
        return None
    arguments = data.get("arguments", {})
    if not isinstance(arguments, dict):
        return None
    return {
        "id": f"call_{uuid.uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": data["name"], "arguments": json.dumps(arguments, ensure_ascii=False)},
    }


@dataclass
class ToolCallStream:
    """Splits a stream: text that cannot be part of a call passes at once, the rest is held until the end."""

    _held: str = ""

    def push(self, text: str) -> str:
        """The part of everything pushed so far that may be sent now."""
        self._held += text
        if _OPEN in self._held:
            cut = self._held.index(_OPEN)
        else:
            partial = (n for n in range(len(_OPEN) - 1, 0, -1) if self._held.endswith(_OPEN[:n]))
            cut = len(self._held) - next(partial, 0)
        ready, self._held = self._held[:cut], self._held[cut:]
        return ready

    def finish(self) -> tuple[str, list[dict[str, Any]]]:
        """(text still to send, calls) at the end of the stream."""
        held, self._held = self._held, ""
        return parse_tool_calls(held)
