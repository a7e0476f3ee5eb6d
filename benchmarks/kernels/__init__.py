"""Kernel benchmarks: `python -m benchmarks.kernels` times every kernel on the GPU that is there; `large.py` has the large batches."""
