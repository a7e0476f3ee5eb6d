"""Which engine has seen how much of a prompt before, so that its prefix cache is met again.

A prompt is cut into blocks (64 characters of a text, 16 token ids); each block's key chains all before it and the
adapter's digest, as an engine's cache does. Per engine the most recently used keys are kept.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

CHARS, TOKENS = 64, 16
MAX_BLOCKS = 64
MAX_KEYS = 8192


def block_keys(prompt: str | Sequence[int], digest: str | None) -> list[int]:
    """One key per full block from the start, at most MAX_BLOCKS."""
    size = CHARS if isinstance(prompt, str) else TOKENS
    keys, key = [], hash(digest)
    for start in range(0, min(len(prompt), MAX_BLOCKS * size) - size + 1, size):
        piece = prompt[start : start + size]
        key = hash((key, piece if isinstance(piece, str) else tuple(piece)))
        keys.append(key)
    return keys


class PrefixMap:
    """The keys each engine has met."""

    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        self._max_keys = max_keys
        self._seen: dict[str, OrderedDict[int, None]] = {}

    def matched(self, engine: str, keys: Sequence[int]) -> int:
        """Leading blocks that the engine has met."""
        seen = self._seen.get(engine)
        count = 0
        for key in keys if seen else ():
            if key not in seen:  # type: ignore[operator]
                break
            count += 1
        return count

    def add(self, engine: str, keys: Sequence[int]) -> None:
        """These blocks went to the engine."""
        if not keys:
            return
        seen = self._seen.setdefault(engine, OrderedDict())
        for key in keys:
            seen[key] = None
            seen.move_to_end(key)
        while len(seen) > self._max_keys:
            seen.popitem(last=False)

    def forget(self, engine: str) -> None:
        """The engine is gone, and its cache with it."""
        self._seen.pop(engine, None)
