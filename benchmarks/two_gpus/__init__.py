"""Two GPUs of one host: a tensor-parallel pair, and two engines with one trainer (`python -m benchmarks.two_gpus`)."""
