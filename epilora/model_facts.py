"""What a model's config.json says about sizes: its linear layers, the parameters beside them, keys, values and states.

Two families: dense decoders (Llama, Qwen2, Qwen3) and the hybrid Qwen3.5 (Qwen3.8-27B is one), in which most layers keep
a recurrent state per sequence (gated delta net) instead of keys and values per token. Module names and shapes are those of
transformers' `modeling_llama`, `modeling_qwen3` and `modeling_qwen3_5`. Not sized: mixtures of experts, a vision tower and
the multi-token-prediction layer (the engine loads neither of the last two).

Legend: N out features, K in features, H heads, D head width.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SHAPES = Path(__file__).parent / "models" / "shapes"
DENSE = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
HYBRID = ("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration")


@dataclass(frozen=True)
class Linear:
    """One linear module [N, K] of a layer. row_parallel: tensor parallelism splits K, else N."""

    name: str
    N: int
    K: int
    row_parallel: bool = False

    def adapter_parameters(self, rank: int, shards: int = 1) -> int:
        """Of A [rank, K] and B [N, rank] on one shard; the side that is not split is there whole."""
        n, k = (self.N, self.K // shards) if self.row_parallel else (self.N // shards, self.K)
        return rank * (n + k)


@dataclass(frozen=True)
class DeltaNet:
    """A gated delta net: key and value heads, their widths, the convolution's window, bytes per element of its state."""

    key_heads: int
    value_heads: int
    d_key: int
    d_value: int
    window: int
    state_width: int

    @property
    def values(self) -> int:
        return self.value_heads * self.d_value

    @property
    def conv(self) -> int:
        """Width of q | k | v, which the convolution runs over."""
        return 2 * self.key_heads * self.d_key + self.values

    @property
    def state(self) -> int:
        """Elements of one sequence's recurrent state in one layer."""
        return self.value_heads * self.d_key * self.d_value

    @property
    def bytes_per_sequence(self) -> int:
        """Recurrent state, and the convolution's window in 16 bit, of one layer."""
        return self.state * self.state_width + self.conv * (self.window - 1) * 2


@dataclass(frozen=True)
class Layer:
    """One kind of decoder layer, `count` times in the model.

    other_parameters: norms, biases, convolutions. q, kv: widths of the query and of keys (or values) of softmax attention,
    0 for a linear-attention layer. gated: the query projection also makes an output gate. delta: the linear attention.
    """

    kind: str
    count: int
    linears: tuple[Linear, ...]
    other_parameters: int
    q: int = 0
    kv: int = 0
    gated: bool = False
    delta: DeltaNet | None = None


@dataclass(frozen=True)
class ModelFacts:
    """Sizes of one model. kv_heads: of softmax attention, for splitting among shards."""

    architecture: str
    hidden: int
    ffn: int
    vocab: int
    tied: bool
    kv_heads: int
    layer_kinds: tuple[Layer, ...]

    @property
    def layers(self) -> int:
        return sum(kind.count for kind in self.layer_kinds)

    @property
    def linear_parameters(self) -> int:
        return sum(kind.count * linear.N * linear.K for kind in self.layer_kinds for linear in kind.linears)

    @property
    def out_channels(self) -> int:
        """Over all linear layers: how many per-channel scales there are."""
        return sum(kind.count * linear.N for kind in self.layer_kinds for linear in kind.linears)

    @property
    def embedding_parameters(self) -> int:
        return self.vocab * self.hidden * (1 if self.tied else 2)

    @property
    def other_parameters(self) -> int:
        """Everything that is not a linear layer: embeddings, head, norms, biases, convolutions."""
        return self.embedding_parameters + self.hidden + sum(k.count * k.other_parameters for k in self.layer_kinds)

    @property
    def parameters(self) -> int:
        return self.linear_parameters + self.other_parameters

    @property
    def kv_elements_per_token(self) -> int:
        return sum(2 * kind.count * kind.kv for kind in self.layer_kinds)

    @property
    def state_bytes_per_sequence(self) -> int:
        return sum(kind.count * kind.delta.bytes_per_sequence for kind in self.layer_kinds if kind.delta)

    def adapter_parameters(self, rank: int, shards: int = 1) -> int:
        """Of an adapter on every linear layer, as one of `shards` tensor-parallel ranks holds it."""
        return sum(
            kind.count * linear.adapter_parameters(rank, shards) for kind in self.layer_kinds for linear in kind.linears
        )


def committed_shapes() -> list[str]:
    """Names of the shapes that ship with the package."""
    return sorted(path.stem for path in SHAPES.glob("*.json"))


def read_facts(model_path: str | Path, shape: str = "") -> ModelFacts:
    """Facts of the model in folder `model_path`; if nothing is there, of the committed `shape` (models/shapes/NAME.json).

    Raises FileNotFoundError if there is neither; ValueError for an architecture that cannot be sized, a missing key, or a
    folder that holds another model than `shape` says.
    """
    path = Path(model_path) / "config.json"
    named = SHAPES / f"{shape}.json"
    if shape and not named.exists():
        raise ValueError(f"engine.shape={shape!r}: no such shape; committed are {committed_shapes()}")
    if not path.exists():
        if shape:
            return facts_of(json.loads(named.read_text()), source=str(named))
        raise FileNotFoundError(
            f"engine.model_path: no config.json in {model_path}; give a folder that holds a model, or size it by a committed "
            f"shape: engine.shape={'|'.join(committed_shapes())}"
        )
    facts = facts_of(json.loads(path.read_text()), source=str(path))
    if shape and (expected := facts_of(json.loads(named.read_text()), source=str(named))) != facts:
        raise ValueError(
            f"engine.shape={shape!r} ({expected.parameters:,} parameters) is not the model in {model_path} "
            f"({facts.architecture}, {facts.parameters:,}); leave engine.shape empty or name the right one"
        )
    return facts


