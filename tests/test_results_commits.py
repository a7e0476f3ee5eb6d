"""Every commit that a committed results file names is in this checkout's history, so that what was measured can be had again."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted((ROOT / "benchmarks" / "results").glob("*.json"))


def commits(value: Any) -> Iterator[str]:
    """What stands under `commit`, however deep."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key == "commit" and isinstance(inner, str):
                yield inner
            else:
                yield from commits(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from commits(inner)


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_named_commits_are_in_the_history(path: Path) -> None:
    named = set(commits(json.loads(path.read_text())))
    assert named
    for commit in named:
        found = subprocess.run(
            ["git", "merge-base", "--is-ancestor", commit, "HEAD"], cwd=ROOT, capture_output=True, check=False
        )
        assert found.returncode == 0, (
            f"{path.name}: {commit} is not in the history of HEAD; measure on a commit that is"
        )
