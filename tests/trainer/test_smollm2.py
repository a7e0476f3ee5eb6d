"""SmolLM2-135M: converted from GGUF, trained within the promised memory. Minutes on a CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from epilora.models.smollm2 import convert
from epilora.trainer.local_base import LocalBase, make_local_base

pytestmark = pytest.mark.slow

# Maps libraries as an engine would, so that their pages are shared as they are beside one; ends with its stdin.
NEIGHBOUR = "import sys, torch, transformers.modeling_utils; print('up', flush=True); sys.stdin.read()"
STEPS = """
import json, pickle, sys, torch
torch.set_num_threads(1)
from epilora.trainer.trainer import LoraTrainer
from epilora.types import AdapterSpec
manifest = pickle.loads(sys.stdin.buffer.read())
trainer = LoraTrainer(micro_batch_tokens=512, logprob_chunk=256, checkpoint_activations=True)
trainer.attach([manifest])
trainer.open_session("s", AdapterSpec(16, 32.0, ("all-linear",)), {"lr": 2e-4}, seed=0)
g = torch.Generator().manual_seed(0)
def ids(n):
    return tuple(torch.randint(40_000, (n,), generator=g).tolist())
losses = [trainer.train_sft("s", [(ids(64), ids(64)) for _ in range(4)])["loss"] for _ in range(2)]
intact = trainer.base_checksum() == manifest.base_digest
print(json.dumps({"memory": trainer.memory(), "losses": losses, "intact": intact}))
"""


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(tmp_path_factory.mktemp("smollm2") / "model")


@pytest.fixture(scope="module")
def base(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalBase]:
    made = make_local_base(smollm2, tmp_path_factory.mktemp("base"))
    yield made
    made.remove()


def test_converted_model_and_tokenizer_answer(smollm2: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert prompt.endswith("<|im_start|>assistant\n")
    inputs = tokenizer(prompt, return_tensors="pt")
    out = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(out[0, inputs["input_ids"].shape[1] :])


def test_peak_private_memory(base: LocalBase) -> None:
    """At most a quarter of the fp32 base plus 400 MiB, one projection widened at a time, and the codes are intact."""
    import pickle

    neighbour = subprocess.Popen([sys.executable, "-c", NEIGHBOUR], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert neighbour.stdout is not None
        assert neighbour.stdout.readline() == b"up\n"
        done = subprocess.run(
            [sys.executable, "-c", STEPS],
            input=pickle.dumps(base.manifest),
            capture_output=True,
            check=True,
            timeout=280,
        )
    finally:
        neighbour.communicate(b"", timeout=30)
    found = json.loads(done.stdout.splitlines()[-1])
    weights = sum(_count(e.values.shape) for e in base.manifest.entries)
    assert weights == 134_515_008
    limit = 4 * weights // 4 + (400 << 20)
    assert found["memory"]["peak_private_bytes"] <= limit, found
    assert found["memory"]["shared_bytes"] >= base.manifest.num_bytes
    assert found["memory"]["largest_dequantised_bytes"] == 4 * 576 * 1536
    assert found["intact"]
    assert found["losses"][1] != found["losses"][0]


def _count(shape: tuple[int, ...]) -> int:
    total = 1
    for extent in shape:
        total *= extent
    return total
