"""Host calls per path since the process started. Replays of a captured graph are not calls."""

from __future__ import annotations

import collections

CALLS: collections.Counter[str] = collections.Counter()
