"""Hand-worked numbers for every objective and correction."""

from __future__ import annotations

import math

import pytest
import torch

from epilora.trainer.loss import (
    LossConfig,
    aggregation_weights,
    centering_coefficients,
    centering_loss,
    correction_weights,
    k3,
    mismatch_metrics,
    sequence_mean,
    surrogate,
)

# Two sequences of 2 and 1 tokens; ratios p / p_old of 2, 1/2 and 1; advantages 1 for the first, -1 for the second.
SEQUENCE = torch.tensor([0, 0, 1])
LENGTHS = torch.tensor([2, 1])
OLD = torch.log(torch.tensor([0.25, 0.5, 0.5]))
NEW = torch.log(torch.tensor([0.5, 0.25, 0.5]))
ADVANTAGE = torch.tensor([1.0, 1.0, -1.0])


def _surrogate(
    name: str, advantage: torch.Tensor = ADVANTAGE, **options: float
) -> tuple[list[float], list[bool], list[float]]:
    logp = NEW.clone().requires_grad_()
    config = LossConfig(name=name, **options)
    loss, clipped = surrogate(config, logp, OLD, advantage, sequence_T=SEQUENCE, lengths_S=LENGTHS)
    (grad,) = torch.autograd.grad(loss.sum(), logp)
    return loss.tolist(), clipped.tolist(), grad.tolist()


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo"])
def test_clipped_ratio(name: str) -> None:
    loss, clipped, grad = _surrogate(name)
    # min(2, 1.2) = 1.2 clipped; min(0.5, 0.8) = 0.5 free, gradient -r A; -min(-1, -1) = 1, gradient -r A = 1.
    assert loss == pytest.approx([-1.2, -0.5, 1.0])
    assert clipped == [True, False, False]
    assert grad == pytest.approx([0.0, -0.5, 1.0])


def test_negative_advantage_is_clipped_below() -> None:
    loss, clipped, grad = _surrogate("grpo", -ADVANTAGE)
    # A = -1: min(-2, -1.2) = -2 free; min(-0.5, -0.8) = -0.8 clipped.
    assert loss == pytest.approx([2.0, 0.8, -1.0])
    assert clipped == [False, True, False]
    assert grad == pytest.approx([2.0, 0.0, -1.0])


def test_clip_higher() -> None:
    loss, clipped, _ = _surrogate("dapo", clip_high=1.5)
    assert loss == pytest.approx([-2.0, -0.5, 1.0])
    assert clipped == [False, False, False]


def test_gspo_uses_the_sequences_geometric_mean() -> None:
    # Sequence 0: mean of log 2 and log 1/2 is 0, ratio 1 for both tokens; each gets half of the gradient of both terms.
    loss, clipped, grad = _surrogate("gspo", clip_low=0.1, clip_high=0.1)
    assert loss == pytest.approx([-1.0, -1.0, 1.0])
    assert clipped == [False, False, False]
    assert grad == pytest.approx([-1.0, -1.0, 1.0])


def test_cispo_keeps_the_gradient_of_clipped_tokens() -> None:
    loss, clipped, grad = _surrogate("cispo")
    # weights 1.2, 0.8, 1 times -A log p; the gradient is minus weight times advantage.
    assert loss == pytest.approx([-1.2 * math.log(0.5), -0.8 * math.log(0.25), math.log(0.5)])
    assert clipped == [True, True, False]
    assert grad == pytest.approx([-1.2, -0.8, 1.0])


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("grpo", {}, [1 / 4, 1 / 4, 1 / 2]),
        ("gspo", {}, [1 / 4, 1 / 4, 1 / 2]),
        ("dapo", {}, [1 / 3, 1 / 3, 1 / 3]),
        ("cispo", {}, [1 / 3, 1 / 3, 1 / 3]),
        ("dr_grpo", {}, [1 / 4, 1 / 4, 1 / 4]),  # 2 sequences, longest 2
        ("dr_grpo", {"max_tokens": 8}, [1 / 16, 1 / 16, 1 / 16]),
    ],
)
def test_aggregation(name: str, options: dict, expected: list[float]) -> None:
    weights = aggregation_weights(LossConfig(name=name, **options), SEQUENCE, LENGTHS)
    assert weights.tolist() == pytest.approx(expected)


