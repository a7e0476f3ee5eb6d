"""Gradients of the trainer against fp32: single projections, packed attention, whole models, dense and hybrid.

The reference of a projection is fp32 autograd on the dequantised weight; that of a model is the same model on the same base
computed in plain torch in fp32. A row holds the smallest cosine over its tensors.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.harness import Results
from epilora.quant.reference import dequantize, quantize_weight_ref
from epilora.trainer.attention import Packing, attention
from epilora.trainer.gemm_linear import GemmProjection
from epilora.trainer.linear import AdapterContext, LoraLinear, LoraPair, Segment
from epilora.trainer.logprob import selected_logprobs
from epilora.trainer.model import BaseModel, build_model
from epilora.trainer.session import Session
from epilora.types import AdapterSpec

from .random_base import RandomBase, random_base, shape_folder

PROJECTIONS = {"q": (4096, 4096), "k": (1024, 4096), "gate": (12288, 4096), "down": (4096, 12288)}  # Qwen3-8B, [N, K]
HEADS = {"qwen3-8b": (32, 8, 128), "qwen3.5-27b": (24, 4, 256)}  # query heads, key heads, width
SCALING = 2.0


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(F.cosine_similarity(a.detach().double().flatten(), b.detach().double().flatten(), dim=0))


def worst(found: Mapping[str, torch.Tensor], want: Mapping[str, torch.Tensor]) -> tuple[float, str]:
    """Smallest cosine and the tensor it belongs to."""
    return min((cosine(found[name], want[name]), name) for name in want)


def projection(
    results: Results, name: str, *, tokens: int, rank: int, mode: str, device: torch.device, dtype: Any
) -> None:
    n, k = PROJECTIONS[name]
    torch.manual_seed(0)
    weight = quantize_weight_ref(torch.randn(n, k, device=device) * k**-0.5)
    a = (torch.randn(rank, k, device=device) * k**-0.5).requires_grad_()
    b = (torch.randn(n, rank, device=device) * rank**-0.5).requires_grad_()
    x = torch.randn(tokens, k, device=device).to(dtype).requires_grad_()
    dy = torch.randn(tokens, n, device=device).to(dtype)
    context = AdapterContext((Segment(0, None, {"m": LoraPair(a, b, SCALING)}),))
    y = LoraLinear("m", GemmProjection(weight, None, context, mode))(x)
    y.backward(dy)
    exact = [t.detach().float().requires_grad_() for t in (x, a, b)]
    y_exact = F.linear(exact[0], dequantize(weight)) + SCALING * F.linear(F.linear(exact[0], exact[1]), exact[2])
    y_exact.backward(dy.float())
    found = {"y": y, "dx": x.grad, "dA": a.grad, "dB": b.grad}
    want = {"y": y_exact, "dx": exact[0].grad, "dA": exact[1].grad, "dB": exact[2].grad}
    least, tensor = worst(found, want)  # type: ignore[arg-type]
    results.add(
        f"gradient/projection/{name}", mode, tokens, [least], unit="cosine", digits=8, tensor=tensor, dtype=str(dtype)
    )


def packed_attention(
    results: Results, shape: str, lengths: tuple[int, ...], *, device: torch.device, dtype: torch.dtype
) -> None:
    heads, kv_heads, width = HEADS[shape]
    torch.manual_seed(0)
    total = sum(lengths)
    exact = [torch.randn(1, h, total, width, device=device, requires_grad=True) for h in (heads, kv_heads, kv_heads)]
    rounded = [t.detach().to(dtype).requires_grad_() for t in exact]
    packing, dy = Packing.of(lengths, device), torch.randn(1, total, heads, width, device=device)
    module = torch.nn.Identity()
    for tensors in (exact, rounded):
        out, _ = attention(module, *tensors, None, packing=packing)
        out.backward(dy.to(out.dtype))
    found = {name: t.grad for name, t in zip("qkv", rounded, strict=True)}
    want = {name: t.grad for name, t in zip("qkv", exact, strict=True)}
    least, tensor = worst(found, want)  # type: ignore[arg-type]
    results.add(
        f"gradient/attention/{shape}",
        "packed",
        total,
        [least],
        unit="cosine",
        digits=8,
        tensor=tensor,
        dtype=str(dtype),
    )


def model_gradients(model: BaseModel, session: Session, sequences: list[list[int]]) -> dict[str, torch.Tensor]:
    """Of the sum of log p of all but the first token of packed sequences, by adapter tensor."""
    session.grad.zero_()
    ids = torch.tensor([[i for sequence in sequences for i in sequence]], device=model.device)
    bounds = torch.tensor([len(sequence) for sequence in sequences]).cumsum(0).tolist()
    places = [p for end, s in zip(bounds, sequences, strict=True) for p in range(end - len(s), end - 1)]
    with model.adapter(session.pairs):
        hidden = model.hidden(ids, tuple(len(sequence) for sequence in sequences))[0, places]
        chosen, _ = selected_logprobs(hidden, model.head, ids[0, [p + 1 for p in places]][:, None])
        chosen.mean().backward()
    return {f"{name}.{side}": getattr(p, side).grad.clone() for name, p in session.pairs.items() for side in "ab"}


def whole_model(
    results: Results,
    shape: str,
    providers: Iterable[tuple[str, str, str, torch.dtype]],
    *,
    device: torch.device,
    lengths: tuple[int, ...],
    **changes: Any,
) -> None:
    """providers: (name, kind of base, gemm mode, dtype). changes: of the shape's configuration."""
    with tempfile.TemporaryDirectory() as folder:
        path = shape_folder(shape, Path(folder), **changes)
        for name, kind, mode, dtype in providers:
            base: RandomBase = random_base(path, "fp8", device, dtype=dtype)
            exact = build_model(base, torch.float32)
            session = Session("s", AdapterSpec(16, 32.0, ("all-linear",)), {}, 0, exact.linear_shapes, device)
            with torch.no_grad():
                noise = torch.randn(session.theta.shape, generator=torch.Generator().manual_seed(1))
                session.theta.add_(0.01 * noise.to(device))
            g = torch.Generator().manual_seed(2)
            sequences = [torch.randint(exact.vocab_size, (length,), generator=g).tolist() for length in lengths]
            want = model_gradients(exact, session, sequences)
            if kind != "fp8":
                base = random_base(path, kind, device, dtype=dtype)
            model = build_model(base, dtype, checkpoint_activations=True, gemm_mode=mode)
            least, tensor = worst(model_gradients(model, session, sequences), want)
            facts = {"tensor": tensor, "dtype": str(dtype), "tensors": len(want), "changes": changes}
            results.add(f"gradient/model/{shape}", name, sum(lengths), [least], unit="cosine", digits=8, **facts)


