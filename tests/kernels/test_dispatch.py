"""Which implementation runs: by device and override, counted, never in silence."""

from __future__ import annotations

import logging

import pytest
import torch

from epilora.errors import UnsupportedKernel
from epilora.kernels import dispatch
from epilora.kernels.dispatch import Implementation, calls, choose, reset_calls, use_implementation

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def interpreter(monkeypatch):
    """Sets whether the interpreter counts as on, and starts from no calls and nothing told."""

    def set_to(on: bool) -> None:
        monkeypatch.setattr(dispatch, "interpreter_is_on", lambda: on)

    kept = dispatch._calls.copy()
    monkeypatch.setattr(dispatch, "_told", set())
    reset_calls()
    yield set_to
    dispatch._calls.clear()
    dispatch._calls.update(kept)


def test_the_device_decides_without_an_override(interpreter):
    interpreter(False)
    assert choose("k", GPU) is Implementation.TRITON
    with pytest.raises(UnsupportedKernel, match=r'k: tensors are on cpu.*implementation="reference"'):
        choose("k", CPU)
    interpreter(True)
    assert choose("k", CPU) is Implementation.INTERPRETER
    assert choose("k", GPU) is Implementation.INTERPRETER
    assert calls() == {"k:interpreter": 2, "k:triton": 1}


def test_an_override_is_obeyed_or_refused(interpreter):
    interpreter(False)
    assert choose("k", CPU, "reference") is Implementation.REFERENCE
    for asked in ("triton", "cuda"):
        with pytest.raises(UnsupportedKernel, match=f"implementation={asked} asked, but tensors are on cpu"):
            choose("k", CPU, asked)
    with pytest.raises(UnsupportedKernel, match="implementation=interpreter asked, but it is off"):
        choose("k", GPU, "interpreter")
    with pytest.raises(
        ValueError, match="implementation='fast' is unknown; allowed: triton, cuda, interpreter, reference"
    ):
        choose("k", GPU, "fast")
    assert calls() == {"k:reference": 1}, "a refused call was counted"


def test_a_block_sets_the_default_and_the_argument_beats_it(interpreter):
    interpreter(False)
    with use_implementation("reference"):
        assert choose("k", GPU) is Implementation.REFERENCE
        assert choose("k", GPU, "triton") is Implementation.TRITON
    assert choose("k", GPU) is Implementation.TRITON
    with pytest.raises(ValueError, match="quick"), use_implementation("quick"):
        pass


def test_anything_but_a_compiled_kernel_is_told_once_a_kernel(interpreter, caplog):
    interpreter(True)
    with caplog.at_level(logging.WARNING, logger="epilora.kernels.dispatch"):
        for _ in range(3):
            choose("k", CPU)
        choose("other", CPU, "reference")
    assert [r.getMessage() for r in caplog.records] == [
        "k runs as interpreter on cpu",
        "other runs as reference on cpu",
    ]
