"""Bad problems end in a sentence, in a report or in the right answer: `bad_problems` draws them and judges."""

import collections

import pytest
import torch
from bad_problems import Own, Wrong, not_a_sentence, outcome

import torchdil as dil

# Numbers of problems, in portions, so that processes can share them. `python tests/bad_problems.py --count 3000` tries more.
PORTIONS = [range(first, first + 50) for first in range(0, 200, 50)]
NAN = float("nan")


@pytest.mark.parametrize("numbers", PORTIONS, ids=lambda numbers: f"{numbers[0]} to {numbers[-1]}")
def test_bad_problems_end_as_they_may(numbers, device):
    ends = collections.Counter(outcome(number, device)[0] for number in numbers)
    assert set(ends) == {"sentence", "reported", "right"}, "the draw has something of everything"


def test_the_judge_finds_what_is_wrong():
    """A silent wrong answer, an error from the depths of torch, a hang: all three are seen."""
    with pytest.raises(RuntimeError) as caught:
        torch.ones(2) @ torch.ones(3)
    assert not_a_sentence(caught.value, own=False)
    import bad_equations
    import bad_problems

    problem = bad_equations.Equation(
        "root", 1, 1, torch.float64, *(torch.ones(shape, dtype=torch.float64) for shape in ((1, 1, 1), (1, 1), ())), 0.0,
        torch.zeros(1, 1, dtype=torch.float64), torch.ones(1, 1, dtype=torch.float64), "warn", None, None,
    )  # fmt: skip
    assert bad_equations.run(problem) == "right"
    solution = dil.root(problem.function, problem.y0, (problem.M, problem.x, problem.theta))
    with pytest.raises(Wrong, match="is converged with"):
        bad_equations.judge(problem, solution.value + 0.1, solution.report, None, [])
    grads = (torch.full((1, 1), 3.0, dtype=torch.float64), torch.zeros((), dtype=torch.float64))
    with pytest.raises(Wrong, match="gradient"):
        bad_equations.judge(problem, solution.value, solution.report, grads, [])
    with pytest.raises(bad_problems.Hang), bad_problems.limit(0.05):
        while True:
            pass


def test_errors_of_the_user_are_not_swallowed():
    def score(y):
        raise Own("enough")

    with pytest.raises(Own, match=r"^enough$"):
        dil.argmin(score, torch.zeros(2))


# What such problems have brought to light.


def double(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)


def test_a_function_that_changes_its_shape_gets_a_sentence():
    calls = []

    def later(good, bad):
        calls.append(1)
        return good if len(calls) % 3 else bad

    for find, fn, expected in (
        (
            dil.argmin,
            lambda y: later((y**2).sum(1), (y**2).sum(1)[:1]),
            r"^score must return a tensor of the same shape, \(2,\)",
        ),
        (dil.argmin, lambda y: later((y**2).sum(1), None), r"^score must return .* got NoneType\.$"),
        (
            dil.root,
            lambda y: later(y - 1, y[:1]),
            r"^The function must return the shape of y, \(2, 3\), at every call, got \(1, 3\)",
        ),
        (dil.fixed_point, lambda y: later(0.5 * y, (y, y)), r"^The function must return the shape of y"),
    ):
        calls.clear()
        with pytest.raises(ValueError, match=expected):
            find(fn, torch.ones(2, 3, dtype=torch.float64))


@pytest.mark.parametrize(
    ("call", "error", "expected"),
    [
        (lambda: dil.argmin(lambda y: (y**2).sum().to("meta"), torch.ones(2)), ValueError, "score must .* device of y0"),
        (lambda: dil.argmin(lambda y: (y**2).sum(1).to_sparse(), torch.ones(2, 2)), TypeError, "score must return a dense"),
        (lambda: dil.root(lambda y: y.to_sparse(), torch.ones(2)), TypeError, "residual must return dense tensors"),
        (lambda: dil.root(lambda y: y, torch.ones(2).to_sparse()), TypeError, r"y0 must be a dense tensor, .*y0\.to_dense"),
        (lambda: dil.control.dare(torch.eye(2).to_sparse(), *[torch.eye(2)] * 3), TypeError, "A must be a dense tensor"),
        (lambda: dil.control.lqr(None, *[torch.eye(2)] * 3, horizon=2), TypeError, "A must be a tensor, got NoneType"),
        (lambda: dil.control.lqr(*[torch.eye(2)] * 2, None, torch.eye(2), horizon=2), TypeError, "Q must be a tensor"),
    ],
)  # fmt: skip
def test_more_sentences(call, error, expected):
    with pytest.raises(error, match=f"^{expected}"):
        call()


@pytest.mark.parametrize("linear_solver", [dil.CG(), dil.GMRES(), dil.BiCGStab(), dil.MINRES()], ids=lambda s: type(s).__name__)
def test_a_cotangent_whose_norm_is_infinite_is_reported(linear_solver):
    """The square of 1e200 is none: a residual that is not larger than infinity is not small."""
    x = double(1.0, 2.0).requires_grad_()
    solution = dil.argmin(
        lambda y, x: ((y - x) ** 2).sum(), double(0.0, 0.0), (x,), linear_solver=linear_solver, on_failure="ignore"
    )
    solution.value.backward(double(1e200, 1e200))
    right = torch.allclose(x.grad, double(1e200, 1e200))
    assert right or solution.report.backward.status != dil.Status.converged


