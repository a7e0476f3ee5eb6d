"""An admitted request and what it holds."""

from __future__ import annotations

from dataclasses import dataclass, field

from epilora.types import AdapterVersion, GenerateRequest

from .fleet import FleetEngine
from .gate import Turn
from .limits import AnyLease
from .openai_api import Call, Identity
from .tenants import TenantConfig
from .tool_calls import ToolCallStream


@dataclass
class Ticket:
    """What an admitted request holds until it ends: its limits and, once it is its turn, a place at the engines.

    queued_s: how long it waited for that. request_id: the HTTP request's, for the log.
    """

    lease: AnyLease
    request_id: str = ""
    turn: Turn | None = None
    open: bool = True
    queued_s: float = 0.0


@dataclass
class Job:
    """One admitted request on its way. first_s, last_s: when tokens came, in seconds after `started_s`."""

    tenant: TenantConfig
    call: Call
    identity: Identity
    version: AdapterVersion | None
    ticket: Ticket
    engine: FleetEngine
    requests: list[GenerateRequest]
    started_s: float
    first_s: float | None = None
    last_s: float | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    broken: bool = False  # a stream that ended with an error event
    unfinished: dict[str, FleetEngine] = field(default_factory=dict)  # engine request id -> where it runs
    tool_start: str = ""  # what tool calls begin with, where the request has tools
    tool_streams: dict[int, ToolCallStream] = field(default_factory=dict)

    @property
    def adapter_name(self) -> str:
        return self.version.name if self.version else "base"