def facts_of(config: Mapping[str, Any], *, source: str = "config") -> ModelFacts:
    """Facts of a parsed config.json; `source` names it in errors."""
    architecture = (config.get("architectures") or ["unknown"])[0]
    text = config.get("text_config", config)
    try:
        if architecture in HYBRID:
            kinds, kv_heads = _hybrid_layers(text)
        elif architecture in DENSE:
            kinds, kv_heads = _dense_layers(text, architecture)
        else:
            raise ValueError(
                f"{source}: architecture {architecture!r} cannot be sized; sized: {', '.join((*DENSE, *HYBRID))}"
            )
        return ModelFacts(
            architecture=architecture,
            hidden=text["hidden_size"],
            ffn=text["intermediate_size"],
            vocab=text["vocab_size"],
            tied=bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", False))),
            kv_heads=kv_heads,
            layer_kinds=kinds,
        )
    except KeyError as err:
        raise ValueError(f"{source}: {architecture} without {err.args[0]}; a complete config.json is needed") from err


def _mlp(text: Mapping[str, Any]) -> tuple[Linear, ...]:
    hidden, ffn = text["hidden_size"], text["intermediate_size"]
    return (
        Linear("gate_proj", ffn, hidden),
        Linear("up_proj", ffn, hidden),
        Linear("down_proj", hidden, ffn, row_parallel=True),
    )


def _attention(text: Mapping[str, Any], *, gated: bool) -> tuple[tuple[Linear, ...], int, int, int]:
    """Linears, query width, key width, kv heads. gated: q_proj also makes the output gate."""
    hidden, heads = text["hidden_size"], text["num_attention_heads"]
    kv_heads = text.get("num_key_value_heads") or heads
    width = text.get("head_dim") or hidden // heads
    q, kv = heads * width, kv_heads * width
    linears = (
        Linear("q_proj", 2 * q if gated else q, hidden),
        Linear("k_proj", kv, hidden),
        Linear("v_proj", kv, hidden),
        Linear("o_proj", hidden, q, row_parallel=True),
    )
    return linears, q, kv, kv_heads


def _dense_layers(text: Mapping[str, Any], architecture: str) -> tuple[tuple[Layer, ...], int]:
    linears, q, kv, kv_heads = _attention(text, gated=False)
    other = 2 * text["hidden_size"]
    if architecture.startswith("Qwen3"):
        other += 2 * (q // text["num_attention_heads"])  # norms of query and key heads
    if architecture.startswith("Qwen2") or text.get("attention_bias"):
        other += q + 2 * kv
    layer = Layer("attention", text["num_hidden_layers"], (*linears, *_mlp(text)), other, q=q, kv=kv)
    return (layer,), kv_heads


def _hybrid_layers(text: Mapping[str, Any]) -> tuple[tuple[Layer, ...], int]:
    hidden, layers = text["hidden_size"], text["num_hidden_layers"]
    interval = text.get("full_attention_interval", 4)
    kinds = text.get("layer_types") or [
        "full_attention" if (index + 1) % interval == 0 else "linear_attention" for index in range(layers)
    ]
    if len(kinds) != layers or set(kinds) - {"full_attention", "linear_attention"}:
        raise ValueError(
            f"layer_types has {len(kinds)} entries of kinds {sorted(set(kinds))}; wanted {layers} of full_attention and "
            "linear_attention"
        )
    linears, q, kv, kv_heads = _attention(text, gated=True)
    full = Layer(
        "attention", kinds.count("full_attention"), (*linears, *_mlp(text)),
        2 * hidden + 2 * (q // text["num_attention_heads"]), q=q, kv=kv, gated=True,
    )  # fmt: skip
    delta = DeltaNet(
        text["linear_num_key_heads"], text["linear_num_value_heads"], text["linear_key_head_dim"],
        text["linear_value_head_dim"], text["linear_conv_kernel_dim"],
        {"float32": 4, "bfloat16": 2, "float16": 2}[text.get("mamba_ssm_dtype", "float32")],
    )  # fmt: skip
    linear = Layer(
        "gated delta net",
        kinds.count("linear_attention"),
        (
            Linear("in_proj_qkv", delta.conv, hidden),
            Linear("in_proj_z", delta.values, hidden),
            Linear("in_proj_b", delta.value_heads, hidden),
            Linear("in_proj_a", delta.value_heads, hidden),
            Linear("out_proj", hidden, delta.values, row_parallel=True),
            *_mlp(text),
        ),
        2 * hidden + delta.conv * delta.window + 2 * delta.value_heads + delta.d_value,
        delta=delta,
    )
    return (full, linear), kv_heads
