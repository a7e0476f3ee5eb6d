"""`epilora top`: the router's state in a terminal, drawn anew every two seconds until Ctrl-C.

    epilora top --url http://127.0.0.1:8001 --key ADMIN_KEY [--once]

The key may also come from the environment variable EPILORA_ADMIN_KEY, which other users of the machine cannot see.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import urllib.error
import urllib.request
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

KEY_VARIABLE = "EPILORA_ADMIN_KEY"
BARS = ".:-=+*#@"


class NoState(Exception):
    """The operators' port does not answer, or refuses; the message says which."""


def fetch(url: str, key: str, timeout_s: float = 10.0) -> dict[str, Any]:
    """The state document. Raises NoState."""
    request = urllib.request.Request(f"{url.rstrip('/')}/v1/state", headers={"Authorization": f"Bearer {key}"})
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as err:
        text = err.read().decode(errors="replace")
        raise NoState(f"{url} refuses ({err.code}): {text[:200]}") from err
    except (OSError, ValueError) as err:
        raise NoState(f"{url} does not answer: {err}; is it the operators' port (admin_port)?") from err


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def _curve(points: list[dict[str, Any]], field: str, width: int = 24) -> str:
    """The last values as a line of characters, and the newest as a number."""
    values = [point[field] for point in points if point.get(field) is not None][-width:]
    if not values:
        return "not recorded"
    low, high = min(values), max(values)
    span = high - low or 1.0
    return "".join(BARS[round((len(BARS) - 1) * (value - low) / span)] for value in values) + f" {values[-1]:.3g}"


def _table(title: str, columns: list[str], rows: list[list[str]]) -> Table:
    table = Table(title=title, title_justify="left", expand=True)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*row)
    return table


def render(state: dict[str, Any]) -> Group:
    """The state as tables: engines, tenants, RL jobs, store."""
    engines = [
        [
            engine["name"] + ("" if engine.get("up") else " DOWN") + (" draining" if engine.get("draining") else ""),
            f"{engine.get('slots_used', 0):.0f}",
            f"{engine.get('running', 0):.0f}",
            f"{engine.get('waiting', 0):.0f}",
            f"{100 * engine.get('kv_usage', 0):.1f} %",
            f"{engine.get('rollout_seats', 0):.0f}",
            f"{engine.get('seat_cuts', 0):.0f}",
        ]
        for engine in state["engines"]
    ]
    tenants = [
        [
            tenant["name"],
            f"{tenant['requests']:.0f}",
            f"{tenant['errors']:.0f}",
            f"{tenant['completion_tokens']:.0f}",
            _ms(tenant["ttft_ms_p50"]),
            _ms(tenant["ttft_ms_p99"]) + (f" of {_ms(tenant['p99_ttft_ms'])}" if tenant["p99_ttft_ms"] else ""),
            _ms(tenant["tpot_ms_p50"]),
            _ms(tenant["queue_ms_p99"]),
        ]
        for tenant in state["tenants"]
    ]
    jobs = [
        [job["name"], str(job["versions"]), _curve(job["points"], "reward"), _curve(job["points"], "mismatch")]
        for job in state["jobs"]
    ]
    store = [[what, f"{value:.0f}"] for what, value in sorted(state["store"].items())]
    return Group(
        f"{state['running']:.0f} requests running, {len(state['replicas'])} routers, {time.strftime('%H:%M:%S')}",
        _table("engines", ["engine", "slots", "running", "waiting", "KV", "rollout seats", "seat cuts"], engines),
        _table(
            "tenants (ms)",
            ["tenant", "requests", "errors", "tokens out", "TTFT p50", "TTFT p99", "per token", "queue p99"],
            tenants,
        ),
        _table("RL jobs", ["job", "versions", "reward", "mismatch"], jobs),
        _table("store", ["what", "value"], store),
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="epilora top", description="The router's state in a terminal.")
    parser.add_argument("--url", default="http://127.0.0.1:8001", help="the operators' port")
    parser.add_argument("--key", default=os.environ.get(KEY_VARIABLE, ""), help=f"admin key; else {KEY_VARIABLE}")
    parser.add_argument("--every", type=float, default=2.0, help="seconds between two looks")
    parser.add_argument("--once", action="store_true", help="print once and end")
    given = parser.parse_args(arguments)
    if not given.key:
        parser.error(f"no admin key: give --key or set {KEY_VARIABLE}")
    if given.every <= 0:
        parser.error(f"--every={given.every}: must be above 0")
    console = Console()
    try:
        state = fetch(given.url, given.key)
        if given.once:
            console.print(render(state))
            return 0
        with Live(render(state), console=console, auto_refresh=False) as live:
            while True:
                time.sleep(given.every)
                live.update(render(fetch(given.url, given.key)), refresh=True)
    except NoState as err:
        print(f"epilora top: {err}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0