# Trainer over sampler: ratios 4, 1/4 (sequence 0, product 1) and 3 (sequence 1).
TRAINER = torch.log(torch.tensor([0.8, 0.1, 0.6]))
SAMPLER = torch.log(torch.tensor([0.2, 0.4, 0.2]))


@pytest.mark.parametrize(
    ("kind", "weight", "masked", "truncated"),
    [
        ("none", [1.0, 1.0, 1.0], [False] * 3, [False] * 3),
        ("tis_token", [2.0, 0.25, 2.0], [False] * 3, [True, False, True]),
        ("tis_sequence", [1.0, 1.0, 2.0], [False] * 3, [False, False, True]),
        ("mask_token", [0.0, 0.0, 0.0], [True] * 3, [False] * 3),
        ("mask_sequence", [1.0, 1.0, 0.0], [False, False, True], [False] * 3),
    ],
)
def test_corrections(kind: str, weight: list[float], masked: list[bool], truncated: list[bool]) -> None:
    found = correction_weights(LossConfig(correction=kind), TRAINER, SAMPLER, SEQUENCE, LENGTHS)
    assert found.weight.tolist() == pytest.approx(weight)
    assert found.masked.tolist() == masked
    assert found.truncated.tolist() == truncated


def test_sequence_importance_weight_is_a_product() -> None:
    # ratios 1.5 and 1.2: the sequence's weight is 1.8, under the cap of 2.
    trainer = torch.log(torch.tensor([0.3, 0.6]))
    sampler = torch.log(torch.tensor([0.2, 0.5]))
    found = correction_weights(
        LossConfig(correction="tis_sequence"), trainer, sampler, torch.tensor([0, 0]), torch.tensor([2])
    )
    assert found.weight.tolist() == pytest.approx([1.8, 1.8])


def test_score_centering_with_the_whole_vocabulary_is_exact() -> None:
    # p = (0.6, 0.4), q = (0.5, 0.5): the sampler's mean score in logits is q - p = (-0.1, 0.1).
    logits = torch.log(torch.tensor([[0.6, 0.4]])).requires_grad_()
    sampler = torch.log(torch.tensor([[0.5, 0.5]]))
    config = LossConfig(correction="score_centering")
    loss = centering_loss(config, torch.log_softmax(logits, -1), sampler, torch.tensor([1.0]))
    (grad,) = torch.autograd.grad(loss.sum(), logits)
    assert grad[0].tolist() == pytest.approx([-0.1, 0.1], abs=1e-6)


@pytest.mark.parametrize("weighting", ["none", "tis_token"])
def test_the_centred_score_has_mean_zero_under_the_sampler(weighting: str) -> None:
    """E_q[w s - mu] = 0, which is what score centering promises, whatever the sampled token."""
    torch.manual_seed(0)
    logits = torch.randn(1, 6).double().requires_grad_()
    q = torch.softmax(torch.randn(6).double(), -1)
    config = LossConfig(correction="score_centering", centering_weight=weighting, tis_cap=1.2)
    total = torch.zeros(6).double()
    for token in range(6):
        logp = torch.log_softmax(logits, -1)
        ratio = (logp[0, token].exp() / q[token]).detach()
        weight = ratio.clamp(max=1.2) if weighting == "tis_token" else torch.ones_like(ratio)
        loss = -weight * logp[0, token] + centering_loss(config, logp, q.log()[None], torch.ones(1).double()).sum()
        (grad,) = torch.autograd.grad(loss, logits)
        total += q[token] * grad[0]
    assert total.abs().max() < 1e-6


