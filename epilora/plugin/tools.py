"""Tool calls in a model's text, by vLLM's own parsers (`vllm serve --tool-call-parser` names them the same)."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from . import compat

logger = logging.getLogger(__name__)


class ToolCalls:
    """vLLM's parser `name` on this tokenizer; imported when first needed.

    Raises ValueError at first use for a name vLLM does not know.
    """

    def __init__(self, name: str, tokenizer: Any) -> None:
        self._name, self._tokenizer = name, tokenizer

    @property
    def start(self) -> str:
        """What every call begins with, "" if the parser knows no such text: streams hold back from there on."""
        return str(getattr(compat.tool_parser(self._name), "tool_call_start_token", "") or "")

    def parse(self, text: str, tools: Sequence[Mapping[str, Any]]) -> tuple[str, list[dict[str, Any]]]:
        """(text that is no call, calls in OpenAI's form). What the parser cannot read stays text: nothing is lost."""
        request = compat.chat_request()(messages=[], model="", tools=[dict(tool) for tool in tools], tool_choice="auto")
        parser = compat.tool_parser(self._name)(self._tokenizer, request.tools)
        try:
            found = parser.extract_tool_calls(text, request)
        except Exception as err:  # some of vLLM's parsers let malformed text through as whatever it raised
            logger.info(
                "the %s parser could not read %d characters: %s: %s", self._name, len(text), type(err).__name__, err
            )
            return text, []
        if not found.tools_called:
            return text, []
        calls = [call.model_dump(include={"id", "type", "function"}) for call in found.tool_calls]
        return found.content or "", calls
