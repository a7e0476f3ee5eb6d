"""LoraTrainer: sessions, policy-gradient steps, metrics, resume bit for bit, a golden curve."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from actors.protocols import Trainer
from epilora.errors import BaseMismatch
from epilora.models.char_tokenizer import EOS_ID, encode
from epilora.tasks.arithmetic import Subtraction
from epilora.trainer.local_base import LocalBase, make_local_base
from epilora.trainer.session import AdamWConfig, Session
from epilora.trainer.trainer import LoraTrainer
from epilora.types import AdapterSpec

from .conftest import SPEC, Small, random_model, rollout_groups, sequences

ADAM = {"lr": 1e-2}


def _weights(trainer: LoraTrainer, session: str) -> bytes:
    return b"".join(value.tobytes() for value in trainer.adapter(session)[1].values())


def test_it_has_every_method_of_the_protocol() -> None:
    promised = [name for name in vars(Trainer) if not name.startswith("_")]
    assert len(promised) >= 9
    assert all(callable(getattr(LoraTrainer, name)) for name in promised)


def test_a_fresh_adapter_is_peft_shaped_seeded_and_changes_nothing(trainer: LoraTrainer) -> None:
    trainer.open_session("s", SPEC, ADAM, seed=1)
    spec, tensors = trainer.adapter("s")
    assert spec == SPEC
    assert len(tensors) == 2 * 14
    a = tensors["base_model.model.model.layers.0.mlp.down_proj.lora_A.weight"]
    b = tensors["base_model.model.model.layers.0.mlp.down_proj.lora_B.weight"]
    assert (a.dtype, a.shape, b.shape) == (np.float32, (4, 48), (32, 4))
    assert 0.8 / math.sqrt(48) < np.abs(a).max() <= 1 / math.sqrt(48)  # U(-1/sqrt(K), 1/sqrt(K))
    assert not b.any()
    assert trainer.logprobs("s", sequences()) == trainer.logprobs(None, sequences())
    trainer.open_session("same", SPEC, ADAM, seed=1)
    trainer.open_session("other", SPEC, ADAM, seed=2)
    assert _weights(trainer, "same") == _weights(trainer, "s") != _weights(trainer, "other")


def test_sessions_with_their_own_spec_do_not_touch_each_other(trainer: LoraTrainer) -> None:
    trainer.open_session("a", SPEC, ADAM, seed=1)
    trainer.open_session("b", AdapterSpec(2, 2.0, ("q_proj",)), {"lr": 1e-3}, seed=1)
    before = _weights(trainer, "b")
    trainer.train_sft("a", sequences())
    assert _weights(trainer, "b") == before
    trainer.train_sft("b", sequences())
    assert _weights(trainer, "b") != before
    assert set(trainer.adapter("b")[1]) == {
        f"base_model.model.model.layers.{i}.self_attn.q_proj.lora_{side}.weight" for i in (0, 1) for side in "AB"
    }


def test_the_split_into_micro_batches_does_not_change_the_step(small_qwen: Small) -> None:
    results = []
    for budget in (10, 10_000):
        trainer = LoraTrainer(micro_batch_tokens=budget)
        trainer.attach([small_qwen.base.manifest])
        trainer.open_session("s", SPEC, ADAM, seed=1)
        loss = {"name": "gspo", "correction": "tis_sequence", "kl_coef": 0.1}
        metrics = [trainer.train_rl("s", rollout_groups(trainer, "s", seed=i, noise=0.1), loss) for i in range(3)]
        results.append((metrics, trainer._sessions["s"].theta.detach().clone()))
    for one, other in zip(results[0][0], results[1][0], strict=True):
        assert one == pytest.approx(other, rel=2e-3, abs=1e-5)
    torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo", "gspo", "cispo"])
def test_a_step_makes_rewarded_answers_likelier(trainer: LoraTrainer, name: str) -> None:
    trainer.open_session("s", SPEC, ADAM, seed=1)
    groups = rollout_groups(trainer, "s")
    pairs = [(r.prompt_token_ids, r.token_ids) for g in groups for r in g.rollouts]
    rewards = [r.reward for g in groups for r in g.rollouts]

    def gap() -> float:
        means = [sum(logp) / len(logp) for logp in trainer.logprobs("s", pairs)]
        return sum(m if reward else -m for m, reward in zip(means, rewards, strict=True))

    before = gap()
    for _ in range(2):
        metrics = trainer.train_rl("s", groups, {"name": name})
    assert gap() > before + 0.01
    assert metrics["skipped_step"] == 0.0
    assert metrics["tokens"] == 4 * (2 + 3 + 4 + 5)


def test_gradient_of_a_step_is_the_policy_gradient(trainer: LoraTrainer) -> None:
    """grpo, one inner step: d loss = -sum_t A / (S len) d log p, through autograd on the same log-probabilities."""
    trainer.open_session("s", SPEC, ADAM, seed=1)
    groups = rollout_groups(trainer, "s")
    trainer.train_rl("s", groups, {"name": "grpo"})  # so that B is not zero
    session = trainer._sessions["s"]
    saved = session.theta.detach().clone()
    trainer.train_rl("s", groups, {"name": "grpo"})
    gradient = session.grad.clone()
    with torch.no_grad():
        session.theta.copy_(saved)
    from epilora.trainer.advantage import group_advantages
    from epilora.trainer.batch import layout_of, micro_batches

    rollouts = [r for g in groups for r in g.rollouts]
    advantages = sum(group_advantages([[r.reward for r in g.rollouts] for g in groups], "group_norm").values, [])  # noqa: RUF017
    pairs = [(r.prompt_token_ids, r.token_ids) for r in rollouts]
    layout = layout_of(pairs)
    session.grad.zero_()
    weight = torch.tensor([a / (16 * len(r.token_ids)) for a, r in zip(advantages, rollouts, strict=True)])
    for micro in micro_batches(pairs, layout, 10_000):
        with trainer._model.adapter(session.pairs):
            logp, _, _ = trainer._forward(micro, None)
            (-(weight[layout.sequence[micro.flat]] * logp).sum()).backward()
    scale = float(gradient.norm() / session.grad.norm())  # the trainer's was clipped
    torch.testing.assert_close(gradient, session.grad * scale, rtol=1e-3, atol=1e-5)
    assert scale <= 1.0 + 1e-5


def test_mismatch_is_measured_against_the_sampler(trainer: LoraTrainer) -> None:
    trainer.open_session("s", SPEC, ADAM, seed=1)
    groups = rollout_groups(trainer, "s")
    metrics = trainer.train_rl("s", groups, {})
    assert metrics["mismatch/max_abs_dlogp"] < 1e-5
    shifted = [
        dataclasses.replace(
            g,
            rollouts=tuple(
                dataclasses.replace(r, rollout_logprobs=tuple(x - 0.5 for x in logp))
                for r, logp in zip(
                    g.rollouts,
                    trainer.logprobs("s", [(r.prompt_token_ids, r.token_ids) for r in g.rollouts]),
                    strict=True,
                )
            ),
        )
        for g in groups
    ]
    metrics = trainer.train_rl("s", shifted, {"correction": "tis_token", "tis_cap": 1.5})
    assert metrics["mismatch/mean_abs_dlogp"] == pytest.approx(0.5, abs=1e-5)
    assert metrics["mismatch/k3_kl"] == pytest.approx(math.exp(0.5) - 1.5, abs=1e-4)
    assert metrics["truncated_fraction"] == 1.0  # exp(0.5) = 1.65 > 1.5
    assert metrics["correction_weight_mean"] == pytest.approx(1.5)


def test_the_importance_weight_scales_the_gradient(trainer: LoraTrainer) -> None:
    """Rollouts whose sampler gave every token half the trainer's probability: weight 2, cut to 1.5."""
    norms = []
    for loss in ({}, {"correction": "tis_token", "tis_cap": 1.5}, {"correction": "tis_token", "tis_cap": 3.0}):
        trainer.close_session("s")
        trainer.open_session("s", SPEC, ADAM, seed=1)
        groups = [
            dataclasses.replace(
                g,
                rollouts=tuple(
                    dataclasses.replace(r, rollout_logprobs=tuple(x - math.log(2.0) for x in r.rollout_logprobs))
                    for r in g.rollouts
                ),
            )
            for g in rollout_groups(trainer, "s")
        ]
        norms.append(trainer.train_rl("s", groups, loss)["grad_norm"])
    assert norms[1] / norms[0] == pytest.approx(1.5, rel=1e-4)
    assert norms[2] / norms[0] == pytest.approx(2.0, rel=1e-4)


