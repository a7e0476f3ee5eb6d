"""LoRA adapters as data: PEFT folders in and out, scaling folded into B, digests, and which version sits in which slot.

torch, safetensors, `epilora.quant` and `epilora.types` only; no engine.
"""
