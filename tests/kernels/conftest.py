"""Kernel tests run on CUDA where there is a GPU and in Triton's interpreter where there is none.

The interpreter is chosen when triton is imported, so it is set here, before any test module of this folder is imported.
bf16 dots are wrong in the interpreter: tests use fp16 there (`dtype` fixture).
"""

from __future__ import annotations

import os

import pytest
import torch

HAS_CUDA = torch.cuda.is_available()
if not HAS_CUDA:
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda", 0) if HAS_CUDA else torch.device("cpu")


@pytest.fixture(scope="session")
def dtype() -> torch.dtype:
    """16-bit type of activations and adapters that can be trusted on this machine."""
    return torch.bfloat16 if HAS_CUDA else torch.float16


@pytest.fixture(autouse=True)
def _full_precision_references():
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(0)


@pytest.fixture
def poisoned_empty(monkeypatch):
    """torch.empty gives NaN (0xFF bytes), so that an element nobody wrote shows. Returns nothing."""
    plain = torch.empty

    def empty(*size, **kwargs):
        out = plain(*size, **kwargs)
        if out.numel():
            (out.view(torch.uint8) if out.element_size() == 1 else out).fill_(
                255 if out.element_size() == 1 else float("nan")
            )
        return out

    monkeypatch.setattr(torch, "empty", empty)
