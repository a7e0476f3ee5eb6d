"""The mapped model against transformers on the dequantised checkpoint: log-probabilities, gradients, and no copies."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from epilora.quant.reference import dequantize
from epilora.trainer.attach import MappedBase
from epilora.trainer.linear import slice_rows
from epilora.trainer.model import build_model
from epilora.trainer.trainer import LoraTrainer
from epilora.types import AdapterSpec

from .conftest import SPEC, Small, rollout_groups, sequences


def dequantised_model(small: Small, dtype: torch.dtype = torch.float32):
    """transformers' model of the checkpoint with every linear weight replaced by its dequantised codes."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(small.folder, dtype=torch.float32)
    base = MappedBase(small.base.manifest)
    for entry in small.base.manifest.entries:
        start = 0
        for leaf, rows in entry.slices:
            module = model.get_submodule(f"{entry.name.rpartition('.')[0]}.{leaf}")
            part = slice_rows(base.operands[entry.name], start, start + rows)
            module.weight.data = dequantize(part).clone()
            start += rows
    return model.to(dtype)


def reference_logprobs(model, pairs) -> list[torch.Tensor]:
    """One sequence at a time, no padding."""
    out = []
    for prompt, completion in pairs:
        ids = torch.tensor([[*prompt, *completion]])
        logp = torch.log_softmax(model(input_ids=ids).logits[0].float(), -1)
        rows = torch.arange(len(prompt) - 1, ids.shape[1] - 1)
        out.append(logp[rows, ids[0, len(prompt) :]])
    return out


def flat(logprobs: list[list[float]]) -> torch.Tensor:
    return torch.tensor([value for sequence in logprobs for value in sequence])


def _attached(small: Small, **options) -> LoraTrainer:
    trainer = LoraTrainer(**options)
    trainer.attach([small.base.manifest])
    return trainer


@pytest.mark.parametrize("budget", [24, 10_000])
def test_base_logprobs_equal_transformers(small: Small, budget: int) -> None:
    trainer = _attached(small, micro_batch_tokens=budget)
    pairs = sequences()
    found = trainer.logprobs(None, pairs)
    expected = reference_logprobs(dequantised_model(small), pairs)
    for mine, reference in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.tensor(mine), reference, rtol=1e-5, atol=1e-5)


def test_packed_batches_compute_what_padded_ones_do(small: Small) -> None:
    """Sequences in one row see nothing of one another; gradients too."""
    found = []
    for packed in (False, True):
        trainer = _attached(small, micro_batch_tokens=40, checkpoint_activations=True)
        trainer._packed = packed
        trainer.open_session("s", SPEC, {"lr": 1e-2}, seed=3)
        trainer.train_sft("s", sequences(seed=1))
        metrics = trainer.train_rl("s", rollout_groups(trainer, "s", noise=0.1), {"correction": "tis_token"})
        found.append((trainer.logprobs("s", sequences()), metrics, trainer._sessions["s"].grad.clone()))
    (padded, padded_metrics, padded_grad), (packed_logp, packed_metrics, packed_grad) = found
    torch.testing.assert_close(flat(packed_logp), flat(padded), rtol=1e-4, atol=1e-4)
    assert packed_metrics == pytest.approx(padded_metrics, rel=2e-3, abs=1e-4)
    assert float(F.cosine_similarity(packed_grad, padded_grad, dim=0)) > 0.99999


@pytest.mark.parametrize("checkpoint_activations", [False, True])
def test_adapter_gradients_equal_autograd_in_fp32(small: Small, checkpoint_activations: bool) -> None:
    trainer = _attached(small, micro_batch_tokens=24, checkpoint_activations=checkpoint_activations)
    trainer.open_session("s", SPEC, {"lr": 1e-9}, seed=3)
    session = trainer._sessions["s"]
    with torch.no_grad():
        session.theta.add_(0.1 * torch.randn(session.theta.shape, generator=torch.Generator().manual_seed(0)))
    pairs = sequences()
    model = dequantised_model(small)
    model.requires_grad_(False)
    leaves = {}
    for name, pair in session.pairs.items():
        a, b = pair.a.detach().clone().requires_grad_(), pair.b.detach().clone().requires_grad_()
        leaves[name] = (a, b)
        module = model.get_submodule(name)
        module.forward = lambda x, m=module, a=a, b=b, s=pair.scaling: (
            F.linear(x, m.weight) + s * F.linear(F.linear(x, a), b)
        )
    logp = torch.cat(reference_logprobs(model, pairs))
    (-logp.mean()).backward()
    metrics = trainer.train_sft("s", pairs)
    assert metrics["loss"] == pytest.approx(-logp.mean().item(), rel=1e-5)
    clip = min(1.0, session.optimizer.grad_clip / metrics["grad_norm"])
    assert len(leaves) == len(session.pairs) >= 14
    for name, (a, b) in leaves.items():
        for mine, reference in ((session.pairs[name].a.grad, a.grad), (session.pairs[name].b.grad, b.grad)):
            cosine = F.cosine_similarity(mine.flatten().double(), reference.flatten().double(), dim=0)
            assert cosine >= 0.9999, (name, cosine)
            torch.testing.assert_close(mine, reference * clip, rtol=2e-3, atol=1e-6)


