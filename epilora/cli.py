"""The `epilora` command. Each sub-command is a module that is imported only when asked for.

    epilora top --url http://127.0.0.1:8001 --key KEY

A sub-command's module has `main(arguments: list[str]) -> int | None` and parses them itself.
"""

from __future__ import annotations

import sys
from importlib import import_module

COMMANDS: dict[str, tuple[str, str]] = {  # name -> (module, one line about it)
    "key": ("epilora.serving.keys", "issue an API key for a tenant of a running router"),
    "top": ("epilora.serving.top", "the running router in a terminal: engines, tenants, RL jobs"),
    "doctor": ("epilora.plugin.doctor", "which path each LoRA layer of a model takes, and why not a faster one"),
    "plan": ("jobs.plan", "what a configuration needs and which GPU types can run it"),
}


def usage() -> str:
    """The list of sub-commands."""
    width = max((len(name) for name in COMMANDS), default=0)
    rows = "\n".join(f"  {name:<{width}}  {about}" for name, (_, about) in sorted(COMMANDS.items()))
    return f"usage: epilora COMMAND [arguments]; epilora COMMAND --help\n\ncommands:\n{rows}"


def main(arguments: list[str] | None = None) -> int:
    """Run one sub-command; its exit status, 2 for one that does not exist."""
    given = sys.argv[1:] if arguments is None else arguments
    if not given or given[0] in ("-h", "--help"):
        print(usage())
        return 0
    if given[0] not in COMMANDS:
        allowed = ", ".join(sorted(COMMANDS))
        print(f"epilora: unknown command {given[0]!r}; allowed are {allowed}; see epilora --help", file=sys.stderr)
        return 2
    module, _ = COMMANDS[given[0]]
    return import_module(module).main(given[1:]) or 0


if __name__ == "__main__":
    raise SystemExit(main())
