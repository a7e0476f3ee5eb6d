"""LoRA training on the engine's exported codes: no copy of the base, no vLLM, no Ray."""
