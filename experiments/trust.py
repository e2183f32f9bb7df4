"""How wrong is a gradient when the inner problem is not solved, and does the report know?

The inner problem of a small network's energy is stopped at tolerances from 10⁻¹ to 10⁻¹², the backward solve likewise. The
error of y and of the adjoint g are compared with the exact ones (a tight solve, a dense factorisation) and with the report's
estimates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

import torchdil as dil


@dataclass(frozen=True)
class Config:
    """Sizes of the experiment."""

    samples: int = 32
    unknowns: int = 40
    hidden: int = 30
    tolerances: tuple[float, ...] = tuple(10.0**-k for k in range(1, 13))

    @staticmethod
    def preset(name: str) -> Config:
        return {"smoke": Config(samples=4, unknowns=10), "quick": Config(), "paper": Config(samples=256)}[name]


def run(config: Config, seed: int) -> dict[str, Any]:
    """True and estimated errors, the median over samples, for each tolerance."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    x, target = random(config.samples, config.unknowns), random(config.samples, config.unknowns)
    weights = random(config.unknowns, config.hidden) * 3 / config.unknowns**0.5

    def score(y: Tensor, x: Tensor) -> Tensor:
        return 0.1 * (y - x).square().sum(1) + softplus(y @ weights).sum(1) + 0.01 * y.pow(4).sum(1)

    def solve(solver: dil.Solver, linear_solver: dil.LinearSolver) -> tuple[Tensor, Tensor, dil.Report]:
        inputs = x.clone().requires_grad_()
        solution = dil.argmin(
            score, torch.zeros_like(x), (inputs,), solver=solver, linear_solver=linear_solver, on_failure="ignore"
        )
        (0.5 * (solution.value - target).square()).sum().backward()
        assert inputs.grad is not None
        return solution.value.detach(), inputs.grad, solution.report

    exact_y, exact_gradient, _ = solve(dil.Newton(rtol=1e-14), dil.Dense())
    rows = []
    for tolerance in config.tolerances:
        y, gradient, report = solve(dil.GradientDescent(rtol=tolerance), dil.CG(rtol=1e-12))
        _, truncated, backward = solve(dil.Newton(rtol=1e-14), dil.CG(rtol=tolerance))
        assert report.value_error is not None and backward.adjoint_error is not None
        size = exact_gradient.norm(dim=1)
        rows.append(
            {
                "tolerance": tolerance,
                "value_error": _median((y - exact_y).norm(dim=1)),
                "value_error_estimated": _median(report.value_error),
                "gradient_error_from_y": _median((gradient - exact_gradient).norm(dim=1) / size),
                "gradient_error_from_cg": _median((truncated - exact_gradient).norm(dim=1) / size),
                "gradient_error_from_cg_estimated": _median(backward.adjoint_error),
            }
        )
    return {"rows": rows, "samples": config.samples, "unknowns": config.unknowns, "seed": seed}


def figure(result: dict[str, Any]) -> Any:
    """Errors against the tolerance asked for, true and estimated."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = result["rows"]
    tolerance = [row["tolerance"] for row in rows]
    panels = (
        ("Forward solve stopped early", "value_error", "value_error_estimated", "error of y", "gradient_error_from_y"),
        (
            "Backward solve stopped early",
            "gradient_error_from_cg",
            "gradient_error_from_cg_estimated",
            "error of the gradient",
            None,
        ),
    )
    fig, axes = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True)
    for ax, (title, true, estimated, label, extra) in zip(axes, panels, strict=True):
        ax.loglog(tolerance, [row[true] for row in rows], "o-", color="#2f6fb0", label=f"{label}, true")
        ax.loglog(tolerance, [row[estimated] for row in rows], "s--", color="#d1701f", label=f"{label}, as reported")
        if extra:
            ax.loglog(tolerance, [row[extra] for row in rows], "^:", color="#4a9a5b", label="error of the gradient (relative)")
        ax.set_title(title, fontsize=10)
        ax.set_xlabel("relative tolerance")
        ax.invert_xaxis()
        ax.grid(alpha=0.3)
        ax.legend(fontsize=8, frameon=False)
    fig.tight_layout()
    return fig


def _median(a: Tensor) -> float:
    return float(a.median())
