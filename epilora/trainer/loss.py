"""Policy-gradient objectives, and corrections for a sampler that is not quite the trainer. Pure functions of tensors.

Every tensor ends in `_T`: one element per completion token of the step, all sequences one after the other; `sequence_T`
says which sequence a token belongs to. A step's loss is  sum_t u_t w_t l_t:  l the surrogate, w the correction, u the
aggregation.

With p the trainer now, p_old the trainer before the step's first update, q the sampler (engine), A the advantage:

| name | l_t | u_t | source |
|---|---|---|---|
| grpo | -min(r A, clip(r, 1-lo, 1+hi) A), r = p / p_old | 1 / (S len) | arXiv 2402.03300 |
| dr_grpo | the same | 1 / (S max_tokens) | arXiv 2503.20783 |
| dapo | the same, hi > lo | 1 / T | arXiv 2503.14476 |
| gspo | the same with r = exp(mean over the sequence of log p / p_old) | 1 / (S len) | arXiv 2507.18071 |
| cispo | -sg(clip(r, 1-lo, 1+hi)) A log p | 1 / T | arXiv 2506.13585 |

| correction | w_t | source |
|---|---|---|
| tis_token | min(p_old / q, cap) | https://fengyao.notion.site/off-policy-rl (truncated importance sampling) |
| tis_sequence | min(prod over the sequence, cap) | the same |
| mask_token | p_old / q if inside [mask_low, mask_high], else 0 | IcePop, arXiv 2510.18855 |
| mask_sequence | the same for the sequence's geometric mean | the same |
| score_centering | centering_weight, and subtract the sampler's mean weighted score | arXiv 2609.20807 |

Score centering: with s_v = grad log p(v), the sampler's mean score mu = sum_v q_v w_v s_v is not zero unless q = p, and
A times it is a drift. From the sampler's k likeliest tokens H (probabilities over the whole vocabulary), the tail is
taken as alpha p with alpha = (1 - q(H)) / (1 - p(H)); as sum_v p_v s_v = 0,

    mu = sum_{v in H} ( q_v f(p_v / q_v) - alpha f(1 / alpha) p_v ) s_v,      f = the weight as a function of p / q

and the added loss is  A sum_{v in H} sg(c_v) log p_v,  c_v the bracket. It needs plain sampling (temperature 1, no
top-p or top-k), and one inner step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

NAMES = ("grpo", "dr_grpo", "dapo", "gspo", "cispo")
CORRECTIONS = ("none", "tis_token", "tis_sequence", "mask_token", "mask_sequence", "score_centering")
ADVANTAGES = ("auto", "group_norm", "mean", "leave_one_out")


@dataclass(frozen=True)
class LossConfig:
    """One policy-gradient step. `from_mapping` refuses unknown keys.

    clip_low, clip_high: the ratio's band is [1 - clip_low, 1 + clip_high]. tis_cap: largest importance weight.
    mask_low, mask_high: importance ratios kept by mask_*. centering_weight: the weight that score centering centres.
    kl_coef: weight of the k3 KL to the base without adapter. inner_steps: optimizer steps on one batch of rollouts.
    advantage: auto is `mean` for dr_grpo and `group_norm` else. max_tokens: dr_grpo's constant length; 0: the batch's
    longest.
    """

    name: str = "grpo"
    clip_low: float = 0.2
    clip_high: float = 0.2
    correction: str = "none"
    tis_cap: float = 2.0
    mask_low: float = 0.5
    mask_high: float = 2.0
    centering_weight: str = "none"
    kl_coef: float = 0.0
    inner_steps: int = 1
    advantage: str = "auto"
    max_tokens: int = 0

    def __post_init__(self) -> None:
        for key, allowed in (
            ("name", NAMES),
            ("correction", CORRECTIONS),
            ("advantage", ADVANTAGES),
            ("centering_weight", ("none", "tis_token")),
        ):
            if getattr(self, key) not in allowed:
                raise ValueError(f"loss.{key}={getattr(self, key)!r}; allowed: {allowed}")
        if not (
            0 <= self.clip_low <= 1
            and self.clip_high >= 0
            and self.tis_cap > 0
            and self.kl_coef >= 0
            and self.max_tokens >= 0
        ):
            raise ValueError(
                f"loss: clip_low={self.clip_low} (0..1), clip_high={self.clip_high} (>= 0), tis_cap={self.tis_cap} "
                f"(> 0), "
                f"kl_coef={self.kl_coef} (>= 0), max_tokens={self.max_tokens} (>= 0)"
            )
        if not 0 <= self.mask_low < 1 < self.mask_high:
            raise ValueError(
                f"loss: mask_low={self.mask_low}, mask_high={self.mask_high}; allowed: 0 <= mask_low < 1 < mask_high"
            )
        if self.inner_steps < 1:
            raise ValueError(f"loss.inner_steps={self.inner_steps}; allowed: >= 1")
        if self.correction == "score_centering" and (
            self.inner_steps != 1 or self.name not in ("grpo", "dr_grpo", "dapo")
        ):
            raise ValueError(
                f"score_centering centres a REINFORCE score: it needs inner_steps=1 and grpo, dr_grpo or dapo, got "
                f"inner_steps={self.inner_steps}, name={self.name!r}"
            )

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> LossConfig:
        """From plain values. Raises ValueError naming unknown keys."""
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ValueError(f"loss: unknown keys {unknown}; allowed: {sorted(known)}")
        return cls(**values)

    @property
    def advantage_kind(self) -> str:
        """The kind for `advantage.group_advantages`."""
        if self.advantage == "auto":
            return "mean" if self.name == "dr_grpo" else "group_norm"
        return self.advantage


def sequence_mean(values_T: torch.Tensor, sequence_T: torch.Tensor, lengths_S: torch.Tensor) -> torch.Tensor:
    """Mean over each sequence's tokens, [S]."""
    total = torch.zeros(lengths_S.shape[0], dtype=values_T.dtype).index_add(0, sequence_T, values_T)
    return total / lengths_S


