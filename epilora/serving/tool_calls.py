"""Tool calls in a stream: text that cannot be part of a call passes at once, the rest waits for the engine's parser."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class ToolCallStream:
    """start: what calls begin with; "": unknown, so everything may be part of one."""

    start: str
    _held: str = ""

    def push(self, text: str) -> str:
        """The part of everything pushed so far that may be sent now."""
        self._held += text
        start = self.start
        if start in self._held:
            cut = self._held.index(start)
        else:
            partial = (n for n in range(len(start) - 1, 0, -1) if self._held.endswith(start[:n]))
            cut = len(self._held) - next(partial, 0)
        ready, self._held = self._held[:cut], self._held[cut:]
        return ready

    def finish(self) -> str:
        """What was held back, at the end of the stream."""
        held, self._held = self._held, ""
        return held
