"""One session's rollouts of a step as flat tensors, and the policy-gradient loss of any part of them.

Everything here lives on the CPU: a few floats a token. `prepare` refuses what must not be trained on; groups whose rewards
are all equal are counted and left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from epilora.types import Rollout, RolloutGroup

from . import loss as losses
from .advantage import group_advantages
from .batch import Layout, TokenPair, layout_of
from .session import Session


@dataclass
class RlBatch:
    """heads: (ids [T, H], sampler's log p [T, H]) for score centering. old, reference [T]: the trainer's log p before the
    step's first update, and the base's, where the loss needs them. skipped: no group has two different rewards.
    """

    state: Session
    config: losses.LossConfig
    sequences: list[TokenPair]
    layout: Layout
    advantage: torch.Tensor
    rollout_logp: torch.Tensor
    weight: torch.Tensor
    heads: tuple[torch.Tensor, torch.Tensor] | None
    zero_variance_groups: int
    skipped: bool
    old: torch.Tensor | None = None
    reference: torch.Tensor | None = None
    seen: _Seen = field(init=False)

    def __post_init__(self) -> None:
        self.seen = _Seen(self.layout.num_tokens)

    def loss(
        self, flat: torch.Tensor, logp: torch.Tensor, entropy: torch.Tensor, head_logp: torch.Tensor | None
    ) -> torch.Tensor:
        """Loss of the completion tokens at `flat` [n] (whole sequences), given their log p [n] (differentiable), entropy
        [n], and with heads their log p [n, H]. Remembers what `metrics` reports.
        """
        config = self.config
        # Number the sequences 0.. for sums over a sequence.
        members, sequence = torch.unique(self.layout.sequence[flat], return_inverse=True)
        lengths = self.layout.lengths[members]
        old = logp.detach() if self.old is None else self.old[flat]
        advantage = self.advantage[flat]
        surrogate, clipped = losses.surrogate(config, logp, old, advantage, sequence_T=sequence, lengths_S=lengths)
        correction = losses.correction_weights(config, old, self.rollout_logp[flat], sequence, lengths)
        per_token = correction.weight * surrogate
        if self.heads is not None:
            assert head_logp is not None, "score centering needs the heads' log p"
            per_token = per_token + losses.centering_loss(config, head_logp, self.heads[1][flat], advantage)
        value = (self.weight[flat] * per_token).sum()
        if self.reference is not None:
            kl = losses.k3(self.reference[flat] - logp)
            value = value + config.kl_coef * (self.weight[flat] * kl).sum()
            self.seen.kl += float(kl.detach().sum())
        seen = self.seen
        seen.loss += float(value.detach())
        seen.logp[flat], seen.entropy[flat], seen.weight[flat] = logp.detach(), entropy, correction.weight
        seen.clipped[flat], seen.masked[flat], seen.truncated[flat] = clipped, correction.masked, correction.truncated
        return value

    def counts(self) -> dict[str, float]:
        """What was given, and how much of it trains."""
        return {
            "zero_variance_groups": float(self.zero_variance_groups),
            "sequences": float(len(self.sequences)),
            "tokens": float(self.layout.num_tokens),
        }

    def metrics(self) -> dict[str, float]:
        """Of one whole pass; forgets it."""
        seen, self.seen = self.seen, _Seen(self.layout.num_tokens)
        found = {
            "loss": seen.loss,
            "entropy": float(seen.entropy.mean()),
            "clip_fraction": float(seen.clipped.float().mean()),
            "mask_fraction": float(seen.masked.float().mean()),
            "truncated_fraction": float(seen.truncated.float().mean()),
            "correction_weight_mean": float(seen.weight.mean()),
        }
        if self.reference is not None:
            found["kl_to_base"] = seen.kl / self.layout.num_tokens
        return found | losses.mismatch_metrics(seen.logp, self.rollout_logp)

    def skipped_metrics(self, logp: torch.Tensor, entropy: torch.Tensor) -> dict[str, float]:
        """Of a step that is not taken: the mismatch is still measured."""
        zeros = dict.fromkeys(("loss", "grad_norm", "clip_fraction", "mask_fraction", "truncated_fraction"), 0.0)
        found = zeros | {"entropy": float(entropy.mean()), "lr": self.state.learning_rate(), "skipped_step": 1.0}
        return found | losses.mismatch_metrics(logp, self.rollout_logp)


class _Seen:
    """What one pass saw, token by token."""

    def __init__(self, tokens: int) -> None:
        self.loss = self.kl = 0.0
        self.logp, self.entropy, self.weight = (torch.zeros(tokens) for _ in range(3))
        self.clipped, self.masked, self.truncated = (torch.zeros(tokens, dtype=torch.bool) for _ in range(3))


def prepare(state: Session, groups: Sequence[RolloutGroup], config: losses.LossConfig) -> RlBatch:
    """The batch of one session. Raises ValueError naming the problem for rewards or log-probabilities that are missing or
    not finite, for no groups, and if all completions are empty.
    """
    if not groups:
        raise ValueError("train_rl: no rollout groups")
    names = [group.problem_id for group in groups]
    found = group_advantages([[r.reward for r in g.rollouts] for g in groups], config.advantage_kind, names)
    skipped = all(found.zero_variance) and config.kl_coef == 0
    keep_all = config.kl_coef > 0 or skipped
    rollouts: list[Rollout] = []
    advantages: list[float] = []
    for group, values, flat in zip(groups, found.values, found.zero_variance, strict=True):
        for rollout, value in zip(group.rollouts, values, strict=True):
            _check_rollout(rollout)
            if rollout.token_ids and (keep_all or not flat):
                rollouts.append(rollout)
                advantages.append(value)
    if not rollouts:
        raise ValueError(f"train_rl: all {sum(len(g.rollouts) for g in groups)} completions are empty")
    sequences = [(r.prompt_token_ids, r.token_ids) for r in rollouts]
    layout = layout_of(sequences)
    return RlBatch(
        state=state,
        config=config,
        sequences=sequences,
        layout=layout,
        advantage=torch.tensor(advantages, dtype=torch.float32)[layout.sequence],
        rollout_logp=torch.tensor([lp for r in rollouts for lp in r.rollout_logprobs], dtype=torch.float32),
        weight=losses.aggregation_weights(config, layout.sequence, layout.lengths),
        heads=_sampler_heads(rollouts, layout) if config.correction == "score_centering" else None,
        zero_variance_groups=sum(found.zero_variance),
        skipped=skipped,
    )


def _check_rollout(rollout: Rollout) -> None:
    tokens, given = len(rollout.token_ids), len(rollout.rollout_logprobs)
    if tokens != given:
        raise ValueError(
            f"problem {rollout.problem_id!r}: {tokens} tokens with {given} rollout_logprobs; sample with logprobs=0"
        )
    for place, value in enumerate(rollout.rollout_logprobs):
        if not -float("inf") < value < float("inf"):
            raise ValueError(f"problem {rollout.problem_id!r}: rollout_logprobs[{place}] is {value}; it must be finite")


def _sampler_heads(rollouts: Sequence[Rollout], layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and log-probabilities of the sampler's likeliest tokens, padded with id 0 and -inf, [T, H] each."""
    tops: list[dict[int, float]] = []
    for rollout in rollouts:
        if len(rollout.top_logprobs) != len(rollout.token_ids):
            raise ValueError(
                f"problem {rollout.problem_id!r}: score_centering needs top_logprobs for each of "
                f"{len(rollout.token_ids)} tokens, "
                f"got {len(rollout.top_logprobs)}; sample with logprobs=k, k >= 1"
            )
        tops.extend(dict(top) for top in rollout.top_logprobs)
    width = max(map(len, tops))
    ids = torch.zeros(layout.num_tokens, width, dtype=torch.long)
    logp = torch.full((layout.num_tokens, width), -float("inf"))
    for place, top in enumerate(tops):
        ids[place, : len(top)] = torch.tensor(list(top))
        logp[place, : len(top)] = torch.tensor(list(top.values()))
    return ids, logp
