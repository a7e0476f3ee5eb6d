"""EpiLoRA: many tenants' LoRA adapters in the low-precision GEMM's epilogue, and LoRA RL on the engine's own weights."""

__version__ = "0.1.0"
