"""Our vLLM plugin against stock vLLM, end to end: `python -m benchmarks.serving --help`."""
