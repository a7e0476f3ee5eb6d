"""A core over in-process parts: a real store in a folder and stand-in engines."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from epilora.serving.core import ServingCore
from epilora.serving.messages import EventStream, Reply, Request
from epilora.serving.settings import CoreConfig, Timeouts
from epilora.serving.tenants import TenantConfig, TenantRegistry, hash_key
from epilora.store import AdapterStore
from epilora.store.sources import resolve_source
from epilora.types import AdapterSpec, AdapterVersion
from tests.actors.fake_engine import BASE_DIGEST, PlainFakeEngine

SPEC = AdapterSpec(2, 4.0, ("q_proj",))
SALT = "ab" * 8


class LocalStore:
    """`StorePort` over an AdapterStore in this process. hang: never answer."""

    def __init__(self, store: AdapterStore) -> None:
        self.store, self.hang = store, False

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        if self.hang:
            await asyncio.Event().wait()
        if method == "import_peft":  # as the actor does: sources inside the roots, no shapes of a base without files
            source = resolve_source(str(args[0]), kwargs.pop("import_roots", ()))
            kwargs = {key: value for key, value in kwargs.items() if key not in ("base_checkpoint", "linear_modules")}
            return self.store.import_peft(source, *args[1:], **kwargs)[0]
        return getattr(self.store, method)(*args, **kwargs)

    async def resolve(self, ref: str, tenant: str | None) -> AdapterVersion:
        return await self.call("resolve", ref, tenant=tenant)

    async def names(self, tenant: str | None) -> list[str]:
        return await self.call("names", tenant=tenant)

    async def current(self, tenant: str | None, offset: int, limit: int) -> list[AdapterVersion]:
        return await self.call("current", tenant=tenant, offset=offset, limit=limit)

    async def versions(self, name: str, tenant: str | None) -> list[AdapterVersion]:
        return await self.call("versions", name, tenant=tenant)

    def tensors(self, digest: str) -> Any:
        return self.store.tensors(digest)


class Parts:
    """core, store, engines and short-hands to ask. keys: `<tenant>-key`."""

    def __init__(
        self,
        root: Path,
        *,
        engines: Sequence[PlainFakeEngine] | None = None,
        tenants: Sequence[TenantConfig] = (),
        clock: Callable[[], float] | None = None,
        **config: Any,
    ) -> None:
        self.store = LocalStore(AdapterStore(root))
        self.engines = list(engines) if engines is not None else [PlainFakeEngine()]
        tenants = tenants or (TenantConfig("acme"), TenantConfig("bolt"))
        keyed = [TenantConfig(**{**vars(t), "key_hashes": (hash_key(f"{t.name}-key", salt=SALT),)}) for t in tenants]
        admin = TenantConfig("admin", (hash_key("admin-key", salt=SALT),), admin=True, other_precision=True)
        config.setdefault(
            "timeouts",
            Timeouts(control_s=0.5, first_token_s=0.5, next_token_s=0.5, request_s=0.5, slot_s=0.1, revival_s=0.1),
        )
        self.core = ServingCore(
            self.engines,
            self.store,
            TenantRegistry(keyed),
            admin_registry=TenantRegistry([admin]),
            config=CoreConfig(**config),
            **({"clock": clock} if clock else {}),
        )

    def publish(self, name: str, seed: int, owner: str = "", base_digest: str = BASE_DIGEST) -> AdapterVersion:
        rng = np.random.default_rng(seed)
        tensors = {
            "base_model.model.m.q_proj.lora_A.weight": rng.normal(size=(2, 8)).astype(np.float32),
            "base_model.model.m.q_proj.lora_B.weight": rng.normal(size=(8, 2)).astype(np.float32),
        }
        return self.store.store.publish(name, SPEC, tensors, base_model="tiny", base_digest=base_digest, owner=owner)

    async def ask(
        self,
        path: str,
        body: Any = None,
        *,
        key: str = "acme-key",
        method: str = "",
        query: dict[str, str] | None = None,
    ) -> Reply:
        method = method or ("GET" if body is None else "POST")
        data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return await self.core.handle(Request(method, path, headers, data, query or {}))

    async def complete(self, key: str = "acme-key", **fields: Any) -> Reply:
        return await self.ask("/v1/completions", {"model": "tiny", "prompt": "hi", "max_tokens": 2, **fields}, key=key)


def error(reply: Reply) -> dict[str, Any]:
    assert isinstance(reply.body, dict), reply
    assert set(reply.body["error"]) == {"message", "type", "param", "code"}
    assert reply.body["error"]["message"]
    return reply.body["error"]


async def events(reply: Reply) -> list[dict[str, Any]]:
    """All events of a stream but [DONE], which must be last unless an error is."""
    assert isinstance(reply.body, EventStream), reply
    chunks = [chunk async for chunk in reply.body]
    await reply.body.aclose()
    out = [json.loads(chunk.removeprefix(b"data: ")) for chunk in chunks if chunk != b"data: [DONE]\n\n"]
    assert (chunks[-1] == b"data: [DONE]\n\n") != ("error" in out[-1])
    return out


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, 30))
