"""A model folder of a real model's sizes with random weights on disk and a tokenizer whose words are its token ids.

For runs that need what drawing weights inside the engine does not give: equal weights for engines of different tensor-parallel
sizes, log-probabilities that depend on the input, a checkpoint a trainer can read. Linear weights are normal with deviation
1 / sqrt(K), so that activations keep their size; norms are ones. Token id 7 is written "t7".
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.serving.models import model_config

# A model that two ranks can share and a CPU can run.
TINY = {
    "num_hidden_layers": 2,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 200,
    "torch_dtype": "float32",
    "max_position_embeddings": 512,
}


def save_word_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write a fast tokenizer of `vocab_size` words: <unk>, <eos>, <pad>, t3, t4, ..."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "<eos>", "<pad>", *(f"t{i}" for i in range(3, vocab_size))]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.decoder = decoders.WordPiece(prefix="##", cleanup=False)  # words joined by one space
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.save_pretrained(folder)


def random_checkpoint(name: str, folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """Write config.json, tokenizer and weights of the shape `name` into `folder`, one file a layer; returns it.

    changes: fields of config.json to replace. Weights are drawn on the GPU if there is one.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    config = model_config(name) | changes
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    save_word_tokenizer(folder, config["vocab_size"])
    dtype = getattr(torch, config["torch_dtype"])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=dtype)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator(device).manual_seed(seed)
    files: dict[str, dict[str, torch.Tensor]] = {}
    for key, like in sorted(model.state_dict().items()):
        if key == "lm_head.weight" and config["tie_word_embeddings"]:
            continue
        parts = key.split(".")
        file = f"model-{int(parts[2]):05d}" if parts[1] == "layers" else "model-other"
        if len(like.shape) < 2:
            value = (torch.zeros if key.endswith("bias") else torch.ones)(like.shape, dtype=dtype, device=device)
        else:
            scale = 0.02 if "embed_tokens" in key else like.shape[1] ** -0.5
            value = torch.randn(like.shape, generator=generator, device=device, dtype=dtype).mul_(scale)
        files.setdefault(file, {})[key] = value.cpu()
    for file, tensors in files.items():
        save_file(tensors, str(folder / f"{file}.safetensors"), metadata={"format": "pt"})
    return folder
