"""Durable adapter versions: SQLite for names and versions, immutable safetensors files for content. No torch."""

from .digest import adapter_digest
from .preflight import PreflightReport, preflight
from .records import AuditRow, StoreStats
from .store import AdapterStore

__all__ = ["AdapterStore", "AuditRow", "PreflightReport", "StoreStats", "adapter_digest", "preflight"]
