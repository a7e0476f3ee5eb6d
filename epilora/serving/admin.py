"""What an operator does with adapters: import and load, unload, promote, roll back, collect, read the audit."""

from __future__ import annotations

import logging
from typing import Any

from epilora.errors import AdapterNotFound
from epilora.types import AdapterVersion

from . import openai_api as wire
from .catalog import Catalog
from .fleet import Fleet
from .messages import Reply, bounded, text_field
from .openai_api import ApiError
from .ports import EngineGone, StorePort
from .settings import CoreConfig
from .tenants import TenantConfig, TenantRegistry

logger = logging.getLogger(__name__)

GC_S = 60.0
MAX_NUMBER = (1 << 31) - 1  # of a version, and of versions to keep


class Administration:
    """Each method takes the admin who asks and a request body, and gives a reply."""

    def __init__(
        self, store: StorePort, fleet: Fleet, catalog: Catalog, registry: TenantRegistry, config: CoreConfig
    ) -> None:
        self._store, self._fleet, self._catalog, self._registry, self._config = store, fleet, catalog, registry, config

    async def _ask(self, method: str, *args: Any, seconds: float | None = None, **kwargs: Any) -> Any:
        limit = self._config.timeouts.control_s if seconds is None else seconds
        return await bounded(self._store.call(method, *args, **kwargs), f"store ({method})", limit)

    async def load(self, admin: TenantConfig, body: bytes) -> Reply:
        """vLLM's call: {"lora_name", "lora_path"}; also "owner".

        Imports a PEFT folder after preflight, loads and probes it, and only then points the name at it.
        """
        data = wire.parse_json(body)
        name, path = text_field(data, "lora_name"), text_field(data, "lora_path")
        owner = text_field(data, "owner", "")
        info = await self._fleet.any_info()
        if name in self._fleet.base_names(info):
            raise ApiError(400, f"{name!r} is the base's name; an adapter needs another", param="lora_name")
        tenant = self._registry.get(owner)
        version: AdapterVersion = await self._ask(
            "import_peft",
            path,
            name,
            owner=owner,
            quota=(tenant.max_adapters, tenant.max_adapter_bytes) if tenant else (0, 0),
            actor=admin.name,
            base_checkpoint=info.model_path,
            linear_modules=info.linear_modules,
            max_rank=info.max_lora_rank,
            base_model=info.model_name,
            base_digest=info.base_digest,
            import_roots=self._config.import_roots,
            promote=False,
            seconds=self._config.timeouts.load_s,
        )
        engine = await self._fleet.engine_with(version)
        receipt = engine.resident[version.digest]
        await self._ask("promote", version.name, version.version, owner=version.owner, actor=admin.name)
        text = (
            f"Success: LoRA adapter '{name}' added successfully as {version.ref}:"
            f" {receipt.modules} of {receipt.base_modules} modules covered."
        )
        headers = {"x-epilora-version": version.ref, "x-epilora-digest": version.digest}
        return Reply(200, text.encode(), headers, "text/plain; charset=utf-8")

    async def unload(self, admin: TenantConfig, body: bytes) -> Reply:
        """vLLM's call: {"lora_name"}. Forgets the name and frees its slots once no request uses them."""
        data = wire.parse_json(body)
        name, owner = text_field(data, "lora_name"), text_field(data, "owner", "")
        digests = await self._ask("delete", name, owner=owner or None, actor=admin.name)
        for digest in digests:
            if not await self._is_known(digest):
                await self._free(digest)
        text = f"Success: LoRA adapter '{name}' removed successfully."
        return Reply(200, text.encode(), content_type="text/plain; charset=utf-8")

    async def _is_known(self, digest: str) -> bool:
        """Does any name still have this content?"""
        try:
            await self._ask("resolve", digest)
        except AdapterNotFound:
            return False
        return True

    async def _free(self, digest: str) -> None:
        """Free the slots of a content that no name has any more, in whichever engine it lies."""
        for engine in self._fleet.engines.values():
            what, limit = f"engine {engine.port.name}", self._config.timeouts.control_s
            engine.resident.pop(digest, None)
            try:
                if digest in (await bounded(engine.port.stats(), what, limit)).loaded:
                    await bounded(engine.port.unload_adapter(digest), what, limit)
            except (AdapterNotFound, EngineGone) as err:
                logger.info("unload of %s from %s: %s", digest[:12], engine.port.name, err)

    async def drain(self, admin: TenantConfig, body: bytes) -> Reply:
        """{"engine", "drain": true | false}: no new requests for this engine; those in flight there end by themselves."""
        data = wire.parse_json(body)
        name, drain = text_field(data, "engine"), data.get("drain", True)
        if name not in self._fleet.engines:
            known = ", ".join(sorted(self._fleet.engines))
            raise ApiError(404, f"no engine {name!r}; there are {known}", code="engine_not_found", param="engine")
        if not isinstance(drain, bool):
            raise ApiError(400, "drain must be true or false", param="drain")
        (self._fleet.draining.add if drain else self._fleet.draining.discard)(name)
        action = "drain" if drain else "undrain"
        await self._ask("note", action, actor=admin.name, detail={"engine": name})
        stats = await bounded(self._fleet.engines[name].port.stats(), f"engine {name}", self._config.timeouts.control_s)
        return Reply(200, {"engine": name, "draining": drain, "running": stats.running, "waiting": stats.waiting})

    async def promote(self, admin: TenantConfig, body: bytes) -> Reply:
        """{"name", "version", "owner"}: point the name at that version."""
        data = wire.parse_json(body)
        number = data.get("version")
        if type(number) is not int or not 1 <= number <= MAX_NUMBER:
            raise ApiError(400, f"version must be a whole number from 1 to {MAX_NUMBER}", param="version")
        return await self._moved("promote", admin, data, number)

    async def rollback(self, admin: TenantConfig, body: bytes) -> Reply:
        """{"name", "owner"}: point the name at what it pointed at before."""
        return await self._moved("rollback", admin, wire.parse_json(body))

    async def _moved(self, method: str, admin: TenantConfig, data: dict[str, Any], *args: int) -> Reply:
        owner = text_field(data, "owner", "") or None
        version = await self._ask(method, text_field(data, "name"), *args, owner=owner, actor=admin.name)
        return Reply(200, self._catalog.entry(version, await self._fleet.any_info()))

    async def gc(self, admin: TenantConfig, body: bytes) -> Reply:
        """{"keep_latest"}: drop old versions."""
        data = wire.parse_json(body or b"{}")
        keep = data.get("keep_latest", 3)
        if type(keep) is not int or not 1 <= keep <= MAX_NUMBER:
            raise ApiError(400, f"keep_latest must be a whole number from 1 to {MAX_NUMBER}", param="keep_latest")
        removed = await self._ask("gc", keep, actor=admin.name, seconds=GC_S)
        return Reply(200, {"removed": removed})

    async def audit(self, after_id: int, limit: int) -> Reply:
        """Audit rows with an id above `after_id`."""
        rows = await self._ask("audit", after_id=after_id, limit=limit)
        return Reply(200, {"object": "list", "data": [vars(row) for row in rows]})
