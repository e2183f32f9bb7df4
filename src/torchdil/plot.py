"""A report as a figure: residuals of both solves, what the backward solve saw of J, and the estimated errors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# Up to so many samples have a line each; of more, the median and the range are drawn.
_LINES = 32
_FORWARD, _BACKWARD = "#2f6fb0", "#d1701f"


def plot_report(report: Any) -> Any:
    """The figure of a `Report`: needs matplotlib."""
    try:
        from matplotlib import pyplot as plt
    except ImportError as error:
        raise ImportError("report.plot() needs matplotlib: pip install matplotlib.") from error
    figure, axes = plt.subplots(2, 2, figsize=(9.5, 6.4), layout="constrained")
    (forward, backward), (spectrum, errors) = axes
    _history(forward, "Forward solve, ‖F(y)‖", report.forward, _FORWARD)
    _history(backward, "Backward solve, ‖v - Jᵀg‖", report.backward, _BACKWARD)
    _spectrum(spectrum, report.ritz)
    _errors(errors, {"error of y": (report.value_error, _FORWARD), "relative error of g": (report.adjoint_error, _BACKWARD)})
    return figure


def _history(axis: Any, title: str, outcome: Any, colour: str) -> None:
    axis.set_title(title, fontsize=10)
    if outcome is None or not outcome.stats.history or outcome.status.numel() == 0:
        _nothing(axis, "not run" if outcome is None else f"{outcome.stats.method}: no steps to show")
        return
    stats = outcome.stats
    residuals = torch.stack([r.reshape(-1) for r in stats.history]).double().cpu()  # (steps + 1, B)
    known = torch.isfinite(residuals)
    lost = int((~known[-1]).sum())
    if lost:
        axis.set_title(f"{title} ({lost} not finite)", fontsize=10)
    residuals = torch.where(known, residuals, torch.nan)
    steps = range(len(residuals))
    marker = "o" if len(residuals) <= 30 else None
    if residuals.shape[1] <= _LINES:
        axis.plot(
            steps, residuals, color=colour, alpha=max(0.25, residuals.shape[1] ** -0.5), linewidth=1.2, marker=marker, ms=3
        )
    else:
        low, high = residuals.nan_to_num(nan=torch.inf).amin(dim=1), residuals.nan_to_num(nan=-torch.inf).amax(dim=1)
        axis.fill_between(steps, low, high, color=colour, alpha=0.25, linewidth=0, label="all samples")
        axis.plot(steps, residuals.nanmedian(dim=1).values, color=colour, label="median")
        axis.legend(fontsize=8, frameon=False)
    axis.axhline(float(stats.tolerance.max()), color="0.4", linestyle="--", linewidth=1)
    axis.annotate(
        "tolerance",
        (0.99, float(stats.tolerance.max())),
        xycoords=("axes fraction", "data"),
        ha="right",
        va="bottom",
        fontsize=8,
        color="0.4",
    )
    _log(axis, residuals)
    _numbered(axis, f"step of {stats.method}")


def _spectrum(axis: Any, ritz: tuple[Tensor, Tensor] | None) -> None:
    axis.set_title("Ritz or singular values seen, smallest to largest", fontsize=10)
    if ritz is None:
        _nothing(axis, "not known")
        return
    low, high = (t.reshape(-1).double().cpu() for t in ritz)
    samples = range(len(low))
    axis.vlines(samples, low, high, color=_BACKWARD, alpha=0.5, linewidth=max(1.0, 6 - len(low) / 8))
    axis.plot(samples, low, "v", samples, high, "^", color=_BACKWARD, ms=4)
    values = torch.cat([low, high])
    if bool((values[~values.isnan()] < 0).any()):
        axis.axhline(0, color="0.4", linewidth=1)
        axis.set_yscale("symlog", linthresh=max(float(values.abs().nan_to_num().max()) * 1e-6, 1e-300))
    else:
        _log(axis, values)
    _numbered(axis, "sample")


def _errors(axis: Any, estimates: dict[str, tuple[Tensor | None, str]]) -> None:
    axis.set_title("Estimated errors", fontsize=10)
    known = {
        name: (error.reshape(-1).double().cpu(), colour) for name, (error, colour) in estimates.items() if error is not None
    }
    if not known:
        _nothing(axis, "not known")
        return
    for (name, (error, colour)), marker in zip(known.items(), "os", strict=False):
        axis.plot(range(len(error)), error, marker, color=colour, ms=5, label=name)
    _log(axis, torch.cat([error for error, _ in known.values()]))
    _numbered(axis, "sample")
    axis.legend(fontsize=8, frameon=False)


def _numbered(axis: Any, label: str) -> None:
    """Whole numbers along x, and a grid."""
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.margins(x=0.04 if axis.dataLim.width else 0.5)
    axis.set_xlabel(label, fontsize=9)
    axis.grid(alpha=0.3)


def _log(axis: Any, values: Tensor) -> None:
    """A logarithmic axis, if there is anything to put on it."""
    if bool((values[torch.isfinite(values)] > 0).any()):
        axis.set_yscale("log")


def _nothing(axis: Any, why: str) -> None:
    axis.text(0.5, 0.5, why, transform=axis.transAxes, ha="center", va="center", color="0.5")
    axis.set_xticks([])
    axis.set_yticks([])
