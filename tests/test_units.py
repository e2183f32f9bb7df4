"""Gradients near the ends of a dtype, whose squares are no numbers of it."""

import pytest
import torch
from torch.nn import functional

import torchdil as dil
from torchdil import traced
from torchdil.linear.units import in_range, solve_in_range
from torchdil.solution import Result, Stats

SOLVERS = [dil.CG(), dil.MINRES(), dil.GMRES(), dil.BiCGStab(), dil.NormalCG(), dil.Dense(), dil.Auto(dense_below=0)]
SCALES = {torch.float32: (1e-18, 1e-21, 1e-30, 1e25), torch.float64: (1e-160, 1e-250, 1e160)}


def gradient(scales, solver, dtype, calls=1):
    """Of Σ scaleᵢ ‖yᵢ‖² with respect to a parameter of each sample, divided by the scales; and the report."""
    torch.manual_seed(0)
    W, x = torch.randn(len(scales), 5, 5, dtype=dtype), torch.randn(len(scales), 5, dtype=dtype)
    W.requires_grad_()
    for _ in range(calls):
        W.grad = None
        solution = dil.argmin(
            lambda y: ((y - x) ** 2).sum(-1) + functional.softplus((y.unsqueeze(1) @ W).squeeze(1)).sum(-1),
            torch.zeros_like(x),
            linear_solver=solver,
        )
        (scales * (solution.value**2).sum(-1)).sum().backward()
    return W.grad / scales[:, None, None], solution.report


@pytest.mark.parametrize("calls", [1, traced._PATIENCE + traced._CHECKED_FIRST + 3], ids=["plain", "traced"])
@pytest.mark.parametrize("dtype", SCALES, ids=str)
@pytest.mark.parametrize("solver", SOLVERS, ids=lambda solver: type(solver).__name__)
def test_tiny_and_huge_gradients_have_all_their_digits(solver, dtype, calls):
    traced.forget_all()
    scales = torch.tensor([1.0, *SCALES[dtype]], dtype=dtype)
    found, report = gradient(scales, solver, dtype, calls)
    expected, plain = gradient(torch.ones_like(scales), solver, dtype)
    rtol = 1e-4 if dtype == torch.float32 else 1e-9
    torch.testing.assert_close(found, expected, rtol=rtol, atol=rtol * expected.abs().max().item())
    assert bool(report.backward.converged.all())
    stats = report.backward.stats
    torch.testing.assert_close(stats.tolerance / scales, plain.backward.stats.tolerance, rtol=1e-4, atol=0)
    assert bool((stats.residual <= 10 * stats.tolerance).all()) and bool((report.adjoint_error <= 1e-2).all())


def test_alone_as_well():
    """One problem, without others in its batch."""
    for scale in (1.0, 1e-21):
        found, _ = gradient(torch.tensor([scale]), dil.CG(), torch.float32)
        expected, _ = gradient(torch.tensor([1.0]), dil.CG(), torch.float32)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_zero_and_what_is_not_finite_are_left_alone():
    rhs = torch.tensor([[0.0, 0.0], [1.0, 2.0], [1e-30, 0.0], [1e30, 0.0], [float("inf"), 0.0], [float("nan"), 1.0]])
    assert in_range(rhs).tolist() == [True, True, False, False, False, False]
    assert bool(in_range(rhs.half()).all())
    seen = []

    def solve(rhs):
        seen.append(rhs)
        numbers = torch.zeros(len(rhs))
        return Result(rhs, numbers.long(), Stats("none", numbers.long(), numbers, numbers))

    value = solve_in_range(solve, rhs, 0.0).value
    torch.testing.assert_close(value, rhs, rtol=0, atol=0, equal_nan=True)  # a power of two changes no digit
    assert bool((seen[0][2:4, 0] >= 1).all()) and bool((seen[0][2:4, 0] < 2).all())
    solve_in_range(solve, rhs, 1e-12)  # which has units
    torch.testing.assert_close(seen[1], rhs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype, unit", [(torch.float32, 1e-20), (torch.float32, 1e-25), (torch.float64, 1e-170)])
@pytest.mark.parametrize("state", ["root", "fixed_point"])
def test_an_answer_in_tiny_units_is_solved_or_told(dtype, unit, state):
    """The squares of all its numbers vanish, and with them what a solver knows of its residual."""
    x = unit * torch.tensor([1.0, 2.0], dtype=dtype)
    function = {"root": lambda y: y + unit * (y / unit) ** 3 - x, "fixed_point": lambda y: 0.5 * y + x}[state]
    exact = {"root": torch.tensor([0.682327803828, 1.0]), "fixed_point": torch.tensor([2.0, 4.0])}[state].to(x)
    solution = getattr(dil, state)(function, torch.full_like(x, 0.3 * unit), on_failure="ignore")
    close = torch.allclose(solution.value / unit, exact, rtol=1e-4)
    assert close or not bool(solution.converged)
