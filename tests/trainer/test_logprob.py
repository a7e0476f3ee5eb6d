"""Chunked log-probabilities against log_softmax."""

from __future__ import annotations

import pytest
import torch

from epilora.trainer import logprob
from epilora.trainer.logprob import selected_logprobs


@pytest.mark.parametrize("chunk", [1, 4, 100])
@pytest.mark.parametrize("head_dtype", [torch.float32, torch.bfloat16])
def test_values_gradients_and_entropy(monkeypatch: pytest.MonkeyPatch, chunk: int, head_dtype: torch.dtype) -> None:
    monkeypatch.setattr(logprob, "HEAD_PIECE_BYTES", 200)  # converts 6 rows of the head at a time
    torch.manual_seed(0)
    hidden = torch.randn(7, 8).requires_grad_()
    head = torch.randn(19, 8).to(head_dtype)
    ids = torch.randint(19, (7, 3))
    ids[2] = 5  # the same id three times: gradients add up
    chosen, entropy = selected_logprobs(hidden, head, ids, chunk=chunk)
    weight = torch.randn(7, 3)
    (grad,) = torch.autograd.grad((chosen * weight).sum(), hidden)
    reference = hidden.detach().requires_grad_()
    logp = torch.log_softmax(reference @ head.float().t(), -1)
    (grad_reference,) = torch.autograd.grad((logp.gather(1, ids) * weight).sum(), reference)
    torch.testing.assert_close(chosen, logp.gather(1, ids))
    torch.testing.assert_close(entropy, -(logp.exp() * logp).sum(-1))
    torch.testing.assert_close(grad, grad_reference)
    assert not entropy.requires_grad


def test_no_tokens() -> None:
    chosen, entropy = selected_logprobs(torch.randn(0, 4), torch.randn(5, 4), torch.zeros(0, 1, dtype=torch.long))
    assert chosen.shape == (0, 1)
    assert entropy.shape == (0,)


def test_logits_of_one_chunk_stay_under_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprob, "LOGITS_CHUNK_BYTES", 4 * 19 * 3)
    assert [part.stop - part.start for part in logprob._chunks(8, 19, 2048)] == [3, 3, 2]