def test_corrections_and_centering_run_on_noisy_rollouts(trainer: LoraTrainer) -> None:
    trainer.open_session("s", SPEC, ADAM, seed=1)
    groups = rollout_groups(trainer, "s", noise=0.6, tops=5)
    masked = trainer.train_rl("s", groups, {"correction": "mask_token", "mask_low": 0.8, "mask_high": 1.25})
    assert 0 < masked["mask_fraction"] < 1
    centred = trainer.train_rl("s", groups, {"correction": "score_centering", "centering_weight": "tis_token"})
    assert math.isfinite(centred["loss"])
    plain = rollout_groups(trainer, "s")
    with pytest.raises(ValueError, match="'p0': score_centering needs top_logprobs"):
        trainer.train_rl("s", plain, {"correction": "score_centering"})


def test_score_centering_changes_nothing_when_sampler_and_trainer_agree(trainer: LoraTrainer) -> None:
    """q = p over the whole vocabulary: the mean score is zero, so the gradient is that of no correction."""
    trainer.open_session("s", SPEC, ADAM, seed=1)
    groups = rollout_groups(trainer, "s")
    contexts = [
        (*r.prompt_token_ids, *r.token_ids[:t]) for g in groups for r in g.rollouts for t in range(len(r.token_ids))
    ]
    asked = trainer.logprobs("s", [(context, (v,)) for context in contexts for v in range(50)])
    tops = iter([tuple((v, asked[50 * i + v][0]) for v in range(50)) for i in range(len(contexts))])
    full = [
        dataclasses.replace(
            g,
            rollouts=tuple(
                dataclasses.replace(r, top_logprobs=tuple(next(tops) for _ in r.token_ids)) for r in g.rollouts
            ),
        )
        for g in groups
    ]
    gradients = []
    for correction in ("none", "score_centering"):
        trainer.close_session("s")
        trainer.open_session("s", SPEC, ADAM, seed=1)
        trainer.train_rl("s", full, {"correction": correction})
        gradients.append(trainer._sessions["s"].grad.clone())
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-6)


