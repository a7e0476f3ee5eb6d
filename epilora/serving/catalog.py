"""What a tenant can see and what its model names mean."""

from __future__ import annotations

from typing import Any

from epilora.errors import AdapterNotFound, BaseMismatch
from epilora.types import AdapterVersion, EngineInfo

from . import openai_api as wire
from .fleet import Fleet
from .messages import bounded
from .names import not_found, parse_model
from .ports import StorePort
from .settings import CoreConfig
from .tenants import TenantConfig


def sees(tenant: TenantConfig) -> str | None:
    """The store's `tenant` argument: whose names there are for this caller; None: everybody's."""
    return None if tenant.admin else tenant.name


class Catalog:
    """Names to versions, versions to entries of /v1/models."""

    def __init__(self, store: StorePort, fleet: Fleet, config: CoreConfig) -> None:
        self._store, self._fleet, self._control_s = store, fleet, config.timeouts.control_s

    async def models(self, tenant: TenantConfig, offset: int, limit: int) -> dict[str, Any]:
        """The base and what the tenant's and the shared names point at, one page."""
        info = await self._fleet.any_info()
        data = []
        if offset == 0 and tenant.base:
            data = [
                wire.model_entry(
                    name, 0, root=info.model_path, digest=info.base_digest, max_model_len=info.max_model_len
                )
                for name in self._fleet.base_names(info)
            ]
        page = await bounded(self._store.current(sees(tenant), offset, limit + 1), "store", self._control_s)
        data += [self.entry(version, info) for version in page[:limit] if tenant.may_use(version.name)]
        return {"object": "list", "data": data, "has_more": len(page) > limit}

    async def model(self, name: str, tenant: TenantConfig) -> dict[str, Any]:
        """The entry of one model name, with what its probe on this base showed (null before it was loaded once)."""
        info = await self._fleet.any_info()
        version = await self.resolve(name, tenant, info)
        if version is not None:
            probe = await bounded(
                self._store.call("probe", version.digest, info.base_digest), "store (probe)", self._control_s
            )
            return {**self.entry(version, info), "id": name, "probe": probe}
        return wire.model_entry(name, 0, root=info.model_path, digest=info.base_digest)

    async def versions(self, name: str, tenant: TenantConfig) -> dict[str, Any]:
        """All versions of a name, oldest first."""
        info = await self._fleet.any_info()
        if not tenant.may_use(name):
            raise await self._not_found(name, tenant, info)
        versions = await bounded(self._store.versions(name, sees(tenant)), "store", self._control_s)
        return {"object": "list", "data": [{**self.entry(v, info), "id": v.ref} for v in versions]}

    def entry(self, version: AdapterVersion, info: EngineInfo) -> dict[str, Any]:
        return wire.model_entry(
            version.name,
            int(version.created_s),
            parent=self._fleet.base_names(info)[0],
            root=version.ref,
            version=version.version,
            digest=version.digest,
            owner=version.owner,
            other_precision=bool(version.base_digest) and version.base_digest != info.base_digest,
        )

    async def resolve(self, model: str, tenant: TenantConfig, info: EngineInfo) -> AdapterVersion | None:
        """The version a model name means for this tenant (an accepted copy in its adapter_dtype, if there is one), None for the base.

        Raises AdapterNotFound, BaseMismatch.
        """
        ref = parse_model(model, self._fleet.base_names(info))
        if ref.adapter is None:
            if not tenant.base:
                raise await self._not_found(model, tenant, info)
            return None
        try:
            version = await bounded(self._store.resolve(ref.adapter, sees(tenant)), "store", self._control_s)
        except AdapterNotFound as err:
            if "@" in ref.adapter and "has no version" in str(err) and tenant.may_use(ref.name):
                raise
            raise await self._not_found(model, tenant, info) from err
        if not tenant.may_use(version.name):
            raise await self._not_found(model, tenant, info)
        if version.base_digest and version.base_digest != info.base_digest and not tenant.other_precision:
            raise BaseMismatch(
                f"{version.ref} was trained on base codes {version.base_digest[:12]}, this engine holds"
                f" {info.base_digest[:12]}; ask the operator to allow other_precision, or train it on this base"
            )
        if tenant.adapter_dtype == "bf16":
            return version
        asked = self._store.call("stored_as", version.digest, info.base_digest, tenant.adapter_dtype)
        return await bounded(asked, "store", self._control_s) or version

    async def _not_found(self, model: str, tenant: TenantConfig, info: EngineInfo) -> AdapterNotFound:
        names = await bounded(self._store.names(sees(tenant)), "store", self._control_s)
        return not_found(model, tenant, self._fleet.base_names(info), names)
