"""Sizes against what is known from elsewhere: published parameter counts, the paper's tables, and what autograd keeps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from epilora import sizing
from epilora.config import load_config
from epilora.model_facts import ModelFacts, committed_shapes, facts_of, read_facts

GIB = sizing.GIB
HYBRID_TEXT = {
    "hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 48, "linear_conv_kernel_dim": 4, "vocab_size": 64, "tie_word_embeddings": False,
}  # fmt: skip
DENSE = {
    "architectures": ["Qwen3ForCausalLM"], "hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 64, "tie_word_embeddings": False,
}  # fmt: skip
HYBRID = {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": HYBRID_TEXT}


def shape(name: str) -> ModelFacts:
    return read_facts("/nowhere", name)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [  # as their model cards and safetensors indexes state them
        ("qwen3-8b", 8_190_735_360),
        ("llama-3.1-8b", 8_030_261_248),
        ("qwen2.5-72b", 72_706_203_648),
    ],
)
def test_parameters_of_published_models(name: str, parameters: int) -> None:
    assert shape(name).parameters == parameters


@pytest.mark.parametrize(
    ("name", "bf16_gib", "fp8_gib"),
    [("qwen3.5-9b", 16.7, 10.2), ("qwen3.5-27b", 50.1, 27.4)],  # EpiLoRA, arXiv 2611.03899, Table 36
)
def test_hybrid_bases_weigh_what_the_paper_measured(name: str, bf16_gib: float, fp8_gib: float) -> None:
    facts = shape(name)
    assert round(sizing.base_bytes(facts, "16bit", 2) / GIB, 1) == bf16_gib
    assert round(sizing.base_bytes(facts, "fp8", 2) / GIB, 1) == fp8_gib


def test_tenants_keep_their_share_of_the_cache_while_a_trainer_has_the_rest() -> None:
    facts = shape("qwen3-8b")
    overrides = ["engine.kv_cache_mib=4096", "engine.tenant_kv_share=0.25", "engine.model_path=x", "task.path=x:y"]
    engine = load_config(None, overrides).engine
    for kv_kept, training_gib in ((False, 1.0), (True, 4.0)):
        cache = [line for line in sizing.engine_lines(engine, facts, kv_kept) if "KV cache" in line.what]
        assert sum(line.count_bytes for line in cache if line.rollouts) == 4 * GIB
        assert sum(line.count_bytes for line in cache if line.training) == training_gib * GIB
    with pytest.raises(ValueError, match=r"tenant_kv_share=1\.0; allowed: 0 to below 1"):
        load_config(None, [*overrides, "engine.tenant_kv_share=1.0"])


def test_nvfp4_stores_a_weight_in_four_bits_and_a_scale_per_sixteen() -> None:
    facts = shape("qwen3-8b")
    assert sizing.base_bytes(facts, "nvfp4", 2) == facts.linear_parameters * 9 // 16 + 2 * facts.other_parameters


def test_every_shape_equals_the_repository_wide_projection_list() -> None:
    from benchmarks.shapes import MODELS

    for name in set(committed_shapes()) & set(MODELS):
        small = {"in_proj_b", "in_proj_a"}  # the benchmarks leave these out
        counted = sum(
            kind.count * linear.N * linear.K
            for kind in shape(name).layer_kinds
            for linear in kind.linears
            if linear.name not in small
        )
        assert counted == sum(p.per_model * p.K * p.N for p in MODELS[name]), name


def _transformers_model(config: dict[str, Any]) -> nn.Module:
    from transformers import Qwen3_5TextConfig, Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM

    with torch.device("meta"):
        if config is HYBRID:
            return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**HYBRID_TEXT))
        return Qwen3ForCausalLM(Qwen3Config(**{k: v for k, v in DENSE.items() if k != "architectures"}))


@pytest.mark.parametrize("config", [DENSE, HYBRID], ids=["dense", "hybrid"])
def test_counts_equal_transformers_own_model(config: dict[str, Any]) -> None:
    facts, model = facts_of(config), _transformers_model(config)
    assert facts.parameters == sum(p.numel() for p in model.parameters())
    linears = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear) and n != "lm_head"]
    assert facts.linear_parameters == sum(m.weight.numel() for _, m in linears)
    assert facts.adapter_parameters(3) == sum(3 * sum(m.weight.shape) for _, m in linears)


class _InputKept(torch.autograd.Function):
    """A product that keeps its input, as a linear layer with an adapter does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x @ weight.t()


class _Linear(nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = weight.detach()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, x.shape[-1])
        return _InputKept.apply(flat, self.weight).reshape(*x.shape[:-1], -1)


def _kept_bytes_per_token(layer: nn.Module, hidden: int, rotary: int, tokens: int = 1024) -> float:
    layer = layer.to(torch.bfloat16).requires_grad_(False)
    for name, module in list(layer.named_modules()):
        if isinstance(module, nn.Linear):
            layer.set_submodule(name, _Linear(module.weight))
    x = torch.randn(1, tokens, hidden, dtype=torch.bfloat16, requires_grad=True)
    angles = torch.zeros(1, tokens, rotary, dtype=torch.bfloat16)
    own = {p.untyped_storage().data_ptr() for p in (*layer.parameters(), x, angles)}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        layer(x, position_embeddings=(angles, angles), attention_mask=None)
    return sum(t.untyped_storage().nbytes() for t in kept.values()) / tokens


