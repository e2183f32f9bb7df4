"""Nothing is silently wrong: every status is reached, every policy obeyed, and the report tells the truth."""

import re
import warnings

import pytest
import torch
from torch import nn

import torchdil as dil
from torchdil import Status
from torchdil.batch import check_every

FACTOR = 10.0  # how far an estimate of an error may be off
X = torch.tensor([1.0, 2.0], dtype=torch.float64)
ZERO = torch.zeros(2, dtype=torch.float64)


def draw(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def with_eigenvalues(eigenvalues, seed=0):
    """A symmetric matrix with these eigenvalues and random eigenvectors."""
    Q = torch.linalg.qr(draw(seed, len(eigenvalues), len(eigenvalues)))[0]
    A = Q @ torch.diag(torch.as_tensor(eigenvalues, dtype=torch.float64)) @ Q.T
    return (A + A.T) / 2


def quartic(y):
    return ((y - X) ** 2).sum() + (y**4).sum()


def saddle(y):
    return y[0] ** 2 - y[1] ** 2 + y[1] ** 4


# --- the forward solve ------------------------------------------------------------------------------------------------------

FORWARD = {
    Status.converged: lambda policy: dil.argmin(quartic, ZERO, on_failure=policy),
    Status.max_steps: lambda policy: dil.argmin(quartic, ZERO, solver=dil.GradientDescent(max_steps=2), on_failure=policy),
    Status.stagnated: lambda policy: dil.root(lambda y: y**2 + 1, X, on_failure=policy),
    Status.negative_curvature: lambda policy: dil.argmin(saddle, torch.tensor([1.0, 0.0]).double(), on_failure=policy),
    Status.non_finite: lambda policy: dil.root(torch.log, -X, on_failure=policy),
    Status.not_stationary: lambda policy: dil.argmin(quartic, ZERO, solver=lambda f, y: y, on_failure=policy),
}
FORWARD_FAILURES = [status for status in FORWARD if status != Status.converged]


@pytest.mark.parametrize("status", FORWARD, ids=lambda status: status.name)
def test_forward_status(status):
    sol = FORWARD[status]("ignore")
    assert Status(int(sol.status)) is status
    assert bool(sol.converged) == (status == Status.converged)
    assert sol.report.forward.status.shape == sol.status.shape == ()
    assert bool(sol.report.forward.converged) == bool(sol.converged)


@pytest.mark.parametrize("status", FORWARD_FAILURES, ids=lambda status: status.name)
def test_forward_failure_raises(status):
    with pytest.raises(dil.ConvergenceError, match=f"forward solve .* {status.name} ") as caught:
        FORWARD[status]("raise")
    assert Status(int(caught.value.report.forward.status)) is status


@pytest.mark.parametrize("status", FORWARD_FAILURES, ids=lambda status: status.name)
def test_forward_failure_warns_once(status):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sol = FORWARD[status]("warn")
    assert [w.category for w in caught] == [dil.ConvergenceWarning]
    assert caught[0].filename == __file__
    message = str(caught[0].message)
    assert f"residual {float(sol.stats.residual):.2e}" in message
    assert f"tolerance {float(sol.stats.tolerance):.2e}" in message
    assert status.message in message and (sol.stats.diagnosis or status.advice) in message
    assert "forward" in message and sol.stats.method in message and "\n" not in message


@pytest.mark.parametrize("status", FORWARD_FAILURES, ids=lambda status: status.name)
@pytest.mark.parametrize("policy", ["ignore", "zero", "nan"])
def test_forward_failure_is_silent_but_reported(status, policy):
    sol = FORWARD[status](policy)  # a warning would be an error
    assert Status(int(sol.status)) is status


def test_an_unknown_minimum_is_no_minimum():
    """Newton started on a saddle, or led onto one, does not call it a minimum."""
    for start in ([0.0, 0.0], [1.0, 0.0]):
        sol = dil.argmin(saddle, torch.tensor(start, dtype=torch.float64), on_failure="ignore")
        assert int(sol.status) == Status.negative_curvature
    assert bool(dil.argmin(saddle, torch.tensor([1.0, 0.1]).double()).converged)


# --- the backward solve -----------------------------------------------------------------------------------------------------


def linear_problem(A, linear_solver, symmetric, policy, seed=1, batch_dims=0):
    """y = A⁻¹ theta as a solution found elsewhere, and theta."""
    theta = torch.zeros(A.shape[:-1], dtype=torch.float64, requires_grad=True)
    y = dil.attach(
        lambda y: (A @ y.unsqueeze(-1)).squeeze(-1) - theta,
        torch.zeros(A.shape[:-1], dtype=torch.float64),
        linear_solver=linear_solver,
        symmetric=symmetric,
        batch_dims=batch_dims,
        on_failure=policy,
    )
    return y, theta


SINGULAR = with_eigenvalues([0.0, 1.0, 3.0])
INDEFINITE = with_eigenvalues([-2.0, 1.0, 3.0])
SPREAD = with_eigenvalues([1.0, 10.0, 100.0, 1000.0, 1e4])

# status: (A, linear solver, symmetric)
BACKWARD = [
    (Status.max_steps, SPREAD, dil.CG(max_steps=2), True),
    (Status.max_steps, SPREAD, dil.GMRES(max_steps=2), False),
    (Status.max_steps, SPREAD, dil.MINRES(max_steps=2), True),
    (Status.negative_curvature, INDEFINITE, dil.CG(), True),
    (Status.breakdown, SINGULAR, dil.Dense(), True),
    (Status.breakdown, SINGULAR, dil.Dense(), False),
    (Status.breakdown, SINGULAR, dil.Auto(), False),
    (Status.stagnated, SINGULAR, dil.MINRES(), True),
    (Status.stagnated, SINGULAR, dil.NormalCG(), False),
]


def backward_id(case):
    return f"{case[0].name}-{type(case[2]).__name__}"


@pytest.mark.parametrize("case", BACKWARD, ids=backward_id)
def test_backward_failure_raises(case):
    status, A, linear_solver, symmetric = case
    y, theta = linear_problem(A, linear_solver, symmetric, "raise")
    with pytest.raises(dil.ConvergenceError, match=f"backward solve .* {status.name} ") as caught:
        y.backward(draw(2, *y.shape))
    report = caught.value.report
    assert Status(int(report.backward.status)) is status
    assert bool(report.forward.converged)
    assert theta.grad is None
    assert not report.backward.stats.residual <= report.backward.stats.tolerance


@pytest.mark.parametrize("case", BACKWARD, ids=backward_id)
def test_backward_failure_warns_once(case):
    status, A, linear_solver, symmetric = case
    y, theta = linear_problem(A, linear_solver, symmetric, "warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        y.backward(draw(2, *y.shape))
    assert [w.category for w in caught] == [dil.ConvergenceWarning]
    if y.device.type == "cpu":  # else backward passes have a thread of their own, where the caller is not seen
        assert caught[0].filename == __file__
    message = str(caught[0].message)
    assert message.startswith("The backward solve") and status.advice in message
    assert "residual " in message and "tolerance " in message
    assert theta.grad.isfinite().all()


@pytest.mark.parametrize("case", BACKWARD, ids=backward_id)
@pytest.mark.parametrize("policy", ["ignore", "zero", "nan"])
def test_backward_failure_is_silent(case, policy):
    _, A, linear_solver, symmetric = case
    y, theta = linear_problem(A, linear_solver, symmetric, policy)
    y.backward(draw(2, *y.shape))
    if policy == "ignore":
        assert theta.grad.isfinite().all()
    elif policy == "zero":
        assert (theta.grad == 0).all()
    else:
        assert theta.grad.isnan().all()


def test_cotangent_that_is_not_finite():
    theta = X.clone().requires_grad_()
    sol = dil.argmin(lambda y: ((y - theta) ** 2).sum() + (y**4).sum(), ZERO, on_failure="raise")
    with pytest.raises(dil.ConvergenceError, match=r"gradients that are not finite came in \(sample 0\)"):
        (sol.value * torch.nan).sum().backward()
    assert Status(int(sol.report.backward.status)) is Status.non_finite
    for policy, expected in [("ignore", torch.nan), ("nan", torch.nan), ("zero", 0.0)]:
        sol = dil.argmin(lambda y: ((y - theta) ** 2).sum() + (y**4).sum(), ZERO, on_failure=policy)
        (grad,) = torch.autograd.grad((sol.value * torch.inf).sum(), theta)
        torch.testing.assert_close(grad, torch.full_like(grad, expected), equal_nan=True)


@pytest.mark.parametrize("linear_solver", [dil.Auto(), dil.GMRES(), dil.Dense()], ids=lambda s: type(s).__name__)
def test_a_function_that_mixes_samples_is_caught(linear_solver):
    """batch_dims=1 promises independent samples. A function that breaks the promise fails the product that verifies g."""
    b = draw(0, 4, 3).requires_grad_()
    norm = nn.BatchNorm1d(3, affine=False).double()
    for g in (lambda y: torch.tanh(0.3 * norm(y + b)), lambda y: 0.5 * torch.tanh(y - y.mean(0)) + b):
        # As one problem of all unknowns it is right.
        whole = dil.fixed_point(g, torch.zeros(4, 3, dtype=torch.float64), batch_dims=0, linear_solver=linear_solver)
        (expected,) = torch.autograd.grad(whole.value, b, draw(1, 4, 3))
        assert bool(whole.report.backward.converged)
        sol = dil.fixed_point(g, torch.zeros(4, 3, dtype=torch.float64), batch_dims=1, linear_solver=linear_solver)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            (grad,) = torch.autograd.grad(sol.value, b, draw(1, 4, 3))
        if bool(sol.report.backward.converged.all()):  # restarts of GMRES may get there even so
            torch.testing.assert_close(grad, expected, rtol=1e-7, atol=1e-8)
            assert isinstance(linear_solver, dil.GMRES) and not caught
        else:
            assert (sol.report.backward.status == Status.stagnated).any()
            assert len(caught) == 1 and "mixes samples" in str(caught[0].message)


def test_a_score_that_mixes_samples_is_caught():
    b = draw(0, 3, 2).requires_grad_()

    def score(y):
        return ((y - b) ** 2).sum(1) + (y.mean(0) ** 2).sum()

    sol = dil.argmin(score, torch.zeros(3, 2, dtype=torch.float64), on_failure="ignore")
    sol.value.backward(draw(1, 3, 2))
    assert (sol.report.backward.status == Status.stagnated).all()


def test_auto_goes_on_at_an_indefinite_point():
    layer_solver = dil.Auto(dense_below=0)
    theta = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    sol = dil.argmin(
        lambda y: 0.5 * y @ INDEFINITE @ y - theta @ y,
        torch.zeros(3, dtype=torch.float64),
        solver=lambda f, y: y,
        linear_solver=layer_solver,
        on_failure="ignore",
    )
    assert sol.status == dil.Status.negative_curvature
    v = draw(2, 3)
    sol.value.backward(v)
    assert sol.report.backward.stats.method == "CG, then MINRES"
    assert bool(sol.report.backward.converged.all())
    torch.testing.assert_close(theta.grad, torch.linalg.solve(INDEFINITE, v), rtol=1e-8, atol=1e-8)


def test_cg_on_a_root_says_what_it_is():
    theta = X.clone().requires_grad_()
    sol = dil.root(lambda y: y**3 + y - theta, ZERO, linear_solver=dil.CG())
    sol.value.sum().backward()
    assert sol.report.backward.stats.method == "CG on the normal equations"
    torch.testing.assert_close(theta.grad, 1 / (3 * sol.value.detach() ** 2 + 1), rtol=1e-8, atol=0)
    other = dil.root(lambda y: y**3 + y - theta, ZERO, linear_solver=dil.NormalCG())
    (grad,) = torch.autograd.grad(other.value.sum(), theta)
    assert torch.equal(grad, theta.grad)


@pytest.mark.parametrize("linear_solver", [dil.JacobianFree(), dil.Neumann(max_steps=3)], ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("policy", ["warn", "raise", "zero", "nan"])
def test_approximations_do_not_fail(linear_solver, policy):
    """They are wrong on purpose, so no policy applies; but the residual of what they did is measured."""
    theta = X.clone().requires_grad_()
    sol = dil.fixed_point(
        lambda y: torch.cos(0.9 * y + theta), ZERO, linear_solver=linear_solver, solver=dil.Newton(), on_failure=policy
    )
    v = draw(3, 2)
    sol.value.backward(v)
    y = sol.value.detach()
    B = -0.9 * torch.sin(0.9 * y + theta.detach())  # the (diagonal) Jacobian of g
    terms = 1 if isinstance(linear_solver, dil.JacobianFree) else 3
    g = v * sum(B**k for k in range(terms))
    torch.testing.assert_close(theta.grad, g * B / 0.9, rtol=1e-8, atol=1e-12)
    stats = sol.report.backward.stats
    assert not stats.exact and "approximate" in str(sol.report)
    torch.testing.assert_close(stats.residual.reshape(()), (v - (1 - B) * g).norm(), rtol=1e-8, atol=0)


# --- the policies, per sample -----------------------------------------------------------------------------------------------

C = torch.tensor([-1.0, -4.0, 1.0, -9.0], dtype=torch.float64)  # y² + theta c = 0 has no root for the third
GOOD = C < 0


def partly_solvable(policy, **settings):
    """Four samples, one of them without a solution: y, theta (shared), c (per sample)."""
    theta, c = torch.tensor(2.0, dtype=torch.float64, requires_grad=True), C.clone().requires_grad_()
    sol = dil.root(
        lambda y: y**2 + theta * c.unsqueeze(1),
        torch.ones(4, 1, dtype=torch.float64),
        batch_dims=1,
        on_failure=policy,
        **settings,
    )
    return sol, theta, c


@pytest.mark.parametrize("solver", [dil.Newton(), dil.Newton(linear_solver=dil.NormalCG())], ids=["dense", "normal"])
def test_zero_leaves_the_others_right(solver):
    sol, theta, c = partly_solvable("zero", solver=solver)
    assert sol.status.shape == (4,)
    assert torch.equal(sol.converged, GOOD)
    exact = (-2 * C).sqrt()
    torch.testing.assert_close(sol.value.detach()[GOOD, 0], exact[GOOD], rtol=1e-10, atol=0)
    sol.value.sum().backward()
    torch.testing.assert_close(theta.grad, (exact[GOOD] / 4).sum(), rtol=1e-9, atol=0)
    torch.testing.assert_close(c.grad, torch.where(GOOD, -1 / exact, 0.0), rtol=1e-9, atol=0)


def test_nan_marks_only_the_failed():
    sol, theta, c = partly_solvable("nan")
    sol.value.sum().backward()
    exact = (-2 * C).sqrt()
    torch.testing.assert_close(c.grad, torch.where(GOOD, -1 / exact, torch.nan), rtol=1e-9, atol=0, equal_nan=True)
    assert theta.grad.isnan()  # a sum with a NaN in it


def test_zero_keeps_the_gradient_of_a_shared_parameter_finite():
    """A sample that ran off to infinity must not poison the sum: 0 · inf is NaN."""
    theta = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    x = torch.tensor([[0.5], [3.0]], dtype=torch.float64)
    sol = dil.fixed_point(
        lambda y: theta * y + 0.1 * x * y**2 + 0.1, torch.full((2, 1), 2.0).double(), batch_dims=1, on_failure="zero"
    )
    assert sol.status.tolist() == [Status.converged, Status.non_finite]
    sol.value[0].sum().backward()
    y = sol.value.detach()[0, 0]
    torch.testing.assert_close(theta.grad, y / (1 - 0.5 - 0.1 * y), rtol=1e-8, atol=0)


@pytest.mark.parametrize("policy", ["zero", "nan", "ignore"])
def test_backward_policy_per_sample(policy):
    """Two regular samples and a singular one, whose forward solve is fine."""
    A = torch.stack([with_eigenvalues([1.0, 2.0, 3.0], 3), SINGULAR, with_eigenvalues([2.0, 5.0, 7.0], 4)])
    y, theta = linear_problem(A, dil.Dense(), True, policy, batch_dims=1)
    v = draw(5, 3, 3)
    y.backward(v)
    expected = torch.linalg.solve(A[[0, 2]], v[[0, 2]])
    torch.testing.assert_close(theta.grad[[0, 2]], expected, rtol=1e-9, atol=1e-12)
    if policy == "zero":
        assert (theta.grad[1] == 0).all()
    elif policy == "nan":
        assert theta.grad[1].isnan().all()
    else:
        assert theta.grad[1].isfinite().all()


def test_policies_hold_for_tangents_and_second_derivatives():
    """The tangent of a failed sample follows the policy like its gradient."""
    import torch.autograd.forward_ad as fwd

    theta = torch.tensor(2.0, dtype=torch.float64)
    with fwd.dual_level():
        dual = fwd.make_dual(theta, torch.ones_like(theta))
        y0 = torch.ones(4, 1, dtype=torch.float64)
        sol = dil.root(lambda y: y**2 + dual * C.unsqueeze(1), y0, batch_dims=1, on_failure="zero")
        tangent = fwd.unpack_dual(sol.value).tangent
    exact = (-2 * C).sqrt()
    torch.testing.assert_close(tangent[:, 0], torch.where(GOOD, exact / 4, 0.0), rtol=1e-9, atol=0)

    sol, theta, _ = partly_solvable("zero")
    (first,) = torch.autograd.grad(sol.value.sum(), theta, create_graph=True)
    (second,) = torch.autograd.grad(first, theta)
    torch.testing.assert_close(second, (-exact[GOOD] / 16).sum(), rtol=1e-8, atol=0)


def test_forward_and_backward_each_have_their_say():
    """One warning from each solve, and on a second backward one more."""
    theta = torch.ones(5, dtype=torch.float64, requires_grad=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sol = dil.argmin(
            lambda y: 0.5 * y @ SPREAD @ y - theta @ y,
            torch.zeros(5, dtype=torch.float64),
            solver=dil.GradientDescent(max_steps=1),
            linear_solver=dil.CG(max_steps=1),
        )
        assert len(caught) == 1
        sol.value.sum().backward(retain_graph=True)
        assert len(caught) == 2
        sol.value.sum().backward()
    assert [str(w.message).split()[1] for w in caught] == ["forward", "backward", "backward"]
    assert {w.filename for w in caught if theta.device.type == "cpu" or "forward" in str(w.message)} == {__file__}


def test_warning_names_the_line_that_called():
    """Under a layer inside other modules too, the warning points at the user's code."""
    layer = dil.ArgminLayer(
        lambda y, x: ((y - x) ** 2).sum(1) + (y**4).sum(1), init=(2,), solver=dil.GradientDescent(max_steps=1)
    )
    model = nn.Sequential(nn.Linear(2, 2), layer).double()
    with pytest.warns(dil.ConvergenceWarning) as caught:
        model(draw(0, 3, 2))
    assert [w.filename for w in caught] == [__file__]


# --- what the report says ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_shape", [(), (3,), (1,)], ids=["one", "batch", "batch of one"])
@pytest.mark.parametrize("linear_solver", [dil.Auto(), dil.CG(), dil.MINRES(), dil.GMRES()], ids=lambda s: type(s).__name__)
def test_shapes_of_the_report(batch_shape, linear_solver):
    theta = draw(0, *batch_shape, 2).requires_grad_()
    sol = dil.argmin(
        lambda y: ((y - theta) ** 2).sum(-1) + (y**4).sum(-1),
        torch.zeros(*batch_shape, 2, dtype=torch.float64),
        linear_solver=linear_solver,
    )
    assert sol.report.backward is None and sol.report.ritz is None
    assert sol.report.value_error is None and sol.report.adjoint_error is None
    assert sol.stats is sol.report.forward.stats
    sol.value.backward(draw(1, *batch_shape, 2))
    report = sol.report
    for half in (report.forward, report.backward):
        stats = half.stats
        for numbers in (half.status, half.converged, stats.steps, stats.residual, stats.tolerance, stats.norm):
            assert numbers.shape == batch_shape
        assert half.converged.all() and (stats.residual <= stats.tolerance).all()
        assert isinstance(stats.products, int) and stats.products > 0
        assert stats.exact
    for numbers in (*report.ritz, report.value_error, report.adjoint_error):
        assert numbers.shape == batch_shape
    assert report.forward.stats.method == "Newton"
    name = "Dense" if isinstance(linear_solver, dil.Auto) else type(linear_solver).__name__
    assert report.backward.stats.method.startswith(name)
    torch.testing.assert_close(report.forward.stats.norm, sol.value.detach().norm(dim=-1))


def test_histories_and_steps():
    theta = draw(0, 3, 2).requires_grad_()
    sol = dil.argmin(
        lambda y: ((y - theta) ** 2).sum(1) + (y**4).sum(1), torch.zeros(3, 2, dtype=torch.float64), linear_solver=dil.CG()
    )
    sol.value.backward(draw(1, 3, 2))
    for stats in (sol.report.forward.stats, sol.report.backward.stats):
        assert 0 <= len(stats.history) - (int(stats.steps.max()) + 1) < check_every(theta.device)
        assert all(entry.shape == (3,) for entry in stats.history)
        assert (stats.history[-1] <= 10 * stats.tolerance).all()


def test_report_prints_as_a_table():
    theta = draw(0, 3, 2).requires_grad_()
    sol = dil.argmin(
        lambda y: ((y - theta) ** 2).sum(1) + (y**4).sum(1), torch.zeros(3, 2, dtype=torch.float64), linear_solver=dil.CG()
    )
    before = rows_of(sol.report)
    assert before["method"] == ["Newton", "-"]
    assert before["status"] == ["converged 3", "-"]
    sol.value.backward(draw(1, 3, 2))
    text = str(sol.report)
    assert repr(sol.report) == text
    rows = rows_of(sol.report)
    assert rows["method"] == ["Newton", "CG"]
    assert rows["status"] == ["converged 3", "converged 3"]
    for stats, cell in zip((sol.report.forward.stats, sol.report.backward.stats), rows["evaluations"], strict=True):
        assert cell == str(stats.products)
    for word in ("steps", "residual", "tolerance", "Ritz", "estimated error"):
        (label,) = [label for label in rows if word in label]
        assert any(re.search(r"\d", cell) for cell in rows[label])
    assert max(map(len, text.splitlines())) <= 120


def rows_of(report):
    """The table as a dict: label to its two cells, cut where the rule under the head says."""
    head, rule, *lines = str(report).splitlines()
    assert head.split() == ["forward", "backward"]
    edges = [match.span() for match in re.finditer("-+", rule)]
    assert len(edges) == 3
    table = [[line[start:end].strip() for start, end in edges] for line in lines]
    assert ["".join(line.split()) for line in lines] == ["".join("".join(row).split()) for row in table]  # nothing overhangs
    return {label: cells for label, *cells in table}


def test_report_of_one_problem_prints_every_estimate():
    theta = X.clone().requires_grad_()
    sol = dil.argmin(lambda y: ((y - theta) ** 2).sum() + (y**4).sum(), ZERO, linear_solver=dil.CG())
    sol.value.backward(draw(1, 2))
    (errors,) = [cells for label, cells in rows_of(sol.report).items() if label.startswith("estimated error")]
    assert all(errors)


def ill_conditioned(seed, n):
    """f = ½ yᵀ A y - bᵀ y + ¼ Σ y⁴, its minimum to the last digit, and the Hessian there."""
    A, b = with_eigenvalues(torch.logspace(-1, 2, n).tolist(), seed), draw(seed + 10, n)
    theta = b.clone().requires_grad_()

    def score(y):
        return 0.5 * y @ A @ y - theta @ y + 0.25 * (y**4).sum()

    exact = dil.argmin(score, torch.zeros_like(b), solver=dil.Newton(rtol=1e-15), on_failure="ignore").value.detach()
    return score, theta, exact, A + torch.diag(3 * exact**2)


@pytest.mark.parametrize("linear_solver", [dil.CG(), dil.MINRES(), dil.Dense(), dil.Auto()], ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("seed", [0, 1])
def test_ritz_values_are_the_eigenvalues(linear_solver, seed):
    score, _, exact, H = ill_conditioned(seed, 8)
    sol = dil.argmin(score, torch.zeros_like(exact), linear_solver=linear_solver)
    sol.value.backward(draw(seed + 20, *exact.shape))
    low, high = (float(value) for value in sol.report.ritz)
    eigenvalues = torch.linalg.eigvalsh(H)
    assert low == pytest.approx(float(eigenvalues[0]), rel=1e-5)
    assert high == pytest.approx(float(eigenvalues[-1]), rel=1e-5)


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
@pytest.mark.parametrize("linear_solver", [dil.CG(rtol=1e-4), dil.Dense()], ids=lambda s: type(s).__name__)
def test_value_error(seed, linear_solver):
    """‖F‖ / θ_min bounds ‖y - y*‖ from above, and not by much where the error lies in the flat directions, as it does here."""
    score, _, exact, _ = ill_conditioned(seed, 30)
    solver = dil.GradientDescent(rtol=1e-4, step_size=0.015)
    sol = dil.argmin(score, torch.zeros_like(exact), solver=solver, linear_solver=linear_solver)
    sol.value.backward(draw(seed + 20, *exact.shape))
    truth = float((sol.value.detach() - exact).norm())
    assert truth / FACTOR <= float(sol.report.value_error) <= truth * FACTOR


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
@pytest.mark.parametrize("rtol", [1e-2, 1e-4])
def test_adjoint_error(seed, rtol):
    score, theta, exact, H = ill_conditioned(seed, 60)  # more unknowns than steps: CG ends exactly after n
    sol = dil.argmin(score, torch.zeros_like(exact), linear_solver=dil.CG(rtol=rtol))
    v = draw(seed + 20, *exact.shape)
    sol.value.backward(v)
    g = torch.linalg.solve(H, v)
    truth = float((theta.grad - g).norm() / g.norm())  # ∂F/∂theta = -I, so the gradient is g itself
    assert truth / FACTOR <= float(sol.report.adjoint_error) <= truth * FACTOR


def test_estimates_in_a_batch_are_those_of_its_samples():
    a = torch.tensor([1.0, 30.0, 0.1], dtype=torch.float64)
    theta = draw(0, 3, 2).requires_grad_()

    def score(y, rows=slice(None)):
        scale = a[rows, None] * torch.tensor([1.0, 3.0], dtype=torch.float64)
        return (scale * (y - theta[rows]) ** 2).sum(1) + (y**4).sum(1)

    sol = dil.argmin(score, torch.zeros(3, 2, dtype=torch.float64), linear_solver=dil.CG())
    v = draw(1, 3, 2)
    sol.value.backward(v)
    for i in range(3):
        one = dil.argmin(lambda y, i=i: score(y, [i]), torch.zeros(1, 2, dtype=torch.float64), linear_solver=dil.CG())
        one.value.backward(v[i : i + 1])
        for mine, alone in zip(sol.report.ritz, one.report.ritz, strict=True):
            torch.testing.assert_close(mine[i : i + 1], alone, rtol=1e-8, atol=0)
        assert int(sol.report.forward.stats.steps[i]) == int(one.report.forward.stats.steps)
        assert int(sol.report.backward.stats.steps[i]) == int(one.report.backward.stats.steps)


def test_statuses_explain_themselves():
    assert [status.name for status in Status] == [
        "converged",
        "max_steps",
        "stagnated",
        "negative_curvature",
        "breakdown",
        "non_finite",
        "not_stationary",
    ]
    for status in Status:
        assert status.message and status.advice
    assert issubclass(dil.ConvergenceError, RuntimeError) and issubclass(dil.ConvergenceWarning, UserWarning)


@pytest.mark.parametrize("solver", [dil.GradientDescent(), lambda f, y: y.clone()], ids=["GradientDescent", "callable"])
def test_a_maximum_is_no_minimum_whoever_found_it(solver):
    for n in (2, 200):
        start = torch.zeros(n, dtype=torch.float64)
        sol = dil.argmin(lambda y: ((y**2 - 1) ** 2).sum(), start, solver=solver, on_failure="ignore")
        assert sol.status == dil.Status.negative_curvature


@pytest.mark.parametrize("linear_solver", [dil.Neumann(), dil.JacobianFree()], ids=["Neumann", "JacobianFree"])
def test_approximate_solvers_fail_by_what_is_no_number(linear_solver):
    def gradient(on_failure):
        x = torch.tensor([[0.1], [0.2]], dtype=torch.float64, requires_grad=True)
        y = dil.fixed_point(
            lambda y: 0.2 * torch.cos(y) + x,
            torch.zeros_like(x).detach(),
            linear_solver=linear_solver,
            batch_dims=1,
            on_failure=on_failure,
        ).value
        y.backward(torch.tensor([[1.0], [torch.nan]], dtype=torch.float64))
        return x.grad

    assert gradient("zero")[1] == 0 and gradient("zero")[0] > 0
    with pytest.raises(dil.ConvergenceError):
        gradient("raise")


def test_damping_shows_in_the_estimated_error():
    t = torch.ones(3, dtype=torch.float64, requires_grad=True)
    sol = dil.argmin(lambda y: 0.5 * ((y - t) ** 2).sum(), torch.zeros_like(t).detach(), linear_solver=dil.CG(damping=1.0))
    sol.value.sum().backward()
    torch.testing.assert_close(t.grad, torch.full_like(t.grad, 0.5))  # the exact one is 1: an error as large as g itself
    torch.testing.assert_close(sol.report.adjoint_error, torch.tensor(1.0, dtype=torch.float64))


def test_reports_of_nothing_to_solve():
    x = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
    sol = dil.argmin(lambda y: ((y - x) ** 2).sum(1), torch.zeros_like(x).detach(), linear_solver=dil.CG())
    sol.value[0].sum().backward()  # no cotangent for the second sample
    assert "nan" not in str(sol.report)
    empty = dil.argmin(lambda y: (y**2).sum(1), torch.zeros(0, 3))
    assert "no samples" in str(empty.report)


def test_evaluations_are_all_calls_of_the_function():
    calls = 0

    def residual(y):
        nonlocal calls
        calls += 1
        return y**3 + y - 2

    dil.root(residual, torch.zeros(3, dtype=torch.float64))  # the first solve looks at the function's slope, too
    for solver in (dil.Newton(), lambda f, y: y + 1 + 0 * f(y)):
        calls = 0
        sol = dil.root(residual, torch.zeros(3, dtype=torch.float64), solver=solver)
        assert sol.stats.products == calls - 1  # one call checks the shapes before


@pytest.mark.parametrize("linear_solver", [None, dil.CG(), dil.GMRES(), dil.MINRES()])
def test_samples_that_are_no_part_of_the_loss_have_no_error(linear_solver):
    """A log of the largest error must not be NaN because of them."""
    x = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(3, 4).requires_grad_()
    layer = dil.ArgminLayer(lambda y, x: ((y - 2 * x) ** 2 + torch.cosh(y)).sum(-1), init=(4,), linear_solver=linear_solver)
    layer(x)[1].sum().backward()
    errors = layer.report.adjoint_error
    assert errors[0] == 0 and errors[2] == 0 and 0 <= float(errors.max()) < 1e-8