@pytest.mark.parametrize(("dtype", "worst"), [("bfloat16", 0.15), ("float16", 0.02)])
def test_sixteen_bit_activations_stay_near_fp32(small_qwen: Small, dtype: str, worst: float) -> None:
    pairs = sequences()
    exact = flat(_attached(small_qwen).logprobs(None, pairs))
    rounded = flat(_attached(small_qwen, dtype=dtype).logprobs(None, pairs))
    assert 0 < float((exact - rounded).abs().max()) < worst


def test_nothing_of_the_base_is_copied(small: Small) -> None:
    base = MappedBase(small.base.manifest)
    model = build_model(base, torch.float32)
    mapped = [o.values.untyped_storage().data_ptr() for o in base.operands.values()]
    low, high = min(mapped), max(o.values.data_ptr() + o.values.nbytes for o in base.operands.values())
    assert low <= model.head.data_ptr() < high
    assert low <= model.body.embed_tokens.table.data_ptr() < high
    parameters = list(model.body.parameters())
    assert parameters
    assert all(low <= p.data_ptr() < high for p in parameters)
    assert not any(p.requires_grad for p in parameters)
    assert sum(b.nbytes for b in model.body.buffers()) < 1024  # rotary frequencies only


def test_peft_and_transformers_read_the_exported_adapter(small_qwen: Small, tmp_path: Path) -> None:
    """Stock peft on the dequantised base gives the trainer's log-probabilities; the largest difference is < 2e-5."""
    from peft import PeftModel

    from epilora.adapters.peft_io import write_peft

    trainer = _attached(small_qwen)
    spec = AdapterSpec(
        4, 8.0, ("q_proj", "v_proj", "down_proj"), rank_pattern=(("v_proj", 2),), alpha_pattern=(("down_proj", 3.0),)
    )
    trainer.open_session("s", spec, {"lr": 1e-2}, seed=0)
    for step in range(3):
        trainer.train_rl("s", rollout_groups(trainer, "s", seed=step), {"name": "grpo"})
    exported, tensors = trainer.adapter("s")
    write_peft(tmp_path / "adapter", exported, tensors)
    peft_model = PeftModel.from_pretrained(dequantised_model(small_qwen), str(tmp_path / "adapter")).eval()
    pairs = sequences()
    mine = flat(trainer.logprobs("s", pairs))
    theirs = torch.cat([r.detach() for r in reference_logprobs(peft_model, pairs)])
    plain = flat(trainer.logprobs(None, pairs))
    assert float((mine - theirs).abs().max()) < 2e-5
    assert float((mine - plain).abs().max()) > 1e-2  # the adapter does something


def test_unsupported_models_and_missing_weights_are_named(small_qwen: Small, tmp_path: Path) -> None:
    import dataclasses
    import shutil

    manifest = small_qwen.base.manifest
    short = dataclasses.replace(manifest, entries=tuple(e for e in manifest.entries if "0.mlp.down_proj" not in e.name))
    base = MappedBase(short, verify=False)
    with pytest.raises(KeyError, match=r"no weight for model\.layers\.0\.mlp\.down_proj"):
        build_model(base, torch.float32)
    shutil.copytree(small_qwen.folder, tmp_path / "odd")
    (tmp_path / "odd" / "config.json").write_text('{"model_type": "gpt2"}')
    odd = MappedBase(dataclasses.replace(manifest, model_path=str(tmp_path / "odd")))
    with pytest.raises(ValueError, match="model_type='gpt2' is not supported"):
        build_model(odd, torch.float32)
