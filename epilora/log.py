"""The log formats of jobs and actors: lines for people, or one JSON object a line for machines (the router).

Importing this sets nothing up; jobs and actors call `setup` when they start. A record's `fields` (`extra={"fields": {...}}`)
are keys of its JSON object.
"""

from __future__ import annotations

import json
import logging
import sys
import time

FORMAT = "%(asctime)s %(levelname).1s %(name)s: %(message)s"


class JsonLines(logging.Formatter):
    """time (UTC, ms), level, logger, message, the record's fields, and the traceback if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{at}.{int(record.msecs):03}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def setup(level: int = logging.INFO, *, json_lines: bool = False) -> None:
    """Send log lines to stderr. Called by jobs and actors, never by library code."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if json_lines else logging.Formatter(FORMAT, datefmt="%H:%M:%S"))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for noisy in ("httpx", "httpcore", "urllib3", "matplotlib", "asyncio", "filelock"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
