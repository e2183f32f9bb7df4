"""Experiments; `python -m experiments` runs them and writes `results/index.html`."""
