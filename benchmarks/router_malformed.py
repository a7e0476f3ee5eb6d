"""Malformed adapters and requests, one row each: what rule it breaks, the answer it must get, the answer it got.

The cases are those of the tests; here each goes the whole way: an adapter through the store's import or its reader, a
request through the router's core.
"""

from __future__ import annotations

import asyncio
import re
import tempfile
from pathlib import Path
from typing import Any

from epilora.errors import AdapterRejected
from epilora.store.safetensors_io import read_tensors
from tests.serving.serving_parts import Parts
from tests.serving.test_requests import BODIES, CHAT, CHAT_CASES, PLAIN, PLAIN_CASES
from tests.store.adapters_for_tests import config, tensors
from tests.store.test_preflight import CONFIG_CASES, FILE_CASES, TENSOR_CASES, accept


def _refusal(check: Any, words: str) -> str:
    """`refused` if it was, with the reason it must name."""
    try:
        check()
    except AdapterRejected as err:
        return "refused" if re.search(words, str(err)) else f"refused for another reason: {err}"
    return "accepted"


def adapters() -> list[dict[str, Any]]:
    rows = []
    for name, (changes, words) in CONFIG_CASES.items():
        rows.append((f"config-{name}", words, lambda c=changes: accept(config(**c), tensors(1))))
    for name, (content, words) in TENSOR_CASES.items():
        rows.append((f"tensors-{name}", words, lambda c=content: accept(config(), c)))
    for name, (data, words) in FILE_CASES.items():
        rows.append((f"file-{name}", words, lambda d=data: read_tensors(d)))
    return [
        {"case": "malformed_adapters", "name": name, "rule": words, "wanted": "refused", "got": _refusal(check, words)}
        for name, words, check in rows
    ]


async def requests(folder: Path) -> list[dict[str, Any]]:
    parts = Parts(folder)
    wanted: list[tuple[str, str, Any, int, str | None, str]] = [
        (f"body-{name}", "/v1/completions", body, status, None, words) for name, (body, status, words) in BODIES.items()
    ]
    for path, base, cases in (("/v1/completions", PLAIN, PLAIN_CASES), ("/v1/chat/completions", CHAT, CHAT_CASES)):
        kind = path.split("/")[2]
        wanted += [(f"{kind}-{n}", path, {**base, **c}, 400, param, words) for n, (c, param, words) in cases.items()]
    rows = []
    for name, path, body, status, param, words in wanted:
        reply = await parts.ask(path, body, method="POST")
        assert isinstance(reply.body, dict), reply
        error = reply.body["error"]
        rows.append(
            {
                "case": "malformed_requests",
                "name": name,
                "rule": words,
                "wanted": [status, param, True],
                "got": [reply.status, error["param"], words in error["message"]],
            }
        )
    return rows


def rows() -> list[dict[str, Any]]:
    """All of them."""
    with tempfile.TemporaryDirectory() as folder:
        return [*adapters(), *asyncio.run(requests(Path(folder)))]
