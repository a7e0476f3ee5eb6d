"""The router's settings."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Timeouts:
    """Bounds on every wait, in seconds. slot_s: for an adapter slot to become free; queue_s: for a turn; revival_s: for an engine
    to come back, or up, while none is there.
    """

    first_token_s: float = 120.0
    next_token_s: float = 60.0
    request_s: float = 600.0
    load_s: float = 60.0
    control_s: float = 15.0
    slot_s: float = 2.0
    queue_s: float = 60.0
    revival_s: float = 60.0


@dataclass(frozen=True)
class CoreConfig:
    """base_names: further names of the base beside the engine's own. max_running: requests in the router before 429.

    max_active: requests the engines work on at once; beyond it tenants take turns by virtual token counters, except that a
    quarter more may enter of tenants that have less than their share running.
    max_queue: waiting requests per tenant before 429.

    import_roots: folders /v1/load_lora_adapter may read from; empty: any (the caller holds an admin key).
    """

    base_names: tuple[str, ...] = ()
    max_running: int = 4096
    max_active: int = 256
    max_queue: int = 1024
    import_roots: tuple[str, ...] = ()
    timeouts: Timeouts = field(default_factory=Timeouts)