def test_score_centering_from_the_likeliest_tokens() -> None:
    # p = (0.5, 0.3, 0.2), q = (0.6, 0.2, 0.2), head {0, 1}: alpha = 0.2 / 0.2 = 1, so c = q - p on the head.
    trainer = torch.log(torch.tensor([[0.5, 0.3]]))
    sampler = torch.log(torch.tensor([[0.6, 0.2]]))
    coefficients = centering_coefficients(LossConfig(correction="score_centering"), trainer, sampler)
    assert coefficients[0].tolist() == pytest.approx([0.1, -0.1], abs=1e-6)
    # alpha = 0.1 / 0.2 = 1/2: c = q - p / 2.
    sampler = torch.log(torch.tensor([[0.6, 0.3]]))
    coefficients = centering_coefficients(LossConfig(correction="score_centering"), trainer, sampler)
    assert coefficients[0].tolist() == pytest.approx([0.35, 0.15], abs=1e-6)
    # With truncated weights f(x) = min(x, 1.2): f(5/6) = 5/6, f(1) = 1, f(2) = 1.2: c = q f - 1/2 * 1.2 p.
    config = LossConfig(correction="score_centering", centering_weight="tis_token", tis_cap=1.2)
    coefficients = centering_coefficients(config, trainer, sampler)
    assert coefficients[0].tolist() == pytest.approx([0.5 - 0.3, 0.3 - 0.18], abs=1e-6)


def test_padding_of_the_head_counts_for_nothing() -> None:
    trainer = torch.log(torch.tensor([[0.5, 0.3, 0.9]]))
    sampler = torch.tensor([[math.log(0.6), math.log(0.2), -math.inf]])
    config = LossConfig(correction="score_centering")
    coefficients = centering_coefficients(config, trainer, sampler)
    assert coefficients[0].tolist() == pytest.approx([0.1, -0.1, 0.0], abs=1e-6)
    assert torch.isfinite(centering_loss(config, trainer, sampler, torch.ones(1))).all()


def test_k3_and_mismatch() -> None:
    assert k3(torch.tensor([0.0, math.log(2.0)])).tolist() == pytest.approx([0.0, 1.0 - math.log(2.0)])
    found = mismatch_metrics(torch.log(torch.tensor([0.5, 0.4])), torch.log(torch.tensor([0.25, 0.4])))
    assert found["mismatch/mean_abs_dlogp"] == pytest.approx(math.log(2.0) / 2)
    assert found["mismatch/max_abs_dlogp"] == pytest.approx(math.log(2.0))
    assert found["mismatch/k3_kl"] == pytest.approx((1.0 - math.log(2.0)) / 2)


def test_sequence_mean() -> None:
    assert sequence_mean(torch.tensor([1.0, 3.0, 5.0]), SEQUENCE, LENGTHS).tolist() == [2.0, 5.0]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"clip": 0.2}, ["clip", "clip_high"]),
        ({"name": "ppo"}, ["ppo", "gspo"]),
        ({"correction": "tis"}, ["tis", "tis_token"]),
        ({"inner_steps": 0}, ["inner_steps=0"]),
        ({"mask_low": 1.5}, ["mask_low=1.5"]),
        ({"clip_low": -0.1}, ["clip_low=-0.1"]),
        ({"correction": "score_centering", "inner_steps": 2}, ["inner_steps=2"]),
        ({"correction": "score_centering", "name": "gspo"}, ["gspo"]),
    ],
)
def test_bad_configurations_say_what_is_allowed(given: dict, words: list[str]) -> None:
    with pytest.raises(ValueError) as err:  # noqa: PT011 (the words are checked below)
        LossConfig.from_mapping(given)
    for word in words:
        assert word in str(err.value)


def test_advantage_kind_follows_the_name() -> None:
    assert LossConfig(name="dr_grpo").advantage_kind == "mean"
    assert LossConfig(name="dapo").advantage_kind == "group_norm"
    assert LossConfig(name="dr_grpo", advantage="leave_one_out").advantage_kind == "leave_one_out"
