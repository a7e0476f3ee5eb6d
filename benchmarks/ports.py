"""TCP ports of this machine that nobody listens on now; for benchmarks and tests."""

from __future__ import annotations

import contextlib
import socket


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """`count` different ones, free at `host` ("": at every address). Whoever wants them takes them soon: nothing holds them."""
    with contextlib.ExitStack() as held:
        probes = [held.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind((host, 0))
        return [int(probe.getsockname()[1]) for probe in probes]


def free_port(host: str = "127.0.0.1") -> int:
    """One."""
    return free_ports(1, host)[0]
