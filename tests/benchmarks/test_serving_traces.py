"""The committed traces come from their program, and have the arrivals, lengths and tenants they claim."""

from __future__ import annotations

import statistics

import numpy as np
import pytest

from benchmarks.serving import traces


@pytest.mark.parametrize("name", ["poisson", "wildchat"])
def test_committed_trace_is_what_the_program_makes(name, tmp_path, monkeypatch):
    committed = traces.path_of(name).read_bytes()
    monkeypatch.setattr(traces, "FOLDER", tmp_path)
    traces.write(name)
    assert traces.path_of(name).read_bytes() == committed


def test_poisson_gaps_are_exponential_and_scale_with_the_rate():
    rows = traces.read("poisson", rate=8, prompt_tokens=512)
    gaps = np.diff([row[0] for row in rows])
    assert len(rows) == 512
    assert np.mean(gaps) == pytest.approx(1 / 8, rel=0.1)
    assert np.std(gaps) / np.mean(gaps) == pytest.approx(1.0, abs=0.12)
    assert {row[1:3] for row in rows} == {(512, 128)}
    slow = traces.read("poisson", rate=2, prompt_tokens=512)
    assert slow[-1][0] == pytest.approx(4 * rows[-1][0])


def test_wildchat_is_bursty_and_has_the_stated_lengths():
    rows = traces.read("wildchat", rate=1)
    gaps = np.diff([row[0] for row in rows])
    assert np.std(gaps) / np.mean(gaps) == pytest.approx(2**0.5, abs=0.2)  # gamma of shape 0.5
    prompts, replies = [row[1] for row in rows], [row[2] for row in rows]
    assert statistics.median(prompts) == pytest.approx(23, rel=0.15)
    assert np.percentile(prompts, 90) == pytest.approx(247, rel=0.2)
    assert statistics.median(replies) == pytest.approx(253, rel=0.15)
    assert np.percentile(replies, 90) == pytest.approx(759, rel=0.15)
    assert max(prompts) <= 1024
    assert max(p + r for p, r in zip(prompts, replies, strict=True)) <= 2048


def test_tenants_follow_zipf():
    tenants = [row[3] for row in traces.make("wildchat")]
    assert set(tenants) <= set(range(1, 33))
    harmonic = sum(1 / k for k in range(1, 33))
    assert tenants.count(1) / len(tenants) == pytest.approx(1 / harmonic, abs=0.06)
    assert {row[3] for row in traces.read("poisson", rate=1, prompt_tokens=1, tenants=2)} == {1, 2}


def test_bad_requests_for_traces_are_refused():
    with pytest.raises(ValueError, match="must be positive"):
        traces.read("poisson", rate=0, prompt_tokens=8)
    with pytest.raises(ValueError, match="give prompt_tokens"):
        traces.read("poisson", rate=1)
    with pytest.raises(ValueError, match="there are poisson and wildchat"):
        traces.make("uniform")
