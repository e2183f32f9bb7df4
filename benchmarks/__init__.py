"""Measurements of torchdil; `python -m benchmarks` writes `benchmarks/results/core.json`."""
