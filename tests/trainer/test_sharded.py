"""Two ranks over gloo against one: the same log-probabilities, the same adapters after steps, and what a lost rank does."""

from __future__ import annotations

import dataclasses
import math
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from epilora.adapters.digest import ranks_digest
from epilora.errors import TrainerDead, UnsupportedKernel
from epilora.quant.manifest import WeightManifest
from epilora.trainer.local_base import cut_local_base, make_local_base
from epilora.trainer.sharded import ShardedTrainer
from epilora.trainer.trainer import LoraTrainer
from epilora.types import AdapterSpec, RolloutGroup

from .conftest import SPEC, random_model, rollout_groups, sequences

VOCAB = 100  # rank 0 has 64 rows of it, rank 1 the other 36
ADAM = {"lr": 1e-2, "weight_decay": 0.1}


class Pair:
    """The same base whole and cut for two ranks."""

    def __init__(self, folder: Path, kind: str, **sizes: int) -> None:
        folder.mkdir(exist_ok=True)
        base = make_local_base(random_model(folder / "model", kind, **({"vocab_size": VOCAB} | sizes)), folder)
        self.whole: WeightManifest = base.manifest
        self.parts = [part.manifest for part in cut_local_base(base, folder, 2)]

    def one(self, **arguments: object) -> LoraTrainer:
        made = LoraTrainer(micro_batch_tokens=60, **arguments)  # type: ignore[arg-type]
        made.attach([self.whole])
        return made


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tmp_path_factory.mktemp("qwen3"), "qwen3")


@pytest.fixture(scope="module")
def running(pair: Pair) -> Iterator[ShardedTrainer]:
    trainer = ShardedTrainer(2, timeout_s=60, micro_batch_tokens=60)
    trainer.attach(list(reversed(pair.parts)))
    yield trainer
    trainer.close()


@pytest.fixture
def two(running: ShardedTrainer, pair: Pair) -> Iterator[ShardedTrainer]:
    running.attach(pair.parts)
    yield running
    for session in ("s", "t", "bad"):
        running.close_session(session)


def wide_sequences(seed: int = 0) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """As `sequences`, over the whole vocabulary."""
    return [(tuple(2 * i for i in p), tuple(2 * i + 1 for i in c)) for p, c in sequences(seed)]


def close(trainer: LoraTrainer, other: ShardedTrainer, session: str) -> None:
    (spec, mine), (its_spec, its) = trainer.adapter(session), other.adapter(session)
    assert spec == its_spec
    assert list(mine) == list(its)
    for name, value in mine.items():
        torch.testing.assert_close(torch.from_numpy(its[name]), torch.from_numpy(value), rtol=1e-3, atol=1e-4, msg=name)


def test_a_rank_holds_its_part_and_both_hold_the_base(pair: Pair) -> None:
    shapes = {
        name: [part.entry(name).values.shape for part in pair.parts]
        for name in ("model.layers.0.self_attn.qkv_proj", "model.layers.1.mlp.down_proj", "model.embed_tokens")
    }
    assert list(shapes.values()) == [[(32, 32)] * 2, [(32, 24)] * 2, [(64, 32), (36, 32)]]
    assert pair.parts[1].entry("model.layers.0.self_attn.qkv_proj").slices == (
        ("q_proj", 16), ("k_proj", 8), ("v_proj", 8),
    )  # fmt: skip
    assert pair.parts[0].num_bytes + pair.parts[1].num_bytes < 1.1 * pair.whole.num_bytes


def test_two_ranks_compute_the_log_probabilities_of_one(pair: Pair, two: ShardedTrainer) -> None:
    one = pair.one()
    for trainer in (one, two):
        trainer.open_session("s", SPEC, ADAM, seed=1)
    assert {k: v.tobytes() for k, v in two.adapter("s")[1].items()} == {
        k: v.tobytes() for k, v in one.adapter("s")[1].items()
    }  # a seed means the same adapter
    for trainer in (one, two):
        trainer.train_sft("s", wide_sequences())  # so that B is not zero
    for session in (None, "s"):
        found, wanted = two.logprobs(session, wide_sequences(3)), one.logprobs(session, wide_sequences(3))
        worst = max(abs(a - b) for f, w in zip(found, wanted, strict=True) for a, b in zip(f, w, strict=True))
        assert worst < 5e-5, session
    assert two.logprobs("s", wide_sequences(3)) != two.logprobs(None, wide_sequences(3))


def test_adapters_become_what_one_rank_makes_of_them(pair: Pair, two: ShardedTrainer) -> None:
    """Two sessions in mixed batches: all linears, and one column- and one row-parallel projection of another rank."""
    one = pair.one()
    wanted = {
        "s": (SPEC, ADAM, {"name": "gspo", "kl_coef": 0.1, "inner_steps": 2}),
        "t": (
            AdapterSpec(2, 2.0, ("q_proj", "down_proj")),
            {"lr": 3e-3, "grad_clip": 0.05},
            {"correction": "tis_token"},
        ),
    }
    for name, (spec, optimizer, _) in wanted.items():
        for trainer in (one, two):
            trainer.open_session(name, spec, optimizer, seed=3)
    for step in range(3):
        requests = [
            (name, rollout_groups(one, name, seed=10 * step, noise=0.1), loss) for name, (_, _, loss) in wanted.items()
        ]
        expected, found = (trainer.train_rl_together(requests) for trainer in (one, two))
        for name, mine, its in zip(wanted, expected, found, strict=True):
            assert its == pytest.approx(mine, rel=2e-3, abs=2e-5), (step, name)
            assert mine["grad_norm"] > 0.01
    for name in wanted:
        close(one, two, name)
    assert two.base_checksum() == ranks_digest([part.base_digest for part in pair.parts])


