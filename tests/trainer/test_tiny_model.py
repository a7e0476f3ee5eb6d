"""The shipped tiny model: its tokenizer, its headroom, how it learns, and that its making is reproducible."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from epilora.models import TINY_ARITH, portable_model_path, resolve_model_path
from epilora.models.char_tokenizer import EOS_ID, VOCABULARY, encode, make_tokenizer
from epilora.models.pretrain import TASKS, PretrainConfig, pretrain, save_model
from epilora.tasks.arithmetic import Addition, Maximum, Subtraction
from epilora.tasks.base import Task
from epilora.trainer.local_base import LocalBase
from epilora.trainer.trainer import LoraTrainer
from epilora.types import AdapterSpec, Rollout, RolloutGroup

SPEC = AdapterSpec(16, 32.0, ("all-linear",))


@pytest.fixture(scope="module")
def tiny(tiny_base: LocalBase) -> LoraTrainer:
    trainer = LoraTrainer()
    trainer.attach([tiny_base.manifest])
    return trainer


@torch.no_grad()
def sample(
    trainer: LoraTrainer, session: str | None, prompts: list[str], generator: torch.Generator | None
) -> list[tuple[tuple[int, ...], tuple[float, ...], str]]:
    """Plain-torch sampling without a cache (generator None: greedy): (ids, log-probabilities, text) per prompt."""
    model = trainer._model
    out: list = [None] * len(prompts)
    with model.adapter(None if session is None else trainer._sessions[session].pairs):
        for length in sorted({len(p) for p in prompts}):
            members = [i for i, p in enumerate(prompts) if len(p) == length]
            ids, chosen = torch.tensor([encode(prompts[i]) for i in members]), []
            for _ in range(4):
                logits = model.hidden(ids)[:, -1] @ model.head.to(torch.float32).t()
                logp = torch.log_softmax(logits, -1)
                token = (
                    logp.argmax(-1, keepdim=True)
                    if generator is None
                    else torch.multinomial(logp.exp(), 1, generator=generator)
                )
                chosen.append(logp.gather(1, token))
                ids = torch.cat([ids, token], 1)
            for row, (i, logps) in enumerate(zip(members, torch.cat(chosen, 1).tolist(), strict=True)):
                tokens = ids[row, length:].tolist()
                end = tokens.index(EOS_ID) if EOS_ID in tokens else len(tokens)
                kept = tokens[: end + 1]
                text = "".join(VOCABULARY[t] for t in tokens[:end])
                out[i] = (tuple(kept), tuple(logps[: len(kept)]), text if EOS_ID in tokens else text + "?")
    return out


def accuracy(trainer: LoraTrainer, session: str | None, task: Task, *, seed: int | None = None) -> tuple[float, float]:
    """(right, well formed) over 200 held-out questions, greedy or at temperature 1."""
    problems = [task.problem("held_out", i) for i in range(200)]
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    answers = sample(trainer, session, [p.prompt for p in problems], generator)
    right = sum(task.score(text, p) for (_, _, text), p in zip(answers, problems, strict=True))
    return right / 200, sum(task.well_formed(text) for _, _, text in answers) / 200


def test_tokenizer_ids_are_fixed_and_it_round_trips() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(TINY_ARITH)
    assert VOCABULARY[:6] == ("<eos>", "<pad>", "<unk>", "0", "1", "2")
    assert len(VOCABULARY) == len(set(VOCABULARY)) == 32
    text = "max(12,47)=9"
    assert tokenizer(text)["input_ids"] == encode(text) == make_tokenizer()(text)["input_ids"]
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer("1z")["input_ids"] == [4, 2]
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 1)
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "1+2="}], tokenize=False)
    assert chat == "1+2="


def test_a_shipped_models_name_is_the_same_in_every_copy_of_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert portable_model_path("package:tiny-arith") == "package:tiny-arith"
    with pytest.raises(FileNotFoundError, match="ships"):
        portable_model_path("package:large")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert portable_model_path("model") == str(tmp_path / "model")


def test_shipped_files() -> None:
    assert resolve_model_path("package:tiny-arith") == TINY_ARITH
    assert sum(p.stat().st_size for p in TINY_ARITH.iterdir()) < 1 << 20
    weights = load_file(TINY_ARITH / "model.safetensors")
    assert {w.dtype for w in weights.values()} == {torch.bfloat16}
    with pytest.raises(FileNotFoundError, match="ships \\['tiny-arith'\\]"):
        resolve_model_path("package:large")
    with pytest.raises(FileNotFoundError, match="convert_smollm2"):
        resolve_model_path(".cache/no-smollm2-here")


def test_the_quantised_base_has_headroom_and_good_form(tiny: LoraTrainer) -> None:
    for task, low, high in ((Addition(), 0.25, 0.45), (Subtraction(), 0.5, 0.7), (Maximum(), 0.55, 0.75)):
        greedy, formed = accuracy(tiny, None, task)
        sampled, formed_sampled = accuracy(tiny, None, task, seed=0)
        assert low < greedy < high, task.name
        assert greedy - 0.1 < sampled < 0.8, task.name
        assert min(formed, formed_sampled) >= 0.9, task.name


@pytest.mark.parametrize("make", [Subtraction, Maximum])
def test_forty_supervised_steps_lift_a_tenants_task(tiny: LoraTrainer, make: type) -> None:
    task = make()
    before, _ = accuracy(tiny, None, task)
    tiny.close_session("sft")
    tiny.open_session("sft", SPEC, {"lr": 3e-3}, seed=0)
    order = random.Random(0)
    for _ in range(40):
        problems = [task.problem("train", order.randrange(1 << 20)) for _ in range(32)]
        tiny.train_sft("sft", [(tuple(encode(p.prompt)), (*encode(p.answer), EOS_ID)) for p in problems])
    after, _ = accuracy(tiny, "sft", task)
    assert after - before >= 0.2


def grpo(trainer: LoraTrainer, seed: int, *, steps: int, prompts: int, loss: dict | None = None) -> None:
    """GRPO on addition in session "rl", groups of 8, sampled in plain torch."""
    task = Addition()
    trainer.close_session("rl")
    trainer.open_session("rl", SPEC, {"lr": 3e-3}, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        problems = [task.problem("train", (seed * steps + step) * prompts + i) for i in range(prompts)]
        answers = sample(trainer, "rl", [p.prompt for p in problems for _ in range(8)], generator)
        groups = []
        for i, p in enumerate(problems):
            rollouts = tuple(
                Rollout(p.problem_id, tuple(encode(p.prompt)), ids, logp, task.score(text, p), ("v",), step)
                for ids, logp, text in answers[8 * i : 8 * i + 8]
            )
            groups.append(RolloutGroup(p.problem_id, rollouts))
        metrics = trainer.train_rl("rl", groups, loss or {"name": "grpo"})
        assert metrics["mismatch/max_abs_dlogp"] < 1e-4


def test_a_short_rl_run_learns(tiny: LoraTrainer) -> None:
    before, _ = accuracy(tiny, None, Addition())
    grpo(tiny, 0, steps=10, prompts=32)
    after, formed = accuracy(tiny, "rl", Addition())
    assert after - before >= 0.2
    assert formed >= 0.95


@pytest.mark.slow
def test_the_full_rl_run_learns_for_three_seeds(tiny: LoraTrainer) -> None:
    """The recipe of the quickstart: 30 steps of 64 x 8. Gains were +61 to +65 points for seeds 0..4."""
    before, _ = accuracy(tiny, None, Addition())
    gains = []
    for seed in range(3):
        grpo(tiny, seed, steps=30, prompts=64)
        gains.append(accuracy(tiny, "rl", Addition())[0] - before)
    assert min(gains) >= 0.2
    assert sum(gains) / 3 >= 0.3


def test_pretraining_is_reproducible_from_its_seed_and_learns(tmp_path: Path) -> None:
    model, losses = pretrain(PretrainConfig(steps=25, batch_size=48, warmup_steps=5))
    # Before the rates fall (at step 17 of 25) the number of steps plays no part.
    again = pretrain(PretrainConfig(steps=8, batch_size=48, warmup_steps=5, decay_fraction=0.0))[1]
    assert losses[:8] == again
    other = pretrain(PretrainConfig(seed=1, steps=2, batch_size=48, warmup_steps=5, decay_fraction=0.0))[1]
    assert other != losses[:2]
    assert losses[0] > 3.0
    assert sum(losses[-5:]) / 5 < 1.8
    assert len(TASKS) == 3
    save_model(model, tmp_path)
    saved, shipped = load_file(tmp_path / "model.safetensors"), load_file(TINY_ARITH / "model.safetensors")
    assert {k: v.shape for k, v in saved.items()} == {k: v.shape for k, v in shipped.items()}
    for name in (
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "generation_config.json",
    ):
        assert (tmp_path / name).read_text() == (TINY_ARITH / name).read_text(), name