def _layers() -> list[tuple[str, Any, nn.Module, int]]:
    from transformers import Qwen3_5TextConfig, Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer

    torch.manual_seed(0)
    dense = Qwen3Config(**{k: v for k, v in DENSE.items() if k != "architectures"})
    hybrid = Qwen3_5TextConfig(**HYBRID_TEXT)
    dense._attn_implementation = hybrid._attn_implementation = "sdpa"
    full, delta = facts_of(HYBRID).layer_kinds
    rotary = int(32 * hybrid.rope_parameters.get("partial_rotary_factor", 1.0))
    return [
        ("dense", facts_of(DENSE).layer_kinds[0], Qwen3DecoderLayer(dense, 0), 32),
        ("gated attention", full, Qwen3_5DecoderLayer(hybrid, 3), rotary),
        ("gated delta net", delta, Qwen3_5DecoderLayer(hybrid, 0), rotary),
    ]


@pytest.mark.parametrize(
    ("which", "share"), [(0, 0.01), (1, 0.03), (2, 0.01)], ids=["dense", "gated-attention", "gated-delta-net"]
)
def test_activations_are_what_autograd_keeps_of_transformers_layers(which: int, share: float) -> None:
    _, kind, layer, rotary = _layers()[which]
    facts = facts_of(DENSE if which == 0 else HYBRID)
    measured = _kept_bytes_per_token(layer, facts.hidden, rotary)
    assert sizing.layer_saved_bytes(kind, facts, 2) == pytest.approx(measured, rel=share)


def test_kv_and_states_of_a_hybrid_model() -> None:
    facts = shape("qwen3.5-27b")
    assert facts.kv_elements_per_token == 16 * 2 * 4 * 256  # 16 of 64 layers keep keys and values
    assert facts.state_bytes_per_sequence == 48 * (48 * 128 * 128 * 4 + (2 * 2048 + 6144) * 3 * 2)
    engine = load_config(
        None, ["engine.model_path=m", "task.path=a:b", "engine.dtype=bfloat16", "engine.max_model_len=4096",
               "engine.kv_cache_mib=8192", "loss.correction=tis_token"],
    ).engine  # fmt: skip
    assert "20 sequences of 4096 tokens" in sizing.kv_capacity(engine, facts)


def test_a_tensor_parallel_rank_holds_its_share_of_an_adapter() -> None:
    facts = facts_of(DENSE)
    per_layer = 0
    for n, k, row in [
        (128, 256, 0),
        (64, 256, 0),
        (64, 256, 0),
        (256, 128, 1),
        (640, 256, 0),
        (640, 256, 0),
        (256, 640, 1),
    ]:
        per_layer += n + k // 2 if row else n // 2 + k
    assert facts.adapter_parameters(8, shards=2) == 2 * 8 * per_layer


def test_a_shape_that_is_not_the_folders_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DENSE))
    assert read_facts(tmp_path) == facts_of(DENSE)
    with pytest.raises(ValueError, match=r"'qwen3-8b' \(8,190,735,360 parameters\) is not the model in"):
        read_facts(tmp_path, "qwen3-8b")


def test_neither_folder_nor_shape_says_what_to_do() -> None:
    with pytest.raises(FileNotFoundError, match=r"engine\.shape=.*qwen3\.5-27b"):
        read_facts("/nowhere")
    with pytest.raises(ValueError, match="no such shape; committed are"):
        read_facts("/nowhere", "qwen9-1t")


def test_incomplete_or_strange_configs_are_named() -> None:
    with pytest.raises(ValueError, match="MambaForCausalLM"):
        facts_of({**DENSE, "architectures": ["MambaForCausalLM"]})
    with pytest.raises(ValueError, match="without intermediate_size"):
        facts_of({k: v for k, v in DENSE.items() if k != "intermediate_size"})
    with pytest.raises(ValueError, match="sliding"):
        facts_of({**HYBRID, "text_config": {**HYBRID_TEXT, "layer_types": ["sliding_attention"] * 4}})
    with pytest.raises(ValueError, match="'int4_awq' cannot be sized"):
        sizing.base_format("int4_awq")


def test_bounds_are_those_of_the_code_they_describe() -> None:
    from epilora.kernels.training import PANEL_BYTES
    from epilora.trainer import logprob

    assert sizing.GPU_PANEL_BYTES == PANEL_BYTES
    assert sizing.GPU_LOGITS_CHUNK_BYTES == logprob.GPU_LOGITS_CHUNK_BYTES
    assert sizing.CPU_LOGITS_CHUNK_BYTES == logprob.LOGITS_CHUNK_BYTES


def test_the_trainers_memory_is_what_an_h200_measured() -> None:
    """`benchmarks.rl`, train_speed: Qwen3-8B's shape, a base of the trainer's own, packed micro-batches, checkpointing."""
    rows = json.loads((Path(__file__).parent.parent / "benchmarks" / "results" / "rl_h200.json").read_text())["rows"]
    row = next(r for r in rows if r["case"] == "train_speed/qwen3-8b" and r["provider"] == "fp8_registers")
    config = load_config(
        None, ["engine.model_path=m", "task.path=a:b", "engine.num_gpus=0.5", "engine.dtype=bfloat16", "trainer.dtype=bfloat16",
               f"lora.rank={row['rank']}", f"engine.max_lora_rank={row['rank']}", "engine.max_model_len=64",
               f"trainer.micro_batch_tokens={row['micro_batch_tokens']}", "trainer.checkpoint_activations=true"],
    )  # fmt: skip
    facts = shape("qwen3-8b")
    states, *computing = sizing.trainer_lines(config, facts, on_gpu=True)
    held = sizing.base_bytes(facts, "fp8", 2) + states.count_bytes
    assert held == pytest.approx(row["held_bytes"], rel=0.005)
    assert sum(line.count_bytes for line in computing) == pytest.approx(row["step_peak_bytes"], rel=0.05)