def test_inner_steps_clip_against_the_first_policy(trainer: LoraTrainer) -> None:
    trainer.open_session("s", SPEC, {"lr": 3e-2}, seed=1)
    groups = rollout_groups(trainer, "s")
    metrics = trainer.train_rl("s", groups, {"inner_steps": 4, "clip_low": 0.05, "clip_high": 0.05})
    assert trainer._sessions["s"].step == 4
    assert metrics["clip_fraction"] > 0.1


def test_kl_to_the_base_pulls_back(trainer: LoraTrainer) -> None:
    trainer.open_session("s", SPEC, ADAM, seed=1)
    groups = rollout_groups(trainer, "s")
    for _ in range(3):
        metrics = trainer.train_rl("s", groups, {"kl_coef": 1e-6})
    assert metrics["kl_to_base"] > 1e-3
    for _ in range(6):
        strong = trainer.train_rl("s", groups, {"kl_coef": 100.0})
    assert strong["kl_to_base"] < metrics["kl_to_base"]


def test_groups_without_variance_are_skipped_and_counted(trainer: LoraTrainer) -> None:
    trainer.open_session("s", SPEC, ADAM, seed=1)
    groups = rollout_groups(trainer, "s")
    flat = [
        dataclasses.replace(g, rollouts=tuple(dataclasses.replace(r, reward=1.0) for r in g.rollouts)) for g in groups
    ]
    before = trainer.state("s")
    metrics = trainer.train_rl("s", flat, {})
    assert (metrics["skipped_step"], metrics["zero_variance_groups"]) == (1.0, 4.0)
    assert metrics["mismatch/max_abs_dlogp"] < 1e-5
    assert trainer.state("s") == before
    mixed = trainer.train_rl("s", [flat[0], *groups[1:]], {})
    assert (mixed["skipped_step"], mixed["zero_variance_groups"], mixed["sequences"]) == (0.0, 1.0, 12.0)
    keys = set(mixed)
    assert set(metrics) | {"correction_weight_mean"} == keys | {"correction_weight_mean"}


