"""Load, promote, roll back, collect, kill engines and generate from many clients at once: nothing mixes, nothing is lost."""

from __future__ import annotations

import pytest

from benchmarks.router_soak import flatness, run_soak, slope

ALLOWED = {"no_free_slot", "engine_unavailable"}


def check(row: dict) -> None:
    assert (
        row["mixed"] == 0
    )  # every answer carries the watermark of one version of the adapter that its tenant asked for
    assert row["lost"] == 0
    assert row["left_running"] == 0
    assert set(row["refusals"]) <= ALLOWED, row["refusals"]
    assert row["answers"] + row["streams"] > 10 * row["refused"]
    assert row["deaths"] >= 1


def test_a_short_hammer() -> None:
    check(run_soak(25.0))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_hammer_of_minutes() -> None:
    row = run_soak(240.0)
    check(row)
    assert row["deaths"] >= 10
    assert row["published"] >= 500


def test_the_slope_is_per_hour() -> None:
    assert slope([(0.0, 10.0), (1800.0, 12.0), (3600.0, 14.0)]) == pytest.approx(4.0)
    assert slope([]) == 0.0


def test_flat_is_the_last_quarter_against_the_second() -> None:
    def curve(last: float) -> list[tuple[float, float]]:
        return [(float(at), 50.0 if at < 25 else 100.0 if at < 75 else last) for at in range(100)]

    assert flatness(curve(101.0), 100.0) == {"second_quarter_mib": 100.0, "last_quarter_mib": 101.0, "flat": True}
    assert flatness(curve(101.1), 100.0)["flat"] is False
    assert flatness([(1.0, 10.0)], 100.0)["flat"] is False


@pytest.mark.parametrize(("text", "seen"), [("00000000:1 ", "mixed"), ("", "lost")])
def test_a_wrong_or_missing_word_is_seen(monkeypatch: pytest.MonkeyPatch, text: str, seen: str) -> None:
    """The check itself: an engine that answers with another adapter's words, or leaves one out at the end, is caught."""
    from tests.actors.fake_engine import PlainFakeEngine

    stream = PlainFakeEngine.stream

    async def spoilt(self: PlainFakeEngine, request):  # type: ignore[no-untyped-def]
        async for chunk in stream(self, request):
            spoil = chunk.completion_tokens == 2 if text else chunk.finish_reason is not None
            yield type(chunk)(**{**vars(chunk), "text": text if spoil else chunk.text})

    monkeypatch.setattr(PlainFakeEngine, "stream", spoilt)
    assert run_soak(2.0)[seen] > 0
