"""Bases of the trainer's own: copied codes and 16-bit weights, resident and offloaded, compute the same; what they keep."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from epilora.trainer.attach import MappedBase
from epilora.trainer.own_base import OwnBase, copy_codes, sixteen_bit
from epilora.trainer.trainer import LoraTrainer

from .conftest import SPEC, Small, rollout_groups, sequences
from .test_model import flat

CPU = torch.device("cpu")


def trained(small: Small, **options) -> tuple[LoraTrainer, dict[str, float], bytes]:
    trainer = LoraTrainer(micro_batch_tokens=60, **options)
    trainer.attach([small.base.manifest])
    trainer.open_session("s", SPEC, {"lr": 1e-2}, seed=1)
    metrics = trainer.train_rl("s", rollout_groups(trainer, "s", noise=0.1), {"correction": "tis_token"})
    return trainer, metrics, trainer.state("s")


@pytest.mark.parametrize("offloaded", [False, True])
def test_a_copy_of_the_codes_trains_bit_for_bit_like_the_engines(small: Small, offloaded: bool) -> None:
    shared, shared_metrics, shared_state = trained(small)
    own, metrics, state = trained(small, own="fp8", offloaded=offloaded)
    assert state == shared_state
    assert metrics == shared_metrics
    assert own.base_checksum() == small.base.manifest.base_digest == shared.base_checksum()
    assert own.memory()["own_base_bytes"] >= small.base.manifest.num_bytes
    assert shared.memory()["own_base_bytes"] == 0


def test_an_offloaded_copy_leaves_the_device_between_calls(small_qwen: Small) -> None:
    mapped = MappedBase(small_qwen.base.manifest)
    base = copy_codes(mapped, CPU, offloaded=True)

    def on_device() -> int:
        return sum(group._flat.untyped_storage().nbytes() for group in base._groups.values())

    assert on_device() == 0
    with base.loaded():
        assert on_device() == base.num_bytes
        for name, operand in base.operands.items():
            assert torch.equal(
                operand.values.view(torch.uint8), mapped.operands[name].values.contiguous().view(torch.uint8)
            )
    assert on_device() == 0
    assert sorted(base._groups) == [-1, 0, 1]
    with base.loaded():  # what a caller writes there is not kept: the host's copy is the base
        base.operands["model.norm"].values.fill_(7.0)
    assert base.digest() == mapped.digest()


def test_sixteen_bit_weights_are_the_checkpoints(small_qwen: Small) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(small_qwen.folder, dtype=torch.float32)
    for options in ({}, {"offloaded": True}):
        trainer = LoraTrainer(own="16bit", **options)
        trainer.attach([small_qwen.base.manifest])
        found = flat(trainer.logprobs(None, sequences()))
        want = []
        for prompt, completion in sequences():
            logp = torch.log_softmax(model(input_ids=torch.tensor([[*prompt, *completion]])).logits[0], -1)
            want += [float(logp.detach()[len(prompt) - 1 + i, token]) for i, token in enumerate(completion)]
        torch.testing.assert_close(found, torch.tensor(want), rtol=1e-4, atol=1e-4)
    quantised = LoraTrainer()
    quantised.attach([small_qwen.base.manifest])
    assert (flat(quantised.logprobs(None, sequences())) - found).abs().max() > 1e-3  # rounding the weights is seen


def test_refusals(small_qwen: Small, tmp_path: Path) -> None:
    import dataclasses

    mapped = MappedBase(small_qwen.base.manifest)
    mapped.manifest = dataclasses.replace(mapped.manifest, model_path=str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"has no \*\.safetensors: a trainer with 16-bit weights of its own"):
        sixteen_bit(mapped, torch.float32, CPU, offloaded=False)
    with pytest.raises(ValueError, match="own='', offloaded=True; allowed: own in"):
        LoraTrainer(offloaded=True)
    with pytest.raises(ValueError, match="own='int4'"):
        LoraTrainer(own="int4")
    assert isinstance(copy_codes(mapped, CPU, offloaded=False), OwnBase)
