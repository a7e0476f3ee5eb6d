"""Column and row shards of two CPU ranks against one rank, in the arithmetic that leaves activations unrounded.

W8A8 would not do: each rank of a row-parallel layer quantises its own part of the activations, so two ranks differ from one by
that alone.
"""

import json
import pathlib
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from epilora.types import GenerateRequest, Sampling

from . import tiny
from .conftest import run

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def even_model(monkeypatch, tmp_path):
    """The tiny model with heads that two ranks can share."""
    sizes = {"HEADS": 4, "KV_HEADS": 2}
    for name, value in sizes.items():
        monkeypatch.setattr(tiny, name, value)
    q, kv = 4 * tiny.HEAD_DIM, 2 * tiny.HEAD_DIM
    for leaf, shape in {"q_proj": (q, 96), "k_proj": (kv, 96), "v_proj": (kv, 96), "o_proj": (96, q)}.items():
        monkeypatch.setitem(tiny.SHAPES, leaf, ("self_attn", *shape))
    return tiny.make_model(tmp_path / "even")


def write_adapter(folder, version, tensors):
    """A PEFT folder, for the engine that loads by path."""
    folder.mkdir()
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, str(folder / "adapter_model.safetensors")
    )
    spec = version.spec
    config = {
        "peft_type": "LORA", "r": spec.rank, "lora_alpha": spec.alpha, "target_modules": list(tiny.SHAPES), "bias": "none",
        "task_type": "CAUSAL_LM",
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return str(folder)


def test_two_ranks_say_what_one_says(even_model, new_engine, tmp_path):
    adapters = [tiny.make_adapter(seed, size=0.08) for seed in (1, 2)]
    folders = [write_adapter(tmp_path / f"a{i}", *adapter) for i, adapter in enumerate(adapters)]
    script = pathlib.Path(__file__).with_name("two_ranks.py")
    ran = subprocess.run(
        [sys.executable, str(script), str(even_model), "op", *folders],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    lines = [line for line in ran.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, ran.stdout[-3000:] + ran.stderr[-3000:]
    result = json.loads(lines[0].removeprefix("RESULT "))
    assert result["kinds"] == [["lora_fused"], ["lora_fused"]]

    engine = new_engine(model_path=str(even_model), dtype="bfloat16", max_model_len=128)
    who = [None, adapters[0][0].digest, adapters[1][0].digest, None]

    async def one_rank(who):
        for version, tensors in adapters:
            if version.digest not in engine.stats().loaded:
                await engine.load_adapter(version, tensors)
        prompts = [tuple(3 + (5 * i + 3 * j) % 26 for j in range(8)) for i in range(4)]
        greedy = Sampling(16, temperature=0.0, logprobs=0, ignore_eos=True)
        return await engine.generate([GenerateRequest(f"{i}", prompts[i], greedy, who[i]) for i in range(4)])

    def difference(single):
        deltas = []
        for (tokens, logprobs), done in zip(result["said"], single, strict=True):
            same = next((n for n, (a, b) in enumerate(zip(tokens, done.token_ids, strict=True)) if a != b), 16)
            deltas.append((torch.tensor(logprobs[: same + 1]) - torch.tensor(done.logprobs[: same + 1])).abs())
        return torch.cat(deltas).mean().item(), sum(map(len, deltas))

    mean, count = difference(run(one_rank(who)))
    swapped, _ = difference(run(one_rank([who[1], who[2], who[1], who[3]])))
    print(f"mean |delta log p| two ranks against one {mean:.2e} over {count} tokens; with other adapters {swapped:.2e}")
    assert count > 40
    assert mean < 0.02  # bf16 activations, sums of two parts
    assert swapped > 5 * mean  # up to the first other token
