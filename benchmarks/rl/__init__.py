"""Benchmarks of LoRA RL on a shared low-precision base; figures in `summary.py`, results in `results/rl_h200.json`."""