def test_bad_rollouts_name_the_problem(trainer: LoraTrainer) -> None:
    trainer.open_session("s", SPEC, ADAM, seed=1)
    groups = rollout_groups(trainer, "s")

    def broken(**change: object) -> list:
        first = dataclasses.replace(groups[2].rollouts[1], **change)
        rollouts = (groups[2].rollouts[0], first, *groups[2].rollouts[2:])
        return [*groups[:2], dataclasses.replace(groups[2], rollouts=rollouts), groups[3]]

    with pytest.raises(ValueError, match=r"group 2 \(problem 'p2'\): reward 1 is nan"):
        trainer.train_rl("s", broken(reward=math.nan), {})
    with pytest.raises(ValueError, match="'p2': 3 tokens with 1 rollout_logprobs"):
        trainer.train_rl("s", broken(rollout_logprobs=(-1.0,)), {})
    with pytest.raises(ValueError, match=r"'p2': rollout_logprobs\[1\] is -inf"):
        trainer.train_rl("s", broken(rollout_logprobs=(-1.0, -math.inf, -1.0)), {})
    with pytest.raises(ValueError, match="unknown keys"):
        trainer.train_rl("s", groups, {"clip": 1})


def test_state_resumes_bit_for_bit_even_in_another_process(
    small_qwen: Small, trainer: LoraTrainer, tmp_path: Path
) -> None:
    trainer.open_session("s", SPEC, {"lr": 1e-2, "weight_decay": 0.1, "warmup_steps": 3}, seed=5)
    for i in range(2):
        trainer.train_sft("s", sequences(i))
    saved = trainer.state("s")
    for i in range(2, 4):
        trainer.train_sft("s", sequences(i))
    uninterrupted = trainer.state("s")
    assert uninterrupted != saved
    trainer.load_state("s", saved)
    assert trainer.state("s") == saved
    for i in range(2, 4):
        trainer.train_sft("s", sequences(i))
    assert trainer.state("s") == uninterrupted
    (tmp_path / "saved").write_bytes(saved)
    import pickle

    (tmp_path / "job").write_bytes(
        pickle.dumps((small_qwen.base.manifest, [sequences(i) for i in range(2, 4)], torch.get_num_threads()))
    )
    script = f"""
import pickle, sys, torch
from pathlib import Path
from epilora.trainer.trainer import LoraTrainer
from epilora.types import AdapterSpec
folder = Path({str(tmp_path)!r})
manifest, batches, threads = pickle.loads((folder / "job").read_bytes())
torch.set_num_threads(threads)
trainer = LoraTrainer()
trainer.attach([manifest])
trainer.open_session("s", {SPEC!r}, {{"lr": 1e-2, "weight_decay": 0.1, "warmup_steps": 3}}, seed=99)
trainer.load_state("s", (folder / "saved").read_bytes())
for batch in batches:
    trainer.train_sft("s", batch)
(folder / "done").write_bytes(trainer.state("s"))
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=240)
    assert (tmp_path / "done").read_bytes() == uninterrupted


def test_state_of_something_else_is_refused(trainer: LoraTrainer) -> None:
    trainer.open_session("s", SPEC, ADAM, seed=1)
    trainer.open_session("wide", AdapterSpec(8, 8.0, ("all-linear",)), ADAM, seed=1)
    trainer.open_session("slow", SPEC, {"lr": 1e-3}, seed=1)
    before = trainer.state("wide")
    with pytest.raises(ValueError, match="saved spec"):
        trainer.load_state("wide", trainer.state("s"))
    with pytest.raises(ValueError, match="saved optimizer"):
        trainer.load_state("slow", trainer.state("s"))
    with pytest.raises(ValueError, match="no saved session"):
        trainer.load_state("wide", b"junk")
    assert trainer.state("wide") == before


def test_misuse_says_what_to_do(small_qwen: Small, trainer: LoraTrainer, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="attach"):
        LoraTrainer().open_session("s", SPEC, ADAM, seed=0)
    with pytest.raises(ValueError, match="allowed"):
        LoraTrainer(dtype="int8")
    with pytest.raises(ValueError, match=r"\['w_proj'\] match nothing.*q_proj"):
        trainer.open_session("s", AdapterSpec(4, 8.0, ("q_proj", "w_proj")), ADAM, seed=0)
    with pytest.raises(ValueError, match="unknown keys"):
        trainer.open_session("s", SPEC, {"learning_rate": 1.0}, seed=0)
    with pytest.raises(ValueError, match="no session 's'; open: \\[\\]"):
        trainer.train_sft("s", sequences())
    trainer.close_session("never opened")
    trainer.open_session("s", SPEC, ADAM, seed=0)
    with pytest.raises(ValueError, match="is open"):
        trainer.open_session("s", SPEC, ADAM, seed=0)
    trainer.attach([small_qwen.base.manifest])  # the same base again: nothing happens
    assert trainer.adapter("s")[0] == SPEC
    other = make_local_base(random_model(tmp_path, "llama"), tmp_path)
    with pytest.raises(BaseMismatch, match="close them first"):
        trainer.attach([other.manifest])


def test_adamw_against_torch() -> None:
    shapes = {"m": (6, 5)}
    config = {"lr": 3e-2, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.3, "grad_clip": 0.0}
    session = Session("s", AdapterSpec(2, 4.0, ("m",)), config, 0, shapes)
    reference = session.theta.detach().clone().requires_grad_()
    optimizer = torch.optim.AdamW([reference], lr=3e-2, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.3)
    for step in range(5):
        gradient = torch.randn(session.num_parameters, generator=torch.Generator().manual_seed(step))
        session.grad.copy_(gradient)
        session.apply()
        reference.grad = gradient
        optimizer.step()
    torch.testing.assert_close(session.theta.detach(), reference.detach())


def test_clip_warmup_and_bad_gradients() -> None:
    session = Session(
        "s", AdapterSpec(2, 4.0, ("m",)), {"lr": 1.0, "warmup_steps": 4, "grad_clip": 2.0}, 0, {"m": (6, 5)}
    )
    rates = []
    for _ in range(6):
        session.grad.fill_(3.0)
        metrics = session.apply()
        rates.append(metrics["lr"])
        assert metrics["grad_norm"] == pytest.approx(3.0 * math.sqrt(22))
        assert float(session.grad.norm()) == pytest.approx(2.0)
    assert rates == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    before = session.theta.detach().clone()
    session.grad[3] = math.inf
    with pytest.raises(FloatingPointError, match="step 7: gradient norm is inf"):
        session.apply()
    assert torch.equal(session.theta, before)
    assert session.step == 6
    for bad in ({"lr": 0.0}, {"betas": (0.9,)}, {"grad_clip": -1.0}):
        with pytest.raises(ValueError, match="optimizer"):
            AdamWConfig.from_mapping(bad)


def test_memory_is_reported(trainer: LoraTrainer) -> None:
    trainer.open_session("s", SPEC, ADAM, seed=1)
    trainer.train_sft("s", sequences())
    memory = trainer.memory()
    assert memory["largest_dequantised_bytes"] == 4 * 48 * 32  # one mlp projection in fp32
    assert memory["shared_bytes"] >= memory["base_bytes"] > 0
    assert memory["peak_private_bytes"] >= memory["private_bytes"] > 50 << 20


# Loss of every fourth step of the golden run; made by this test itself, see its docstring.
GOLDEN = (0.09872, 0.08151, 0.05818, 0.02541, 0.01786)


def test_golden_twenty_steps(tiny_base: LocalBase) -> None:
    """SFT on subtraction from seed 0, 20 steps of 32: a change of the arithmetic, the init or the optimizer shows here.

    To renew after an intended change, print `losses[::4]`. Tolerance: other BLAS kernels order sums differently.
    """
    task = Subtraction()
    trainer = LoraTrainer()
    trainer.attach([tiny_base.manifest])
    trainer.open_session("s", AdapterSpec(16, 32.0, ("all-linear",)), {"lr": 3e-3}, seed=0)
    losses = []
    for step in range(20):
        problems = [task.problem("train", 32 * step + i) for i in range(32)]
        examples = [(tuple(encode(p.prompt)), (*encode(p.answer), EOS_ID)) for p in problems]
        losses.append(trainer.train_sft("s", examples)["loss"])
    assert losses[::4] == pytest.approx(list(GOLDEN), rel=2e-2)
    assert trainer.base_checksum() == tiny_base.manifest.base_digest


@pytest.mark.parametrize("packed", [False, True])
def test_sessions_trained_together_become_what_they_become_alone(small_qwen: Small, packed: bool) -> None:
    """Different ranks, targets, optimizers and losses; one has nothing to learn, one is refused."""
    wanted = {
        "grpo": (SPEC, {"lr": 1e-2}, {"name": "grpo", "correction": "tis_token"}),
        "gspo": (AdapterSpec(2, 2.0, ("q_proj", "down_proj")), {"lr": 3e-3}, {"name": "gspo", "kl_coef": 0.1}),
        "inner": (AdapterSpec(8, 8.0, ("all-linear",)), {"lr": 1e-2}, {"name": "dapo", "inner_steps": 2}),
        "centred": (SPEC, {"lr": 1e-2}, {"correction": "score_centering"}),
    }
    made: list[LoraTrainer] = []
    batches = {}
    for _ in range(2):
        trainer = LoraTrainer(micro_batch_tokens=50)
        trainer.attach([small_qwen.base.manifest])
        trainer._packed = packed
        for seed, (name, (spec, optimizer, _)) in enumerate(wanted.items()):
            trainer.open_session(name, spec, optimizer, seed)
            trainer.train_sft(name, sequences(seed))  # so that B is not zero
            batches[name] = rollout_groups(trainer, name, seed=seed, groups=2 + seed, noise=0.2, tops=3)
        made.append(trainer)
    flat = [
        dataclasses.replace(g, rollouts=tuple(dataclasses.replace(r, reward=1.0) for r in g.rollouts))
        for g in batches["grpo"]
    ]
    bad = [dataclasses.replace(flat[0], rollouts=(dataclasses.replace(flat[0].rollouts[0], reward=math.nan),) * 2)]
    for name in ("flat", "bad"):
        made[1].open_session(name, SPEC, ADAM, seed=9)
    alone = {name: made[0].train_rl(name, batches[name], loss) for name, (_, _, loss) in wanted.items()}
    requests = [(name, batches[name], loss) for name, (_, _, loss) in wanted.items()]
    found = made[1].train_rl_together([*requests, ("flat", flat, {}), ("bad", bad, {})])
    for name, metrics in zip(wanted, found, strict=False):
        assert metrics == pytest.approx(alone[name], rel=2e-3, abs=1e-5), name
        mine, reference = (t._sessions[name].theta.detach() for t in (made[1], made[0]))
        torch.testing.assert_close(mine, reference, rtol=1e-3, atol=2e-4)
    assert found[-2]["skipped_step"] == 1.0
    assert isinstance(found[-1], ValueError)
    assert "reward 0 is nan" in str(found[-1])
    assert (made[1]._sessions["bad"].step, made[1]._sessions["inner"].step) == (0, 3)
    with pytest.raises(ValueError, match="each may be named once"):
        made[1].train_rl_together([requests[0], requests[0]])


def test_a_shared_adapter_is_the_memory_that_is_trained(monkeypatch):
    """CUDA's export is stood in for; handed back to the process that exported, a handle is the tensor itself."""
    from epilora.quant import cuda_ipc
    from epilora.trainer.session import Session

    calls = []

    def give(storage):
        calls.append(storage.data_ptr())
        return (0, b"handle", storage.nbytes(), 0, b"counter", 0, b"event", False)

    monkeypatch.setattr(torch.UntypedStorage, "_share_cuda_", give, raising=False)
    monkeypatch.setattr(cuda_ipc, "gpu_uuid", lambda device: "GPU-a")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: calls.append("waited"))
    session = Session("s", AdapterSpec(4, 8.0, ("q_proj",)), {"lr": 0.1}, 0, {"layers.0.q_proj": (6, 8)})
    shared = session.share()
    assert session.share() == shared
    assert calls == [session.theta.untyped_storage().data_ptr(), "waited", "waited"]  # exported once
    views = {name: cuda_ipc.map_tensor(entry) for name, entry in shared.entries}
    session.grad.fill_(1.0)
    session.apply()
    for name, value in session.export().items():
        assert torch.equal(views[name], torch.from_numpy(value))


