"""A base of a real model's shape with random weights, made on the device: speed and memory depend on shapes alone.

Linear weights are normal with deviation 1 / sqrt(K), so that activations keep their size through the layers, quantised to
FP8 per channel as an engine does. `kind="bf16"` gives the dequantised values in `dtype`: a 16-bit trainer of the same model.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import torch

from epilora.model_facts import SHAPES
from epilora.quant.formats import Format, ScaleAxis, format_of_torch_dtype
from epilora.quant.manifest import Location, TensorEntry, Transport, WeightEntry, WeightManifest
from epilora.quant.operand import Operand
from epilora.quant.reference import dequantize, quantize_weight_ref

KINDS = ("fp8", "bf16")


@dataclasses.dataclass(frozen=True)
class RandomBase:
    """What `epilora.trainer.model.build_model` reads of a base."""

    manifest: WeightManifest
    operands: dict[str, Operand]
    paths: tuple[str, ...] = ()

    def digest(self) -> str:
        """None is kept of random weights."""
        return self.manifest.base_digest

    def loaded(self) -> contextlib.AbstractContextManager[None]:
        """It is always there."""
        return contextlib.nullcontext()

    def wait_for_layer(self, index: int) -> None:
        """Nothing to wait for."""

    @property
    def num_bytes(self) -> int:
        """Of all tensors on the device."""
        return self.manifest.num_bytes


def shape_folder(name: str, folder: Path, **changes: Any) -> Path:
    """A folder with the config.json of a shape in `epilora/models/shapes`, as transformers reads it.

    changes: fields to replace, e.g. num_hidden_layers=2. Raises FileNotFoundError for an unknown shape.
    """
    path = SHAPES / f"{name}.json"
    if not path.exists():
        raise FileNotFoundError(f"shape {name!r}; known: {sorted(p.stem for p in SHAPES.glob('*.json'))}")
    facts = json.loads(path.read_text())
    config = dict(facts.get("text_config", facts))
    kinds = {"Qwen3": "qwen3", "Llama": "llama", "Qwen3_5": "qwen3_5_text", "Qwen2": "qwen2"}
    family = facts["architectures"][0].partition("For")[0]
    config |= {"model_type": kinds[family], "architectures": [f"{family}ForCausalLM"], "torch_dtype": "bfloat16"}
    config |= changes
    config.pop("about", None)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def random_base(folder: Path, kind: str, device: torch.device, *, dtype: torch.dtype = torch.bfloat16) -> RandomBase:
    """The base of the model in `folder`. dtype: of embeddings, norms and (kind "bf16") linears."""
    from torch import nn
    from transformers import AutoConfig, AutoModelForCausalLM

    if kind not in KINDS:
        raise ValueError(f"random_base: kind={kind!r}; allowed: {', '.join(KINDS)}")
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    generator = torch.Generator(device).manual_seed(0)

    def normal(shape: torch.Size, scale: float, kept: torch.dtype) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype).mul_(scale).to(kept)

    operands: dict[str, Operand] = {}
    slices: dict[str, tuple[tuple[str, int], ...]] = {}
    for name, module in model.named_modules():
        leaf = name.rpartition(".")[2]
        if isinstance(module, nn.Linear) and leaf != "lm_head":
            quantised = quantize_weight_ref(normal(module.weight.shape, module.in_features**-0.5, dtype))
            if kind == "bf16":
                quantised = Operand(dequantize(quantised).to(dtype), _format(dtype))
            operands[name], slices[name] = quantised, ((leaf, module.out_features),)
            continue
        for parameter_name, parameter in module.named_parameters(recurse=False):
            full = name if parameter_name == "weight" else f"{name}.{parameter_name}"
            if parameter.dim() > 1 or parameter_name != "weight":
                value = normal(parameter.shape, 0.02 if parameter.dim() == 2 else 0.3, dtype)
            else:  # a norm: Qwen3.5's are stored as the difference from one, but for the delta net's own
                zero = config.model_type == "qwen3_5_text" and not name.endswith("linear_attn.norm")
                value = torch.full(parameter.shape, 0.0 if zero else 1.0, device=device, dtype=dtype)
            operands[full], slices[full] = Operand(value, _format(dtype)), ()
    if config.tie_word_embeddings:
        operands.pop("lm_head", None)
    entries = tuple(_entry(name, operand, slices[name]) for name, operand in operands.items())
    return RandomBase(WeightManifest("random", str(folder), "random", 0, 1, entries), operands)


def _format(dtype: torch.dtype) -> Format:
    return format_of_torch_dtype(str(dtype).removeprefix("torch."))


def _entry(name: str, operand: Operand, slices: tuple[tuple[str, int], ...]) -> WeightEntry:
    def stored(tensor: torch.Tensor) -> TensorEntry:
        kind = str(tensor.dtype).removeprefix("torch.")
        return TensorEntry(tuple(tensor.shape), tuple(tensor.stride()), kind, Location(Transport.SHM))

    scales = None if operand.scales is None else stored(operand.scales)
    axis = ScaleAxis.NONE if scales is None else operand.axis
    return WeightEntry(name, operand.format, axis, stored(operand.values), scales, slices=slices)


def random_rollouts(
    vocabulary: int, groups: int, group_size: int, prompt: int, completion: int, *, seed: int = 0
) -> list[Any]:
    """Rollout groups of random tokens whose reward is their share of even ids: it varies in every group.

    Every completion has `completion` tokens. Log-probabilities are
    those of the uniform distribution.
    """
    from epilora.types import Rollout, RolloutGroup

    g = torch.Generator().manual_seed(seed)
    made = []
    for i in range(groups):
        question = tuple(torch.randint(vocabulary, (prompt,), generator=g).tolist())
        rollouts = []
        for _ in range(group_size):
            answer = tuple(torch.randint(vocabulary, (completion,), generator=g).tolist())
            reward = sum(token % 2 == 0 for token in answer) / len(answer)
            rollouts.append(
                Rollout(f"random-{i}", question, answer, (-math.log(vocabulary),) * completion, reward, ("v0",))
            )
        made.append(RolloutGroup(f"random-{i}", tuple(rollouts)))
    return made
