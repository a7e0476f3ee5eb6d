"""`python -m benchmarks.formats layers|tune ...`: see those modules. (`python -m benchmarks.formats.quality` judges stored adapters.)"""

from __future__ import annotations

import sys

COMMANDS = ("layers", "tune")


def main() -> int:
    if len(sys.argv) < 2 or sys.argv[1] not in COMMANDS:
        print(f"usage: python -m benchmarks.formats {{{','.join(COMMANDS)}}} ...", file=sys.stderr)
        return 2
    from benchmarks.formats import layers, tune

    return {"layers": layers.run, "tune": tune.run}[sys.argv[1]](sys.argv[2:])


if __name__ == "__main__":
    raise SystemExit(main())
