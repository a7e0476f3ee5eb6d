"""Log-probabilities of given token sequences: by the engine, and by an fp32 evaluation of the engine's own codes.

The reference is plain torch: FP8 codes times their scales, activations never rounded, adapters in fp32. It reads the
engine's parameters, so both sides multiply the same codes; what differs is arithmetic alone. Decoders of the Llama, Qwen2
and Qwen3 kinds.

Legend: T tokens, H heads, D head width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

Adapter = Mapping[str, tuple[torch.Tensor, torch.Tensor]]  # module -> (A [R, K], B [N, R]); scaling already in B


def score_sequences(engine: Any, sequences: Sequence[tuple[Sequence[int], int]]) -> list[list[float]]:
    """Log-probabilities (plain log-softmax) of every token after the first; all sequences are submitted together.

    sequences: (token ids, adapter id or 0). Order kept.
    """
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(
        max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
    )
    found: dict[str, list[float]] = {}
    names = [f"score-{index}-{id(sequences)}" for index in range(len(sequences))]
    for name, (tokens, adapter) in zip(names, sequences, strict=True):
        lora = None
        if adapter:
            lora = LoRARequest(lora_name=f"adapter-{adapter}", lora_int_id=adapter, lora_path="in-memory")
        engine.add_request(name, {"prompt_token_ids": list(tokens)}, params, lora_request=lora)
    by_name = {name: tokens for name, (tokens, _) in zip(names, sequences, strict=True)}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                tokens, at = by_name[output.request_id], output.prompt_logprobs
                found[output.request_id] = [float(at[i][tokens[i]].logprob) for i in range(1, len(tokens))]
    return [found[name] for name in names]


def generate_greedy(
    engine: Any, prompts: Sequence[Sequence[int]], adapter: int, max_tokens: int, stop_ids: Sequence[int]
) -> list[list[int]]:
    """Greedy completions' token ids, order kept; all prompts are submitted together. adapter: id, 0 for none."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=0.0,
        stop_token_ids=list(stop_ids),
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    lora = None
    if adapter:
        lora = LoRARequest(lora_name=f"adapter-{adapter}", lora_int_id=adapter, lora_path="in-memory")
    for index, prompt in enumerate(prompts):
        engine.add_request(f"answer-{adapter}-{index}", {"prompt_token_ids": list(prompt)}, params, lora_request=lora)
    found: dict[str, list[int]] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                found[output.request_id] = list(output.outputs[0].token_ids)
    return [found[f"answer-{adapter}-{index}"] for index in range(len(prompts))]


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight.float()


