"""What a request's `model` means.

    base                   the plain base
    adapter                the version the tenant's (or else the shared) name points at
    adapter@3              that version, whatever the name points at
    <digest>               that content (12 characters or more)
    base:adapter[@3]       the same as without `base:`

An adapter that cannot be found is never answered by the base. Pure functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from epilora.errors import AdapterNotFound

from .tenants import TenantConfig


@dataclass(frozen=True)
class ModelRef:
    """adapter: a reference for the store, None for the plain base. name: the adapter's bare name, "" if unknown."""

    adapter: str | None
    name: str = ""


def parse_model(model: str, base_names: Sequence[str]) -> ModelRef:
    """Split a request's model name. base_names: every name the base goes by. Raises AdapterNotFound for empty parts."""
    if model in base_names:
        return ModelRef(None)
    ref = model
    for base in sorted(base_names, key=len, reverse=True):
        if model.startswith(f"{base}:"):
            ref = model[len(base) + 1 :]
            break
    name = ref.partition("@")[0].rpartition("/")[2]
    if not ref or not name:
        raise AdapterNotFound(
            f"model {model!r} names no adapter; use a base name, adapter, adapter@version or base:adapter"
        )
    return ModelRef(ref, name)


def not_found(model: str, tenant: TenantConfig, base_names: Sequence[str], adapters: Iterable[str]) -> AdapterNotFound:
    """The error for an unknown model, listing what exists for this tenant and nothing else."""
    names = [*(base_names if tenant.base else ()), *sorted(name for name in adapters if tenant.may_use(name))]
    shown = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
    return AdapterNotFound(f"The model {model!r} does not exist. Models you can use: {shown or 'none'}")
