"""One log format for jobs and actors. Importing this sets nothing up; jobs and actors call `setup` when they start."""

from __future__ import annotations

import logging
import sys

FORMAT = "%(asctime)s %(levelname).1s %(name)s: %(message)s"


def setup(level: int = logging.INFO) -> None:
    """Send log lines to stderr. Called by jobs and actors, never by library code."""
    logging.basicConfig(format=FORMAT, datefmt="%H:%M:%S", level=level, stream=sys.stderr, force=True)
    for noisy in ("httpx", "httpcore", "urllib3", "matplotlib", "asyncio", "filelock"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