def _rotate(x_THD: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotary embedding over halves, positions 0..T-1."""
    T, _, D = x_THD.shape
    frequencies = theta ** (-torch.arange(0, D, 2, device=x_THD.device, dtype=torch.float64) / D)
    angles = torch.arange(T, device=x_THD.device, dtype=torch.float64)[:, None] * frequencies
    cos, sin = angles.cos().float()[:, None], angles.sin().float()[:, None]
    first, second = x_THD.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Fp32Reference:
    """A decoder in fp32 over the parameters of a vLLM model."""

    def __init__(self, model: torch.nn.Module, config: Any) -> None:
        """model: vLLM's module, LoRA wrappers or not. config: its Hugging Face config.

        Raises ValueError for an architecture it does not evaluate.
        """
        architecture = config.architectures[0]
        if architecture not in ("Qwen3ForCausalLM", "Qwen2ForCausalLM", "LlamaForCausalLM"):
            raise ValueError(f"fp32 reference: architecture {architecture}; it evaluates Llama, Qwen2 and Qwen3")
        self.config = config
        self.parameters = {name.replace(".base_layer", ""): p.data for name, p in model.named_parameters()}
        rope = getattr(config, "rope_parameters", None) or {}
        if rope.get("rope_type", "default") != "default":
            raise ValueError(f"fp32 reference: rope_type {rope['rope_type']}; it evaluates the default")
        theta = rope.get("rope_theta")
        self.theta = float(config.rope_theta if theta is None else theta)
        self.heads = config.num_attention_heads
        self.kv_heads = config.num_key_value_heads
        self.width = getattr(config, "head_dim", None) or config.hidden_size // self.heads

    def weight(self, name: str) -> torch.Tensor:
        """[N, K] in fp32."""
        stored = self.parameters[f"{name}.weight"]
        if stored.dtype != torch.float8_e4m3fn:
            return stored.float()
        scale = self.parameters[f"{name}.weight_scale"].float().reshape(-1, 1)
        return stored.t().float() * scale  # vLLM keeps FP8 weights as [K, N]

    def linear(self, x: torch.Tensor, name: str, parts: Sequence[str], adapter: Adapter) -> torch.Tensor:
        """x W^T (+ bias) plus the adapter's update of each part, parts side by side."""
        y = x @ self.weight(name).t()
        bias = self.parameters.get(f"{name}.bias")
        if bias is not None:
            y = y + bias.float()
        parent, at = name.rpartition(".")[0], 0
        widths = self._widths(name, len(parts), y.shape[-1])
        for part, width in zip(parts, widths, strict=True):
            module = adapter.get(f"{parent}.{part}")
            if module is not None:
                a_RK, b_NR = module
                y[:, at : at + width] += (x @ a_RK.float().t()) @ b_NR.float().t()
            at += width
        return y

    def _widths(self, name: str, parts: int, total: int) -> list[int]:
        if name.endswith("qkv_proj"):
            return [self.heads * self.width, self.kv_heads * self.width, self.kv_heads * self.width]
        return [total // parts] * parts

    @torch.no_grad()
    def scores(self, tokens: Sequence[int], adapter: Adapter) -> list[float]:
        """Log-probabilities of every token after the first. Products in full fp32, whatever the process allows."""
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
        try:
            return self._scores(tokens, adapter)
        finally:
            torch.set_float32_matmul_precision(before)

    def _scores(self, tokens: Sequence[int], adapter: Adapter) -> list[float]:
        p, eps = self.parameters, self.config.rms_norm_eps
        device = p["model.norm.weight"].device
        ids = torch.tensor(list(tokens), device=device)
        T = len(tokens)
        embedding = p["model.embed_tokens.weight"]
        x = embedding[ids].float()
        mask = torch.full((T, T), float("-inf"), device=device).triu(1)
        for index in range(self.config.num_hidden_layers):
            layer = f"model.layers.{index}"
            h = _rms_norm(x, p[f"{layer}.input_layernorm.weight"], eps)
            qkv = self.linear(h, f"{layer}.self_attn.qkv_proj", ("q_proj", "k_proj", "v_proj"), adapter)
            q, k, v = qkv.split(self._widths("qkv_proj", 3, qkv.shape[-1]), dim=-1)
            q, k, v = (t.reshape(T, -1, self.width) for t in (q, k, v))
            if f"{layer}.self_attn.q_norm.weight" in p:
                q = _rms_norm(q, p[f"{layer}.self_attn.q_norm.weight"], eps)
                k = _rms_norm(k, p[f"{layer}.self_attn.k_norm.weight"], eps)
            q, k = _rotate(q, self.theta), _rotate(k, self.theta)
            k, v = (t.repeat_interleave(self.heads // self.kv_heads, dim=1) for t in (k, v))
            weights = (torch.einsum("thd,shd->hts", q, k) * self.width**-0.5 + mask).softmax(-1)
            attended = torch.einsum("hts,shd->thd", weights, v).reshape(T, -1)
            x = x + self.linear(attended, f"{layer}.self_attn.o_proj", ("o_proj",), adapter)
            h = _rms_norm(x, p[f"{layer}.post_attention_layernorm.weight"], eps)
            gate, up = self.linear(h, f"{layer}.mlp.gate_up_proj", ("gate_proj", "up_proj"), adapter).chunk(2, dim=-1)
            x = x + self.linear(torch.nn.functional.silu(gate) * up, f"{layer}.mlp.down_proj", ("down_proj",), adapter)
        head = p.get("lm_head.weight", embedding)
        logits = _rms_norm(x, p["model.norm.weight"], eps) @ head.float().t()
        logprobs = logits[:, : self.config.vocab_size].log_softmax(-1)
        return logprobs[:-1].gather(1, ids[1:, None])[:, 0].tolist()
