"""Timed dispatch with a stop-watch that is told what to say: which path is kept, where, and what is kept on disk."""

import dataclasses

import pytest
import torch

from epilora.errors import UnsupportedKernel
from epilora.plugin import gpu_ops, path_table
from epilora.plugin.gpu_ops import Mode, Path
from epilora.plugin.path_table import PathTable, Problem, prepare, time_paths, token_counts

from .test_paths_op import TORCH_GEMM, arguments, call_of, meta_of

KEY = (1, 2)


@pytest.fixture(autouse=True)
def fresh_table(monkeypatch, tmp_path):
    monkeypatch.setattr(path_table, "_table", PathTable())
    monkeypatch.setenv("EPILORA_CACHE", str(tmp_path))
    digest = path_table._sources_digest()
    monkeypatch.setattr(path_table, "_sources_digest", lambda: digest)  # a checkout may change while this runs


def problem():
    call = dataclasses.replace(call_of(arguments([0])), x=torch.empty(0, 32, dtype=torch.bfloat16))
    return Problem((call, call), Mode(TORCH_GEMM), lambda slots: meta_of(slots.tolist()))


def clock(us, seen=None):
    """A stop-watch: us[path] per projection; notes (path, tokens)."""

    def measure(calls, path, mode):
        if seen is not None:
            seen.append((path, calls[0].x.shape[0]))
        return us[path]

    return measure


def test_sizes_cover_both_ranges():
    assert token_counts(512, 8192) == ([1, 2, 4, 8, 16, 32, 64, 128, 256, 512], [1024, 2048, 4096, 8192])
    assert token_counts(24, 100) == ([1, 2, 4, 8, 16, 24], [32, 64, 100])
    assert token_counts(0, 8) == ([], [1, 2, 4, 8])
    assert token_counts(64, 64) == ([1, 2, 4, 8, 16, 32, 64], [])


def test_lookup_rounds_up_and_extends():
    table = PathTable({KEY: [(8, Path.DECODE), (64, Path.HYBRID), (512, Path.VENDOR)]})
    found = [table.lookup(KEY, M) for M in (1, 8, 9, 64, 65, 512, 100_000)]
    assert found == [Path.DECODE] * 2 + [Path.HYBRID] * 2 + [Path.VENDOR] * 3
    assert table.lookup((9, 9), 1) is None


def test_the_fastest_path_of_each_size_is_kept():
    graphs = {Path.DECODE: 5.0, Path.HYBRID: 7.0, Path.HYBRID_STREAMS: 6.0}
    host = {Path.HYBRID: 9.0, Path.HYBRID_STREAMS: 11.0}
    seen = []
    ours = problem()
    table = time_paths([ours], [4, 32, 64], [128], on_graph=clock(graphs, seen), on_host=clock(host, seen))
    assert table.choices[ours.key] == [
        (4, Path.DECODE), (32, Path.DECODE), (64, Path.HYBRID_STREAMS), (128, Path.HYBRID),
    ]  # fmt: skip
    assert (Path.HYBRID, 4) not in seen  # one open path: nothing to time
    assert {M for path, M in seen if path is Path.DECODE} == {32}
    assert table.times_us[ours.key][64] == {"hybrid_streams": [6.0, 6.0], "hybrid": [7.0, 7.0]}


def test_one_adapter_and_many_count_alike():
    us = iter([10.0, 4.0, 10.0, 30.0])  # one adapter: streams, hybrid; three: streams, hybrid
    ours = problem()
    table = time_paths([ours], [64], [], on_graph=lambda *_: next(us))
    assert table.choices[ours.key] == [(64, Path.HYBRID_STREAMS)]  # 100 against 120


def test_a_path_that_cannot_run_is_left_out(caplog):
    ours = problem()

    def measure(calls, path, mode):
        if path is Path.HYBRID_STREAMS:
            raise UnsupportedKernel("no streams today")
        return 9.0

    table = time_paths([ours], [64], [], on_graph=measure)
    assert table.choices[ours.key] == [(64, Path.HYBRID)]
    assert "hybrid_streams cannot run" in caplog.text
    assert "no streams today" in caplog.text

    def nothing_runs(calls, path, mode):
        raise ValueError("too large")

    with pytest.raises(UnsupportedKernel, match=r"no path runs .*64 tokens.*path=stock"):
        time_paths([ours], [64], [], on_graph=nothing_runs)


def test_a_spent_budget_leaves_the_default(caplog):
    ours = problem()
    table = time_paths([ours], [1, 2, 64], [], on_graph=clock({}), budget_s=-1.0)
    assert table.choices == {}
    assert "keep the default path" in caplog.text
    path_table.install(table)
    call = ours.at(64)[0]
    assert gpu_ops.path_of(call, ours.mode) is Path.HYBRID_STREAMS


def test_a_table_is_read_back_from_disk(monkeypatch, tmp_path):
    ours, timed = problem(), []
    monkeypatch.setattr(
        path_table, "time_paths", lambda *a: timed.append(a) or PathTable({ours.key: [(8, Path.HYBRID)]})
    )
    first = prepare([ours], [8], [], timed=True, share=lambda text: text)
    path_table._table = PathTable()
    second = prepare([ours], [8], [], timed=True, share=lambda text: text)
    assert (first["cached"], second["cached"], len(timed)) == (False, True, 1)
    assert path_table.lookup(ours.key, 3) is Path.HYBRID
    prepare([ours], [8, 16], [], timed=True, share=lambda text: text)  # other sizes are another table
    monkeypatch.setattr(torch, "__version__", "9.9")
    prepare([ours], [8], [], timed=True, share=lambda text: text)
    assert len(timed) == 3
    assert len(list(tmp_path.rglob("*.json"))) == 3


def test_every_rank_takes_the_first_ranks_table(monkeypatch):
    ours = problem()
    theirs = PathTable({ours.key: [(8, Path.HYBRID_STREAMS)]}).to_json()
    monkeypatch.setattr(path_table, "time_paths", lambda *a: PathTable({ours.key: [(8, Path.HYBRID)]}))
    prepare([ours], [8], [], timed=True, share=lambda text: theirs)
    assert path_table.lookup(ours.key, 8) is Path.HYBRID_STREAMS


def test_the_key_changes_with_what_the_times_depend_on(monkeypatch):
    ours = problem()
    key = path_table.cache_key([ours], [1], [])
    assert key == path_table.cache_key([ours], [1], [])
    other = dataclasses.replace(ours, mode=Mode(TORCH_GEMM, batch_invariant=1))
    monkeypatch.setenv("VLLM_TUNED_CONFIG_FOLDER", "/tuned")
    tuned = path_table.cache_key([ours], [1], [])
    monkeypatch.delenv("VLLM_TUNED_CONFIG_FOLDER")
    assert len({key, tuned, path_table.cache_key([other], [1], []), path_table.cache_key([ours], [1], [2])}) == 4
