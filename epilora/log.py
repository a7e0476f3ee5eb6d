"""The log formats of jobs and actors: lines for people, or one JSON object a line for machines (the router).

Importing this sets nothing up; jobs and actors call `setup` when they start. A record's `fields` (`extra={"fields": {...}}`)
are keys of its JSON object.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
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


class Together(logging.Handler):
    """Writes lines to stderr in bunches: at a warning, at WRITE_LINES of them, every WRITE_S and at the process's end.

    In a Ray worker each write to stderr is a system call of its own, which hundreds of requests a second would wait for.
    """

    WRITE_S, WRITE_LINES = 0.5, 500

    def __init__(self) -> None:
        super().__init__()
        self._lines: list[str] = []
        threading.Thread(target=self._write_now_and_then, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._lines.append(self.format(record) + "\n")
        except Exception:
            self.handleError(record)
            return
        if record.levelno >= logging.WARNING or len(self._lines) >= self.WRITE_LINES:
            self.flush()

    def flush(self) -> None:
        with self.lock:  # type: ignore[union-attr]  # made by logging.Handler
            lines, self._lines = self._lines, []
            if lines:
                sys.stderr.write("".join(lines))
                sys.stderr.flush()

    def _write_now_and_then(self) -> None:
        while True:
            time.sleep(self.WRITE_S)
            self.flush()


def setup(level: int = logging.INFO, *, json_lines: bool = False) -> None:
    """Send log lines to stderr. Called by jobs and actors, never by library code.

    json_lines: for machines; written in bunches (`Together`), so a killed process loses the last half second.
    """
    handler: logging.Handler = Together() if json_lines else logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if json_lines else logging.Formatter(FORMAT, datefmt="%H:%M:%S"))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for noisy in ("httpx", "httpcore", "urllib3", "matplotlib", "asyncio", "filelock"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
