"""The program behind `make test`: its parts cover everything once, a failure is not lost, counts are what pytest says."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SPEC = importlib.util.spec_from_file_location("run_tests", ROOT / "scripts" / "run_tests.py")
assert SPEC is not None
assert SPEC.loader is not None
run_tests = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(run_tests)

SAMPLE = """
import pytest
def test_right(): pass
def test_wrong(): assert 1 == 2
@pytest.mark.skip
def test_left_out(): pass
@pytest.fixture
def broken(): raise OSError("no")
def test_never_ran(broken): pass
"""


def test_every_folder_is_in_exactly_one_part() -> None:
    named = [path for where in run_tests.PARTS.values() for path in where if not path.startswith("--")]
    ignored = [path.removeprefix("--ignore=") for path in run_tests.PARTS["rest"]]
    assert sorted(named) == sorted(ignored)  # what one part leaves out, the others name
    assert len(set(named)) == len(named)
    assert sorted(part for lane in run_tests.LANES for part in lane) == sorted(run_tests.PARTS)
    assert all((ROOT / path).is_dir() for path in named)


def test_a_part_gives_its_status_and_its_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "sample"
    folder.mkdir()
    (folder / "test_sample.py").write_text(SAMPLE)
    extra = ["-p", "no:cacheprovider", f"--rootdir={tmp_path}", "-c", "/dev/null"]
    status, seconds = run_tests.run_part("part", [str(folder)], "not slow", extra, tmp_path)
    assert status == 1
    assert seconds > 0
    assert "    part | " in capsys.readouterr().out
    (found,) = run_tests.counts(tmp_path / "part.xml").values()
    assert {key: found[key] for key in ("tests", "passed", "failure", "skipped", "error")} == {
        "tests": 4, "passed": 1, "failure": 1, "skipped": 1, "error": 1,
    }  # fmt: skip


@pytest.mark.parametrize(("statuses", "code"), [((0, 0, 0, 0, 0), 0), ((0, 1, 0, 0, 0), 1), ((0, 0, 0, 0, 5), 1)])
def test_one_failing_part_fails_the_whole(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, statuses: tuple[int, ...], code: int
) -> None:
    by_part = dict(zip(run_tests.PARTS, statuses, strict=True))
    asked = []

    def part(name: str, where: list[str], marks: str, extra: list[str], reports: Path) -> tuple[int, float]:
        asked.append((name, marks, extra))
        return by_part[name], 1.0

    monkeypatch.setattr(run_tests, "run_part", part)
    monkeypatch.setattr(run_tests, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["run_tests.py", "-k", "word"])
    with pytest.raises(SystemExit) as caught:
        run_tests.main()
    assert int(caught.value.code) == code
    assert sorted(asked) == sorted((name, "not slow and not gpu", ["-k", "word"]) for name in run_tests.PARTS)
    monkeypatch.setattr(sys, "argv", ["run_tests.py", "--slow", "--part", "kernels"])
    with pytest.raises(SystemExit) as caught:
        run_tests.main()
    assert int(caught.value.code) == 0
    assert asked[5:] == [("kernels", "not gpu", [])]
