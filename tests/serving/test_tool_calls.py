"""Tool calls: found whole or in pieces, and nothing a model says is lost."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from epilora.serving.ports import EngineGone
from epilora.serving.tool_calls import ToolCallStream
from epilora.types import GenerateRequest, TokenChunk
from tests.actors.fake_engine import PlainFakeEngine
from tests.serving.serving_parts import Parts, events, run

ONE = '<tool_call>\n{"name": "f", "arguments": {"a": "\u00fc"}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]


def names(calls: list[dict[str, Any]]) -> list[str]:
    return [call["function"]["name"] for call in calls]


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_streams_hold_back_only_what_may_be_a_call(size: int) -> None:
    whole, stream, sent = f"a < b and <tool> {ONE}", ToolCallStream("<tool_call>"), []
    for start in range(0, len(whole), size):
        sent.append(stream.push(whole[start : start + size]))
    assert "".join(sent) == "a < b and <tool> "
    assert stream.finish() == ONE
    stream = ToolCallStream("<tool_call>")
    assert [stream.push("x <too"), stream.push("l bench")] == ["x ", "<tool bench"]
    assert stream.finish() == ""


def test_a_parser_without_a_known_beginning_holds_everything_back() -> None:
    stream = ToolCallStream("")
    assert [stream.push("[f("), stream.push("a=1)]")] == ["", ""]
    assert stream.finish() == "[f(a=1)]"


class Caller(PlainFakeEngine):
    """Answers a chat with a sentence and a call, a few characters at a time."""

    async def stream(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        text = f"Hm. {ONE}"
        for start in range(0, len(text), 5):
            last = start + 5 >= len(text)
            yield TokenChunk(request.request_id, (1,), text[start : start + 5], (0.0,), "stop" if last else None, 3)
            await asyncio.sleep(0)


@pytest.mark.parametrize("with_tools", [True, False])
def test_chat_answers_with_calls_only_if_tools_were_given(with_tools: bool, tmp_path: Path) -> None:
    async def scenario() -> None:
        parts = Parts(tmp_path, engines=[Caller()])
        body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 30}
        body |= {"tools": TOOLS} if with_tools else {}
        choice = (await parts.ask("/v1/chat/completions", body)).body["choices"][0]  # type: ignore[call-overload,index]
        seen = await events(await parts.ask("/v1/chat/completions", {**body, "stream": True}))
        deltas = [event["choices"][0]["delta"] for event in seen]
        streamed = "".join(delta.get("content") or "" for delta in deltas)
        finish = seen[-1]["choices"][0]["finish_reason"]
        if not with_tools:
            assert (choice["message"]["content"], choice["finish_reason"]) == (f"Hm. {ONE}", "stop")
            assert (streamed, finish) == (f"Hm. {ONE}", "stop")
            return
        assert (choice["message"]["content"], choice["finish_reason"]) == ("Hm.", "tool_calls")
        assert names(choice["message"]["tool_calls"]) == ["f"]
        assert (streamed, finish) == ("Hm. ", "tool_calls")
        calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
        assert [(call["index"], call["function"]["name"]) for call in calls] == [(0, "f")]

    run(scenario())


def test_an_engine_that_dies_before_it_parsed_ends_the_stream_with_an_error_event(tmp_path: Path) -> None:
    class Dies(Caller):
        async def parse_tools(self, text: str, tools: Any) -> Any:
            raise EngineGone("died")

    async def scenario() -> None:
        parts = Parts(tmp_path, engines=[Dies()])
        body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 30, "tools": TOOLS}
        seen = await events(await parts.ask("/v1/chat/completions", {**body, "stream": True}))
        assert seen[-1]["error"]["code"] == "engine_unavailable"
        assert parts.core.completions.running == 0

    run(scenario())