def test_a_session_takes_up_an_adapter(trainer: LoraTrainer) -> None:
    trainer.open_session("s", SPEC, ADAM, seed=1)
    trainer.train_sft("s", sequences())
    spec, tensors = trainer.adapter("s")
    trainer.open_adapter("again", spec, tensors)
    assert _weights(trainer, "again") == _weights(trainer, "s")
    assert trainer.logprobs("again", sequences()) == trainer.logprobs("s", sequences())
    name, value = next(iter(tensors.items()))
    with pytest.raises(ValueError, match=r"missing .*, unknown \['other'\]"):
        trainer.open_adapter("bad", spec, {("other" if key == name else key): v for key, v in tensors.items()})
    with pytest.raises(ValueError, match=r"has shape \(1,"):
        trainer.open_adapter("bad", spec, tensors | {name: value[:1]})
    with pytest.raises(ValueError, match="no session 'bad'"):
        trainer.state("bad")


def test_what_an_adapter_would_change_is_predicted_from_its_tensors_alone(trainer: LoraTrainer) -> None:
    trainer.open_session("s", SPEC, ADAM, seed=1)
    for _ in range(3):
        trainer.train_sft("s", sequences())
    spec, tensors = trainer.adapter("s")
    base, changed = trainer.predict(spec, tensors, sequences())
    assert base == trainer.logprobs(None, sequences())
    assert changed == trainer.logprobs("s", sequences()) != base
    doubled = AdapterSpec(spec.rank, 2 * spec.alpha, spec.target_modules)
    assert trainer.predict(doubled, tensors, sequences())[1] != changed
    with pytest.raises(ValueError, match="tensors missing"):
        trainer.predict(spec, dict(list(tensors.items())[1:]), sequences())
    assert sorted(trainer._sessions) == ["s"]