def test_the_edge_of_where_a_score_is_defined_is_no_minimum():
    """The slope of √(0.3 - y) grows towards the edge, its curvature faster: beside that the slope looks small."""
    solution = dil.argmin(lambda y: ((y - 2) ** 2 + torch.sqrt(0.3 - y)).sum(), double(0.1), on_failure="ignore")
    assert solution.status != dil.Status.converged


def test_a_callable_solver_may_have_nothing_to_do():
    solution = dil.argmin(lambda y: (y**2).sum(1), torch.zeros(0, 2), solver=lambda f, y: y)
    assert solution.value.shape == (0, 2) and solution.status.shape == (0,)


def test_a_riccati_equation_whose_norms_are_infinite_is_judged_in_other_units():
    A, B, Q, R = double([0.5, 1.2], [0.6, 0.0]), double([0.0], [0.1]), 1e200 * torch.eye(2, dtype=torch.float64), double([2.0])
    S = dil.control.dare(A, B, Q, R, on_failure="raise")
    torch.testing.assert_close(S / 1e200, dil.control.dare(A, B, Q / 1e200, R / 1e200), rtol=1e-9, atol=0)


@pytest.mark.parametrize("policy", ["ignore", "zero", "nan"])
def test_a_matrix_that_does_not_solve_the_riccati_equation_is_no_answer(policy):
    """Without a stabilising solution, S and K are NaN, and so are the gradients, or zero; the other system keeps its own."""
    A, B = double(0.8146, 0.5).view(2, 1, 1).requires_grad_(), double([-1.0088, -0.8033])
    R = double([2.0024, 0.8799], [0.8799, 1.2913])
    for find in (dil.control.dare, dil.control.dlqr):
        found = find(A, B, double(-0.2624, 1.0).view(2, 1, 1), R, on_failure=policy)
        assert found[0].isnan().all() and found[1].isfinite().all()
        (grad,) = torch.autograd.grad(found.sum(), A)
        assert grad[1].isfinite().all() and (grad[0] == 0 if policy == "zero" else grad[0].isnan()).all()


def test_where_states_cost_nothing_a_stable_system_is_left_alone():
    A, B = double([0.5, 0.3], [-0.2, -0.9]), double([1.0], [-0.3])
    Q = torch.zeros(2, 2, dtype=torch.float64, requires_grad=True)
    S = dil.control.dare(A, B, Q, double([2.0]), on_failure="raise")
    assert (S == 0).all()
    S.trace().backward()  # S = Q + Aᵀ S A to first order
    expected = torch.linalg.solve(torch.eye(4).double() - torch.kron(A, A), torch.eye(2).double().flatten()).view(2, 2)
    torch.testing.assert_close(Q.grad, expected)


@pytest.mark.parametrize("policy", ["zero", "nan"])
def test_a_start_that_is_no_number_leaves_the_others_alone(policy):
    theta = double(0.5).requires_grad_()
    y0 = double([NAN], [0.0], [1.0])
    y = dil.argmin(lambda y: ((y - theta) ** 2).sum(1), y0, on_failure=policy).value
    y.sum().backward()
    assert theta.grad.item() == pytest.approx(2.0 if policy == "zero" else NAN, nan_ok=True)


@pytest.mark.parametrize("policy", ["ignore", "nan"])
def test_a_regulator_that_failed_leaves_the_gradients_of_others_alone(policy):
    A, B = torch.eye(2, dtype=torch.float64).repeat(3, 1, 1), torch.eye(2, dtype=torch.float64)
    R = B * double(1.0, -9.0, 1.0)[:, None, None]
    A.requires_grad_()
    K = dil.control.lqr(A, B, B, R, horizon=2, on_failure=policy).K
    assert K[1].isnan().all() and K[0].isfinite().all()
    K.sum().backward()
    assert A.grad[[0, 2]].isfinite().all() and A.grad[1].isnan().all()


def test_a_gain_that_is_infinite_is_reported():
    one = double([1.0])
    with pytest.warns(dil.ConvergenceWarning, match="not finite"):
        dil.control.lqr(double([float("inf")]), one, one, one, horizon=1)


@pytest.mark.parametrize(
    "settings", [{"rtol": 1e-5}, {"gradient": "adjoint"}, {"rtol": 1e-5, "gradient": "adjoint"}, {}], ids=str
)
def test_no_trajectories_at_all(settings):
    k = double(2.0).requires_grad_()
    y0 = torch.zeros(0, 2, dtype=torch.float64, requires_grad=True)
    y = dil.odeint(lambda t, y: -k * y * t, y0, double(0.0, 0.5, 1.0), method="radauIIA5", batch_dims=1, **settings)
    assert y.shape == (3, 0, 2)
    y.sum().backward()
    assert y0.grad.shape == (0, 2)