def test_a_session_goes_on_bit_for_bit_from_its_state(two: ShardedTrainer) -> None:
    two.open_session("s", SPEC, ADAM, seed=1)
    two.train_sft("s", wide_sequences())
    state, (spec, tensors) = two.state("s"), two.adapter("s")
    two.train_sft("s", wide_sequences(1))
    ahead = two.adapter("s")[1]
    two.close_session("s")
    two.open_session("s", SPEC, ADAM, seed=2)
    two.load_state("s", state)
    assert two.state("s") == state
    two.train_sft("s", wide_sequences(1))
    assert all((two.adapter("s")[1][name] == value).all() for name, value in ahead.items())
    two.open_adapter("t", spec, tensors)
    assert all((two.adapter("t")[1][name] == value).all() for name, value in tensors.items())


def test_what_every_rank_refuses_is_raised_and_leaves_the_group_whole(pair: Pair, two: ShardedTrainer) -> None:
    with pytest.raises(ValueError, match="match nothing"):
        two.open_session("bad", AdapterSpec(4, 8.0, ("no_such",)), {}, 0)
    two.open_session("s", SPEC, ADAM, seed=1)
    [group] = rollout_groups(pair.one(), None, groups=1)
    rollouts = tuple(type(r)(**{**vars(r), "reward": math.nan}) for r in group.rollouts)
    with pytest.raises(ValueError, match="reward 0 is nan"):
        two.train_rl("s", [RolloutGroup("p", rollouts)], {})
    assert two.train_rl("s", [group], {})["skipped_step"] == 0.0


def test_llama_with_a_head_of_its_own(tmp_path: Path, two: ShardedTrainer) -> None:
    other = Pair(tmp_path / "llama", "llama")
    one = other.one()
    two.attach(other.parts)
    for trainer in (one, two):
        trainer.open_session("s", SPEC, ADAM, seed=1)
        for step in range(2):
            trainer.train_sft("s", wide_sequences(step))
    close(one, two, "s")


def test_bases_that_cannot_be_cut_are_refused(tmp_path: Path, two: ShardedTrainer) -> None:
    """Key and value heads that ranks repeat would train twice; a delta net's state is not cut."""
    other = Pair(tmp_path / "q", "qwen3")
    repeated = [
        dataclasses.replace(
            part,
            entries=tuple(
                dataclasses.replace(e, slices=(("q_proj", 16), ("k_proj", 16), ("v_proj", 0)))
                if e.name.endswith("qkv_proj")
                else e
                for e in part.entries
            ),
        )
        for part in other.parts
    ]
    with pytest.raises(UnsupportedKernel, match=r"k_proj \[16, 32\] is exported as \[\(16, 32\), \(16, 32\)\]"):
        two.attach(repeated)
    hybrid = str(random_model(tmp_path / "hybrid", "hybrid"))
    with pytest.raises(UnsupportedKernel, match="no delta net layers"):
        two.attach([dataclasses.replace(part, model_path=hybrid) for part in other.parts])
    with pytest.raises(UnsupportedKernel, match="all ranks of one engine"):
        two.attach(other.parts[:1])
    with pytest.raises(ValueError, match="ranks=1; allowed: >= 2"):
        ShardedTrainer(1)


def test_sixteen_bits_recomputed_layers_and_weights_of_its_own(tmp_path: Path) -> None:
    """bf16 activations on the checkpoint's own weights, layers computed again: near what one rank makes of it."""
    other = Pair(tmp_path / "q", "qwen3", vocab_size=50)  # the second rank has no rows of it
    arguments = {"dtype": "bfloat16", "own": "16bit", "checkpoint_activations": True}
    one = other.one(**arguments)
    two = ShardedTrainer(2, timeout_s=60, micro_batch_tokens=60, **arguments)
    try:
        two.attach(other.parts)
        for trainer in (one, two):
            trainer.open_session("s", SPEC, {"lr": 1e-2}, seed=1)
            for step in range(2):
                trainer.train_sft("s", sequences(step))
        mine, its = one.adapter("s")[1], two.adapter("s")[1]
        moved = sum(float(abs(value).sum()) for name, value in mine.items() if "lora_B" in name)
        apart = sum(float(abs(value - its[name]).sum()) for name, value in mine.items() if "lora_B" in name)
        assert apart < 0.1 * moved
        assert two.memory()["own_base_bytes"] > 0
    finally:
        two.close()


def test_a_killed_rank_ends_the_group_at_once(pair: Pair) -> None:
    two = ShardedTrainer(2, timeout_s=60, micro_batch_tokens=60)
    try:
        two.attach(pair.parts)
        two.check()
        processes = list(two._processes)
        raised: list[BaseException] = []

        def train() -> None:
            try:
                while True:
                    two.logprobs(None, wide_sequences())
            except BaseException as err:
                raised.append(err)

        thread = threading.Thread(target=train)
        thread.start()
        time.sleep(0.5)
        began = time.monotonic()
        os.kill(processes[1].pid, signal.SIGKILL)
        thread.join(20)
        assert time.monotonic() - began < 10
        assert [type(err) for err in raised] == [TrainerDead]
        assert all(process.poll() is not None for process in processes)  # the other one went with it
        for call in (two.check, lambda: two.open_session("s", SPEC, {}, 0)):
            with pytest.raises(TrainerDead, match="lost one"):
                call()
    finally:
        two.close()
