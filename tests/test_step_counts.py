"""In how many steps a Krylov method is to solve as a whole, and what that saves where the numbers change."""

import pytest
import torch

import torchdil as dil
from torchdil import step_counts, traced
from torchdil.step_counts import StepCounts


def ask(counts, steps, times=1, on_gpu=False):
    for _ in range(times):
        counts.took("cg", steps)
        found = counts.expected("cg", on_gpu)
    return found


@pytest.mark.parametrize(("on_gpu", "asked"), [(False, step_counts._ASKED), (True, step_counts._ASKED_ON_GPU)])
def test_a_number_must_be_expected_again_and_again(on_gpu, asked):
    counts = StepCounts()
    assert counts.expected("cg", on_gpu) == 0
    assert ask(counts, 7, asked - 1, on_gpu) == 0 and ask(counts, 7, 1, on_gpu) == 7
    assert ask(counts, 6, 1, on_gpu) == 7  # the most of the last ones
    assert counts.expected("other settings", on_gpu) == 0


def test_one_number_serves_those_a_little_below_it():
    counts = StepCounts()
    ask(counts, 40, 30)
    assert ask(counts, 36, 30) == 40
    assert ask(counts, 20, 30) == 20


def test_numbers_that_grow_cost_few_functions():
    counts, found = StepCounts(), set()
    for call in range(3000):
        found.add(ask(counts, 10 + call // 20))
    assert 1 < len(found - {0}) <= step_counts._COUNTS


def test_large_numbers_go_step_by_step():
    assert ask(StepCounts(), step_counts._LONG + 1, 50) == 0


def test_solves_whose_steps_grow_make_few_functions(monkeypatch, device):
    """A hyper-parameter that is learnt changes the condition of the Hessian: each new number of steps was traced anew."""
    made = []
    fast = traced.fast
    monkeypatch.setattr(traced, "fast", lambda *args: made.append(1) or fast(*args))
    traced.forget_all()
    n = 40
    Q = torch.linalg.qr(torch.randn(n, n, generator=torch.Generator().manual_seed(0), dtype=torch.float64))[0]
    theta, spread = torch.ones(n, dtype=torch.float64, requires_grad=True), torch.tensor(1.0, dtype=torch.float64)
    spacing = torch.linspace(0, 1, n, dtype=torch.float64)
    steps = set()
    for _ in range(60):
        spread += 0.06
        H = (Q * (spread * spacing).exp()) @ Q.T
        solution = dil.argmin(
            lambda y, H=H: 0.5 * y @ H @ y - theta @ y, torch.zeros(n).double(), linear_solver=dil.CG(rtol=1e-8)
        )
        (found,) = torch.autograd.grad(solution.value.sum(), theta)
        steps.add(int(solution.report.backward.stats.steps))
        torch.testing.assert_close(found, torch.linalg.solve(H, torch.ones(n, dtype=torch.float64)), rtol=1e-6, atol=1e-7)
    # What a point needs, a look at its answer, a product, gᵀ ∂F/∂θ, and on a GPU some steps as one; else whole solves.
    others = 4 if device == "cpu" else 5
    assert len(steps) > 8 and len(made) <= others + step_counts._COUNTS
