"""The only folder that imports vllm: its LoRA layers with our arithmetic, a worker extension, and an engine around it."""
