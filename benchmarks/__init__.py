"""Programs that measure EpiLoRA: kernels, serving and RL. Each writes JSON under `results/`; `report.py` makes the tables."""
