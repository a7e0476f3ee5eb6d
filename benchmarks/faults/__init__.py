"""The fault campaign's parts; `python -m benchmarks.faults_cpu` runs it."""
