"""GPU kernels: FP8 GEMMs with LoRA adapters in them. torch and triton only; plain arguments; no vLLM, no Ray.

Every public function has a plain-torch reference of the same argument order beside it, named `<function>_ref`.
"""
