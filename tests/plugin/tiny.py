"""A tiny random Qwen3 checkpoint with a character tokenizer, and adapters for it, made from a seed."""

from __future__ import annotations

import json
import pathlib

import torch
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from epilora.adapters.digest import adapter_digest
from epilora.types import AdapterSpec, AdapterVersion

CHARACTERS = "0123456789+-*/=() abcdefgh"
VOCAB = 32
HIDDEN, LAYERS, HEADS, HEAD_DIM, KV_HEADS, FFN = 96, 2, 3, 32, 1, 288
SHAPES = {  # module leaf -> (parent, N, K)
    "q_proj": ("self_attn", HEADS * HEAD_DIM, HIDDEN),
    "k_proj": ("self_attn", KV_HEADS * HEAD_DIM, HIDDEN),
    "v_proj": ("self_attn", KV_HEADS * HEAD_DIM, HIDDEN),
    "o_proj": ("self_attn", HIDDEN, HEADS * HEAD_DIM),
    "gate_proj": ("mlp", FFN, HIDDEN),
    "up_proj": ("mlp", FFN, HIDDEN),
    "down_proj": ("mlp", HIDDEN, FFN),
}


def module_names(targets: tuple[str, ...] = tuple(SHAPES)) -> list[str]:
    return [f"model.layers.{layer}.{SHAPES[leaf][0]}.{leaf}" for layer in range(LAYERS) for leaf in targets]


def make_model(folder: pathlib.Path, *, tie: bool = True, seed: int = 0) -> pathlib.Path:
    """Write config, random fp32 weights (wide enough that quantising them shows) and tokenizer. No model code is
    imported.
    """
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)

    def normal(rows: int, columns: int, std: float) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * std

    tensors = {"model.embed_tokens.weight": normal(VOCAB, HIDDEN, 0.25), "model.norm.weight": torch.ones(HIDDEN)}
    if not tie:
        tensors["lm_head.weight"] = normal(VOCAB, HIDDEN, 0.25)
    for module in module_names():
        _, n, k = SHAPES[module.rsplit(".", 1)[-1]]
        tensors[f"{module}.weight"] = normal(n, k, 0.12)
    for layer in range(LAYERS):
        for norm, width in (("self_attn.q_norm", HEAD_DIM), ("self_attn.k_norm", HEAD_DIM)):
            tensors[f"model.layers.{layer}.{norm}.weight"] = torch.ones(width)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{norm}.weight"] = torch.ones(HIDDEN)
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "head_dim": HEAD_DIM,
        "num_key_value_heads": KV_HEADS,
        "intermediate_size": FFN,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "max_position_embeddings": 512,
        "tie_word_embeddings": tie,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    vocabulary = {"<pad>": 0, "<eos>": 1, "<unk>": 2, **{c: i + 3 for i, c in enumerate(CHARACTERS)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<pad>", "<eos>", "<unk>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}({{ m['content'] }}){% endfor %}{% if add_generation_prompt %}={% endif %}"
    special = {
        "chat_template": template,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(special))
    return folder


def make_adapter(
    seed: int,
    *,
    rank: int = 8,
    alpha: float = 16.0,
    targets: tuple[str, ...] = tuple(SHAPES),
    size: float = 0.15,
    name: str = "",
    version: int = 1,
    **spec_fields: object,
) -> tuple[AdapterVersion, dict[str, torch.Tensor]]:
    """A random adapter large enough to change what is said, with its version record."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for module in module_names(targets):
        _, n, k = SHAPES[module.rsplit(".", 1)[-1]]
        tensors[f"base_model.model.{module}.lora_A.weight"] = torch.randn(rank, k, generator=generator) * size
        tensors[f"base_model.model.{module}.lora_B.weight"] = torch.randn(n, rank, generator=generator) * size
    spec = AdapterSpec(rank, alpha, tuple(targets), **spec_fields)
    digest = adapter_digest(spec, tensors)
    return AdapterVersion(name or f"adapter{seed}", version, digest, spec), tensors