def aggregation_weights(config: LossConfig, sequence_T: torch.Tensor, lengths_S: torch.Tensor) -> torch.Tensor:
    """u_t of the table above, [T] fp32; lengths_S: completion tokens per sequence of the whole step."""
    num_sequences = lengths_S.shape[0]
    if config.name in ("dapo", "cispo"):
        return torch.full(sequence_T.shape, 1.0 / max(int(lengths_S.sum()), 1))
    if config.name == "dr_grpo":
        longest = config.max_tokens or int(lengths_S.max())
        return torch.full(sequence_T.shape, 1.0 / (num_sequences * longest))
    return (1.0 / (num_sequences * lengths_S.float()))[sequence_T]


def surrogate(
    config: LossConfig,
    logp_T: torch.Tensor,
    old_logp_T: torch.Tensor,
    advantage_T: torch.Tensor,
    *,
    sequence_T: torch.Tensor,
    lengths_S: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """l_t [T] (differentiable in logp_T) and which tokens the clip deprives of a gradient, [T] bool.

    For cispo, whose clipped tokens keep their gradient, the second tells whose weight was clipped.
    """
    log_ratio = logp_T - old_logp_T
    if config.name == "gspo":
        log_ratio = sequence_mean(log_ratio, sequence_T, lengths_S)[sequence_T]
    ratio = torch.exp(log_ratio)
    clipped_ratio = ratio.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
    if config.name == "cispo":
        return -clipped_ratio.detach() * advantage_T * logp_T, (ratio != clipped_ratio).detach()
    free, held = ratio * advantage_T, clipped_ratio * advantage_T
    return -torch.minimum(free, held), (held < free).detach()


@dataclass(frozen=True)
class Correction:
    """w_t [T] fp32; masked [T] bool: tokens given weight 0; truncated [T] bool: tokens whose weight the cap cut."""

    weight: torch.Tensor
    masked: torch.Tensor
    truncated: torch.Tensor


@torch.no_grad()
def correction_weights(
    config: LossConfig,
    trainer_logp_T: torch.Tensor,
    rollout_logp_T: torch.Tensor,
    sequence_T: torch.Tensor,
    lengths_S: torch.Tensor,
) -> Correction:
    """w_t of the table above; no gradient flows through it."""
    delta = (trainer_logp_T - rollout_logp_T).float()
    none = torch.zeros_like(delta, dtype=torch.bool)
    kind = config.correction
    if kind == "score_centering":
        kind = config.centering_weight
    if kind == "none":
        return Correction(torch.ones_like(delta), none, none)
    if kind == "tis_sequence":
        delta = (sequence_mean(delta, sequence_T, lengths_S) * lengths_S)[sequence_T]
    if kind == "mask_sequence":
        delta = sequence_mean(delta, sequence_T, lengths_S)[sequence_T]
    ratio = torch.exp(delta)
    if kind.startswith("tis"):
        return Correction(ratio.clamp(max=config.tis_cap), none, ratio > config.tis_cap)
    masked = (ratio < config.mask_low) | (ratio > config.mask_high)
    return Correction(ratio.masked_fill(masked, 0.0), masked, none)


def centering_coefficients(
    config: LossConfig, trainer_logp_TH: torch.Tensor, sampler_logp_TH: torch.Tensor
) -> torch.Tensor:
    """c_v of score centering for the sampler's head tokens, [T, H], no gradient; -inf in sampler_logp_TH marks
    padding.
    """

    def weight(ratio: torch.Tensor) -> torch.Tensor:
        return ratio.clamp(max=config.tis_cap) if config.centering_weight == "tis_token" else torch.ones_like(ratio)

    with torch.no_grad():
        present = torch.isfinite(sampler_logp_TH)
        q = sampler_logp_TH.exp().masked_fill(~present, 0.0)
        p = trainer_logp_TH.exp().masked_fill(~present, 0.0)
        tail_q = (1.0 - q.sum(-1, keepdim=True)).clamp_min(0.0)
        tail_p = (1.0 - p.sum(-1, keepdim=True)).clamp_min(0.0)
        # Tails below fp32 rounding of a sum of probabilities are noise over noise; then the head is all there is.
        alpha = torch.where(tail_p > 1e-5, tail_q / tail_p.clamp_min(1e-5), 0.0)
        tail = torch.where(alpha > 0, alpha * weight(1.0 / alpha.clamp_min(1e-8)), 0.0)
        ratio = torch.where(present, (trainer_logp_TH - sampler_logp_TH).clamp(max=20.0).exp(), 0.0)
        return q * weight(ratio) - tail * p


def centering_loss(
    config: LossConfig, trainer_logp_TH: torch.Tensor, sampler_logp_TH: torch.Tensor, advantage_T: torch.Tensor
) -> torch.Tensor:
    """A sum_v sg(c_v) log p_v per token, [T]; add it to w_t l_t. Differentiable in trainer_logp_TH."""
    coefficients = centering_coefficients(config, trainer_logp_TH, sampler_logp_TH)
    present = torch.isfinite(sampler_logp_TH)
    return advantage_T * (coefficients * trainer_logp_TH.masked_fill(~present, 0.0)).sum(-1)


def k3(log_ratio: torch.Tensor) -> torch.Tensor:
    """exp(x) - 1 - x per element: for x = log(p / q) on samples of q, an unbiased non-negative estimate of KL(q || p).

    Source: J. Schulman, "Approximating KL divergence", http://joschu.net/blog/kl-approx.html
    """
    return torch.expm1(log_ratio) - log_ratio


@torch.no_grad()
def mismatch_metrics(trainer_logp_T: torch.Tensor, rollout_logp_T: torch.Tensor) -> dict[str, float]:
    """How far engine and trainer are apart on the sampled tokens: mean and max |delta log p|, k3 KL(engine ||
    trainer).
    """
    delta = (trainer_logp_T - rollout_logp_T).double()
    if delta.numel() == 0:
        return {"mismatch/mean_abs_dlogp": 0.0, "mismatch/max_abs_dlogp": 0.0, "mismatch/k3_kl": 0.0}
    return {
        "mismatch/mean_abs_dlogp": float(delta.abs().mean()),
        "mismatch/max_abs_dlogp": float(delta.abs().max()),
        "mismatch/k3_kl": float(k3(delta).mean()),
    }