def run(results: Results, *, small: bool) -> None:
    """small: shapes that the interpreter can do, for tests without a GPU."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sixteen = torch.bfloat16 if device.type == "cuda" else torch.float16
    if small:
        tiny = {
            "num_hidden_layers": 2,
            "hidden_size": 32,
            "intermediate_size": 48,
            "vocab_size": 50,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 16,
        }
        arm = ("registers", "fp8", "registers", sixteen)
        whole_model(results, "qwen3-8b", [arm], device=device, lengths=(9, 5), **tiny)
        packed_attention(results, "qwen3-8b", (7, 12), device=device, dtype=sixteen)
        results.write()
        return
    for mode in ("panel", "registers"):
        for name in PROJECTIONS:
            projection(results, name, tokens=2048, rank=64, mode=mode, device=device, dtype=sixteen)
    results.write()
    for shape in HEADS:
        packed_attention(results, shape, (300, 1024, 77, 512), device=device, dtype=sixteen)
    results.write()
    # 16-bit weights through the vendor's GEMMs: what an ordinary 16-bit trainer's rounding alone does to the cosine.
    arms = [
        (f"{name}/{str(dtype).removeprefix('torch.')}", kind, mode, dtype)
        for dtype in (torch.bfloat16, torch.float16)
        for name, kind, mode in (
            ("panel", "fp8", "panel"),
            ("registers", "fp8", "registers"),
            ("16_bit", "bf16", "panel"),
        )
    ]
    cut = {"num_hidden_layers": 4, "vocab_size": 32768}
    whole_model(results, "qwen3-8b", arms, device=device, lengths=(300, 150, 77), **cut)
    results.write()
    whole_model(results, "qwen3.5-27b", arms[:1], device=device, lengths=(300, 150, 77), **cut)
    results.write()
