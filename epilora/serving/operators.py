"""What operators see: one document with the state of everything, and the page that draws it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from epilora.types import AdapterVersion

from .fleet import Fleet
from .messages import bounded
from .ports import StorePort
from .reports import Family, quantile, total
from .tenants import TenantConfig, TenantRegistry

PAGE = Path(__file__).parent / "page"
PAGE_FILES = {"page.js": "text/javascript; charset=utf-8", "page.css": "text/css; charset=utf-8"}
PAGE_POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:"
MAX_SHOWN = 200  # adapters, and versions of a job
STORE_S = 10.0


def page_file(path: str) -> tuple[bytes, str]:
    """Content and type of a file of the page; "/" is the page itself."""
    name = path.removeprefix("/")
    if name in PAGE_FILES:
        return (PAGE / name).read_bytes(), PAGE_FILES[name]
    return (PAGE / "page.html").read_bytes(), "text/html; charset=utf-8"


async def describe(
    store: StorePort, fleet: Fleet, registry: TenantRegistry, replicas: Sequence[str], families: Sequence[Family]
) -> dict[str, Any]:
    """Engines with what is resident, tenants with their latencies, adapters, RL jobs with their curves, the store."""
    names = {family.name: family for family in families}
    versions = await bounded(store.current(None, 0, MAX_SHOWN), "store (current)", STORE_S)
    jobs = await _jobs(store)
    engines, resident = [], dict[str, list[str]]()
    for name, engine in fleet.engines.items():
        values = {
            dict(labels)["what"]: value
            for _, labels, value in names["epilora_engine"].samples
            if dict(labels)["engine"] == name
        }
        loaded: tuple[str, ...] = ()
        if values.get("up"):
            loaded = (await bounded(engine.port.stats(), f"engine {name}", STORE_S)).loaded
        for digest in loaded:
            resident.setdefault(digest, []).append(name)
        engines.append({"name": name, "resident": list(loaded), **values})
    return {
        "object": "state",
        "replicas": list(replicas),
        "engines": engines,
        "tenants": [_tenant(tenant, names, families) for tenant in registry.tenants()],
        "adapters": [_adapter(version, resident) for version in versions],
        "jobs": jobs,
        "store": {dict(labels)["what"]: value for _, labels, value in names["epilora_store"].samples},
        "running": total(families, "epilora_running_requests"),
    }


def _tenant(tenant: TenantConfig, names: dict[str, Family], families: Sequence[Family]) -> dict[str, Any]:
    def ms(family: str, q: float) -> float | None:
        value = quantile(names[family], q, tenant=tenant.name) if family in names else None
        return None if value is None or value == float("inf") else round(value * 1e3, 2)

    requests = total(families, "epilora_requests_total", tenant=tenant.name)
    good = total(families, "epilora_requests_total", tenant=tenant.name, status="200")
    return {
        "name": tenant.name,
        "weight": tenant.weight,
        "p99_ttft_ms": tenant.p99_ttft_ms,
        "requests_per_min": tenant.requests_per_min,
        "tokens_per_min": tenant.tokens_per_min,
        "concurrency": tenant.concurrency,
        "requests": requests,
        "errors": requests - good,
        "prompt_tokens": total(families, "epilora_tokens_total", tenant=tenant.name, kind="prompt"),
        "completion_tokens": total(families, "epilora_tokens_total", tenant=tenant.name, kind="completion"),
        "ttft_ms_p50": ms("epilora_ttft_seconds", 0.5),
        "ttft_ms_p99": ms("epilora_ttft_seconds", 0.99),
        "tpot_ms_p50": ms("epilora_time_per_token_seconds", 0.5),
        "queue_ms_p99": ms("epilora_queue_seconds", 0.99),
    }


def _adapter(version: AdapterVersion, resident: dict[str, list[str]]) -> dict[str, Any]:
    return {
        "owner": version.owner,
        "name": version.name,
        "version": version.version,
        "digest": version.digest,
        "rank": version.spec.rank,
        "created_s": version.created_s,
        "engines": resident.get(version.digest, []),
    }


async def _jobs(store: StorePort) -> list[dict[str, Any]]:
    """RL jobs by what they published: per version the step, the rewards' mean and the mismatch, where recorded."""
    jobs = []
    for owned in await bounded(store.names(None), "store (names)", STORE_S):
        owner, _, name = owned.rpartition("/")
        if not owner.startswith("job:"):
            continue
        versions = await bounded(store.versions(owned, None), "store (versions)", STORE_S)
        points = [
            {
                "version": version.version,
                "step": version.metadata.get("step"),
                "reward": version.metadata.get("reward"),
                "mismatch": version.metadata.get("mismatch"),
            }
            for version in versions[-MAX_SHOWN:]
        ]
        jobs.append({"owner": owner, "name": name, "versions": len(versions), "points": points})
    return jobs
