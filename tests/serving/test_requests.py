"""Malformed requests: each breaks one rule and gets the status, the field and the words it must get."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epilora.serving.openai_api import MAX_BODY_BYTES, ApiError, parse_chat, parse_completion, parse_json
from tests.serving.serving_parts import Parts, error, run

USER = [{"role": "user", "content": "hi"}]
PLAIN: dict[str, Any] = {"model": "tiny", "prompt": "hi"}
CHAT: dict[str, Any] = {"model": "tiny", "messages": USER}

BODIES: dict[str, tuple[bytes, int, str]] = {
    "empty": (b"", 400, "could not parse"),
    "half": (b'{"model": "tiny"', 400, "could not parse"),
    "list": (b"[1]", 400, "is a list, not an object"),
    "text": (b'"x"', 400, "is a str, not an object"),
    "null": (b"null", 400, "is a NoneType"),
    "utf8": (b'{"model": "\xff"}', 400, "could not parse"),
    "nan": (b'{"model": "tiny", "prompt": "x", "temperature": NaN}', 400, "NaN is not JSON"),
    "infinity": (b'{"model": "tiny", "prompt": "x", "top_p": -Infinity}', 400, "-Infinity is not JSON"),
    "deep": (b"[" * 100_000, 400, "could not parse"),
    "huge": (b" " * (MAX_BODY_BYTES + 1), 413, "at most"),
}

PLAIN_CASES: dict[str, tuple[dict[str, Any], str, str]] = {
    "no-model": ({"model": None}, "model", "1 to 512"),
    "model-number": ({"model": 3}, "model", "got 3"),
    "model-empty": ({"model": ""}, "model", "1 to 512"),
    "model-long": ({"model": "x" * 600}, "model", "1 to 512"),
    "prompt-none": ({"prompt": None}, "prompt", "not empty"),
    "prompt-empty": ({"prompt": ""}, "prompt", "empty text"),
    "prompt-empty-list": ({"prompt": []}, "prompt", "not empty"),
    "prompt-object": ({"prompt": {}}, "prompt", "must be a text"),
    "prompt-mixed": ({"prompt": ["a", 1]}, "prompt", "entry 1"),
    "prompt-negative": ({"prompt": [-1]}, "prompt", "neither a text nor"),
    "prompt-bools": ({"prompt": [True]}, "prompt", "entry True"),
    "prompt-float": ({"prompt": [1.5]}, "prompt", "entry 1.5"),
    "prompt-empty-ids": ({"prompt": [[]]}, "prompt", "entry []"),
    "prompt-huge-id": ({"prompt": [1 << 40]}, "prompt", "neither a text"),
    "prompt-surrogate": ({"prompt": "\ud800"}, "prompt", "surrogate"),
    "prompt-many": ({"prompt": ["a"] * 129}, "prompt", "at most 128"),
    "tokens-zero": ({"max_tokens": 0}, "max_tokens", "from 1 to"),
    "tokens-negative": ({"max_tokens": -5}, "max_tokens", "from 1 to"),
    "tokens-float": ({"max_tokens": 1.5}, "max_tokens", "whole number"),
    "tokens-text": ({"max_tokens": "5"}, "max_tokens", "whole number"),
    "tokens-bool": ({"max_tokens": True}, "max_tokens", "whole number"),
    "tokens-huge": ({"max_tokens": 1 << 60}, "max_tokens", "from 1 to"),
    "temperature-high": ({"temperature": 2.1}, "temperature", "at most 2"),
    "temperature-negative": ({"temperature": -0.1}, "temperature", "at least 0"),
    "temperature-text": ({"temperature": "hot"}, "temperature", "must be a number"),
    "temperature-huge": ({"temperature": 10**400}, "temperature", "at most 2"),
    "top-p-zero": ({"top_p": 0}, "top_p", "above 0"),
    "top-p-high": ({"top_p": 1.5}, "top_p", "at most 1"),
    "top-k": ({"top_k": -2}, "top_k", "from -1"),
    "n-zero": ({"n": 0}, "n", "from 1 to 128"),
    "n-high": ({"n": 129}, "n", "from 1 to 128"),
    "n-times-prompts": ({"n": 64, "prompt": ["a", "b", "c"]}, "n", "n times prompts is 192"),
    "seed-float": ({"seed": 1.0}, "seed", "whole number"),
    "seed-huge": ({"seed": 1 << 70}, "seed", "whole number"),
    "stop-number": ({"stop": 3}, "stop", "stop must be"),
    "stop-empty": ({"stop": [""]}, "stop", "none of them empty"),
    "stop-many": ({"stop": ["a"] * 17}, "stop", "up to 16"),
    "stop-nested": ({"stop": [["a"]]}, "stop", "stop must be"),
    "logprobs-bool": ({"logprobs": True}, "logprobs", "from 0 to 20"),
    "logprobs-high": ({"logprobs": 21}, "logprobs", "from 0 to 20"),
    "stream-text": ({"stream": "yes"}, "stream", "true or false"),
    "stream-options-alone": ({"stream_options": {}}, "stream_options", "only allowed with stream=true"),
    "stream-options-list": ({"stream": True, "stream_options": []}, "stream_options", "include_usage only"),
    "stream-options-odd": ({"stream": True, "stream_options": {"x": 1}}, "stream_options", "include_usage only"),
    "usage-text": ({"stream": True, "stream_options": {"include_usage": 1}}, "include_usage", "true or false"),
    "ignore-eos": ({"ignore_eos": 1}, "ignore_eos", "true or false"),
    "unknown": ({"temprature": 1}, "temprature", "unrecognized request argument"),
    "best-of": ({"best_of": 2}, "best_of", "not supported"),
    "echo": ({"echo": True}, "echo", "not supported"),
    "suffix": ({"suffix": "x"}, "suffix", "not supported"),
    "penalty": ({"presence_penalty": 1}, "presence_penalty", "not supported"),
    "logit-bias": ({"logit_bias": {"1": 5}}, "logit_bias", "not supported"),
    "format": ({"response_format": {"type": "json_object"}}, "response_format", "not supported"),
    "messages": ({"messages": USER}, "messages", "unrecognized request argument"),
}

CHAT_CASES: dict[str, tuple[dict[str, Any], str, str]] = {
    "none": ({"messages": None}, "messages", "at least one message"),
    "empty": ({"messages": []}, "messages", "at least one message"),
    "text": ({"messages": "hi"}, "messages", "must be a list"),
    "many": ({"messages": USER * 4097}, "messages", "at most 4096"),
    "not-object": ({"messages": ["hi"]}, "messages[0]", "is not an object"),
    "role": ({"messages": [{"role": "root", "content": "x"}]}, "messages[0].role", "allowed are system"),
    "role-missing": ({"messages": [{"content": "x"}]}, "messages[0].role", "role=None"),
    "role-list": ({"messages": [{"role": [], "content": "x"}]}, "messages[0].role", "allowed are"),
    "content-missing": ({"messages": [{"role": "user"}]}, "messages[0].content", "must be a text"),
    "content-number": ({"messages": [*USER, {"role": "user", "content": 3}]}, "messages[1].content", "must be a text"),
    "image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content",
        "part 'image_url' is not supported",
    ),
    "part-text": ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content", "only text parts"),
    "surrogate": ({"messages": [{"role": "user", "content": "\udfff"}]}, "messages[0].content", "surrogate"),
    "extra": ({"messages": [{**USER[0], "zap": 1}]}, "messages[0]", "unknown field 'zap'"),
    "name": ({"messages": [{**USER[0], "name": 1}]}, "messages[0].name", "must be a text"),
    "tool-calls": (
        {"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]},
        "messages[0].tool_calls",
        "without function.name",
    ),
    "tool-arguments": (
        {
            "messages": [
                {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
            ]
        },
        "messages[0].tool_calls",
        "are not JSON",
    ),
    "tools-text": ({"tools": "x"}, "tools", "must be a list"),
    "tools-shape": ({"tools": [{"type": "function"}]}, "tools", "tools[0] must be"),
    "tool-choice": ({"tool_choice": "required"}, "tool_choice", "allowed are none and auto"),
    "top-alone": ({"top_logprobs": 2}, "top_logprobs", "needs logprobs=true"),
    "top-high": ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "from 0 to 20"),
    "logprobs-number": ({"logprobs": 2}, "logprobs", "true or false"),
    "completion-tokens": ({"max_completion_tokens": 0}, "max_completion_tokens", "from 1 to"),
    "prompt": ({"prompt": "x"}, "prompt", "unrecognized request argument"),
}


@pytest.mark.parametrize("case", BODIES)
def test_bodies_that_are_no_json_objects(case: str, tmp_path: Path) -> None:
    body, status, words = BODIES[case]
    reply = run(Parts(tmp_path).ask("/v1/completions", body, method="POST"))
    assert reply.status == status
    assert words in error(reply)["message"]


@pytest.mark.parametrize(
    ("path", "case"),
    [*(("/v1/completions", case) for case in PLAIN_CASES), *(("/v1/chat/completions", case) for case in CHAT_CASES)],
)
def test_fields_that_break_a_rule(path: str, case: str, tmp_path: Path) -> None:
    chat = "chat" in path
    changes, param, words = (CHAT_CASES if chat else PLAIN_CASES)[case]
    parts = Parts(tmp_path)
    reply = run(parts.ask(path, {**(CHAT if chat else PLAIN), **changes}))
    assert reply.status == 400
    assert (error(reply)["param"], error(reply)["type"]) == (param, "invalid_request_error")
    assert words in error(reply)["message"]
    assert parts.engines[0].loads == []


def test_there_are_at_least_sixty_of_them() -> None:
    assert len(BODIES) + len(PLAIN_CASES) + len(CHAT_CASES) >= 60


def test_harmless_fields_and_nulls_are_taken() -> None:
    nulls = dict.fromkeys(("temperature", "top_p", "stop", "seed", "n", "stream", "logprobs", "user", "best_of"))
    call = parse_completion({**PLAIN, **nulls, "max_tokens": None, "metadata": {"a": "b"}, "presence_penalty": 0.0})
    assert (call.sampling.max_tokens, call.sampling.temperature, call.n, call.stream) == (16, 1.0, 1, False)
    assert parse_completion({**PLAIN, "prompt": [1, 2]}).prompts == ((1, 2),)
    assert parse_completion({**PLAIN, "prompt": [[1], [2, 3]]}).prompts == ((1,), (2, 3))
    assert parse_completion({**PLAIN, "stop": "x", "top_k": -1, "seed": -4}).sampling.stop == ("x",)
    chat = parse_chat({**CHAT, "messages": [{"role": "developer", "content": [{"type": "text", "text": "a"}] * 2}]})
    assert chat.messages == ({"role": "system", "content": "aa"},)
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    assert parse_chat({**CHAT, "tools": [tool]}).tools == (tool,)
    assert parse_chat({**CHAT, "tools": [tool], "tool_choice": "none"}).tools is None
    history = [{"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": '{"a": 1}'}}]}]
    assert parse_chat({**CHAT, "messages": history}).messages[0]["tool_calls"][0]["function"]["arguments"] == {"a": 1}


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
names = sorted({*PLAIN, *CHAT, *(key for cases in (PLAIN_CASES, CHAT_CASES) for c in cases.values() for key in c[0])})


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.sampled_from(names), values, max_size=4), st.booleans())
def test_any_field_values_parse_or_name_the_field(changes: dict[str, Any], chat: bool) -> None:
    parse, body = (parse_chat, CHAT) if chat else (parse_completion, PLAIN)
    try:
        call = parse({**body, **changes})
    except ApiError as err:
        assert err.status == 400  # noqa: PT017
        assert err.param  # noqa: PT017
    else:
        assert 1 <= call.n <= 128
        assert call.estimated_tokens > 0


@settings(max_examples=80, deadline=None)
@given(st.binary(max_size=40))
def test_any_bytes_are_an_object_or_a_400(body: bytes) -> None:
    try:
        data = parse_json(body)
    except ApiError as err:
        assert err.status == 400  # noqa: PT017
    else:
        assert isinstance(data, dict)
