"""One vLLM import and one main engine for all tests here; a second engine in a process takes about a second."""

from __future__ import annotations

import asyncio
import os
import pathlib
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from epilora.plugin.engine import VllmEngine
from epilora.plugin.environment import prepare_environment

from .tiny import make_model

os.environ.setdefault("HF_HUB_OFFLINE", "1")
prepare_environment()


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return make_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="session")
def new_engine(model_path: pathlib.Path) -> Iterator[Callable[..., VllmEngine]]:
    """Make an engine; all are closed at the end."""
    made: list[VllmEngine] = []

    def make(**arguments: Any) -> VllmEngine:
        defaults = {"name": f"test{len(made)}", "model_path": str(model_path), "max_model_len": 256, "max_num_seqs": 32}
        defaults |= {"max_loras": 3, "kv_cache_bytes": 32 << 20}
        made.append(VllmEngine(**{**defaults, **arguments}))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.fixture(scope="session")
def main_engine(new_engine: Callable[..., VllmEngine]) -> VllmEngine:
    """float32, w8a16, three slots of rank 16."""
    return new_engine()


@pytest.fixture
def engine(main_engine: VllmEngine) -> Iterator[VllmEngine]:
    """The main engine, without adapters before and after."""
    yield main_engine

    async def clean() -> None:
        stats = main_engine.stats()
        for key in (*stats.loaded, *stats.drafts):
            await main_engine.unload_adapter(key)

    asyncio.run(clean())
    assert (main_engine.stats().loaded, main_engine.stats().drafts) == ((), ())


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(coroutine)
