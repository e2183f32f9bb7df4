"""Linear systems with the Jacobian of a trajectory, against dense linear algebra."""

import pytest
import torch
from torch import Tensor

import torchdil as dil
from torchdil.batch import Layout
from torchdil.linear import CG, GMRES, BiCGStab, JacobianFree, Neumann, NormalCG
from torchdil.ode import RK4, BackwardEuler, GaussLegendre, RadauIIA, SimplifiedNewton, bidiagonal, solve
from torchdil.ode.bidiagonal import Bidiagonal, Factors, backward_substitution, blocks, forward_substitution, recur
from torchdil.ode.field import Field
from torchdil.ode.fixed import structured_solver
from torchdil.ode.sequential import Sequential
from torchdil.ode.trajectory import Trajectory
from torchdil.operator import Operator
from torchdil.solution import Status

SAME = {torch.float64: 1e-11, torch.float32: 1e-4}  # relative, two direct solves
SOLVED = 1e-8  # to the tolerance of a linear solver, 1e-10 of the right-hand side
ESTIMATED = 0.05  # a first-order estimate of an error, relative

# m = 1, 2, 3 and 5 unknowns a step: stages only, or the next state behind them.
METHODS = {1: BackwardEuler(), 2: RadauIIA(3), 3: GaussLegendre(4), 5: RK4()}

both_ways = pytest.mark.parametrize("transpose", [False, True], ids=["J", "transposed"])


def draw(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    """Relative to the largest number of each sample."""
    assert actual.shape == expected.shape
    error = (actual - expected).flatten(1).abs().amax(dim=1)
    assert bool((error <= tolerance * expected.flatten(1).abs().amax(dim=1)).all()), error


class System:
    """J at a random point of the trajectory of y' = tanh(W y) - y + cos(t) y² / 4, and a random right-hand side."""

    def __init__(self, rows: int = 1, steps: int = 13, d: int = 2, samples: int = 3, dtype: torch.dtype = torch.float64):
        W = draw(1, d, d, dtype=dtype) / d**0.5
        self.func = lambda t, y: torch.tanh(y @ W.T) - y + t.cos() * y**2 / 4
        self.rows, self.steps = rows, steps
        y0 = draw(2, samples, d, dtype=dtype)
        layout = Layout.of(y0, 1)
        self.statement = Trajectory(METHODS[rows], layout, Field(layout, "vmap"), steps)
        times = torch.linspace(0, 1, steps + 1, dtype=dtype) ** 1.3  # no step like another
        self.args = y0, times
        self.y = draw(3, samples, steps * rows * d, dtype=dtype)
        self.rhs = draw(4, samples, steps * rows * d, dtype=dtype)

    def operator(self, residual=None) -> Operator:
        return Operator(residual or (lambda y: self.statement.residual(self.func, y, self.args)), self.y, False)

    def matrix(self, transpose: bool, damping: float = 0.0) -> Tensor:
        J = self.operator().dense()
        return (J.mT if transpose else J) + damping * torch.eye(J.shape[-1], dtype=J.dtype)

    def exact(self, transpose: bool, damping: float = 0.0, rhs: Tensor | None = None) -> Tensor:
        return torch.linalg.solve(self.matrix(transpose, damping), self.rhs if rhs is None else rhs)

    def direct(self, **settings) -> Bidiagonal:
        return Bidiagonal(steps=self.steps, rows=self.rows, **settings)

    def sequential(self, inner) -> Sequential:
        solver = structured_solver(self.statement, self.func, self.args, inner)
        assert isinstance(solver, Sequential)
        return solver


# --- Direct ---


SIZES = [(m, T, d) for m in (1, 2, 3, 5) for T in (1, 2, 13) for d in (1, 2, 5, 20) if m * T * d <= 500]
SIZES += [(1, 100, 1), (2, 100, 2), (3, 100, 1), (1, 100, 5), (1, 30, 20)]


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize(("rows", "steps", "d"), SIZES)
def test_a_direct_solve_is_the_dense_one(rows, steps, d, samples):
    system = System(rows, steps, d, samples)
    close(blocks(system.operator(), steps, rows), diagonal_blocks_of(system), SAME[torch.float64])
    for transpose in (False, True):
        found = system.direct().solve(system.operator(), system.rhs, transpose=transpose)
        assert (found.status == Status.converged).all()
        assert (found.stats.residual <= found.stats.tolerance).all()
        close(found.value, system.exact(transpose), SAME[torch.float64])


def diagonal_blocks_of(system: System) -> Tensor:
    J, T = system.matrix(False), system.steps
    J = J.unflatten(2, (T, -1)).unflatten(1, (T, -1))
    return J.diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)


@both_ways
@pytest.mark.parametrize(("rows", "steps", "d"), [(1, 13, 2), (3, 13, 5), (2, 100, 1), (1, 13, 20), (2, 5, 20)])
def test_a_direct_solve_in_single_precision(rows, steps, d, transpose):
    system, fine = System(rows, steps, d, dtype=torch.float32), System(rows, steps, d)
    fine.y, fine.rhs = system.y.double(), system.rhs.double()
    found = system.direct().solve(system.operator(), system.rhs, transpose=transpose)
    assert found.value.dtype == torch.float32
    assert (found.status == Status.converged).all()
    close(found.value.double(), fine.exact(transpose), SAME[torch.float32])


@both_ways
@pytest.mark.parametrize(("rows", "steps", "d"), [(1, 13, 2), (3, 13, 2), (5, 2, 5), (2, 3, 20)])
def test_damping_is_added_to_the_diagonal(rows, steps, d, transpose):
    system = System(rows, steps, d)
    found = system.direct(damping=0.3).solve(system.operator(), system.rhs, transpose=transpose)
    assert (found.status == Status.converged).all()
    close(found.value, system.exact(transpose, damping=0.3), SAME[torch.float64])
    fast = system.direct(damping=0.3, fast=lambda y, back: lambda rhs: rhs)  # solves without damping are of no use
    close(fast.solve(system.operator(), system.rhs, transpose=transpose).value, found.value, SAME[torch.float64])


@both_ways
@pytest.mark.parametrize(("rows", "d"), [(1, 2), (3, 2), (1, 20), (2, 20)])
def test_a_product_with_the_factors_is_one_with_the_jacobian(rows, d, transpose):
    system = System(rows, 6, d)
    factors = Factors(blocks(system.operator(), 6, rows), rows)
    expected = (system.matrix(transpose) @ system.rhs.unsqueeze(2)).squeeze(2)
    close(factors.product(system.rhs, transpose), expected, SAME[torch.float64])
    assert (factors.size() >= torch.linalg.matrix_norm(system.matrix(False), 2) / 2).all()


@both_ways
def test_a_right_hand_side_of_zero_has_the_solution_zero(transpose):
    system = System()
    system.rhs[1] = 0
    found = system.direct().solve(system.operator(), system.rhs, transpose=transpose)
    assert (found.status == Status.converged).all()
    assert (found.value[1] == 0).all() and found.stats.steps.tolist() == [1, 0, 1]
    close(found.value[::2], system.exact(transpose)[::2], SAME[torch.float64])


# --- Recursions ---


def recursion(P: Tensor, z: Tensor) -> Tensor:
    s = [z[:, 0]]
    for n in range(1, z.shape[1]):
        s.append((P[:, n] @ s[-1].unsqueeze(2)).squeeze(2) + z[:, n])
    return torch.stack(s, dim=1)


@pytest.mark.parametrize("dtype", SAME, ids=str)
@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("d", [1, 2, 5, 20])
@pytest.mark.parametrize("steps", [1, 2, 12, 13, 100])
def test_the_ways_of_a_recursion_agree(steps, d, samples, dtype):
    P, z = draw(5, samples, steps, d, d) / (d**0.5), draw(6, samples, steps, d)
    expected = recursion(P, z)
    P, z = P.to(dtype), z.to(dtype)
    ways = [recur, bidiagonal._scan, lambda P, z: bidiagonal._one_by_one(P.unbind(1), z)]
    if steps > 1 and steps * d <= 500:
        ways.append(bidiagonal._triangular)
    for way in ways:
        found = way(P, z)
        assert found.dtype == dtype
        close(found.double(), expected, SAME[dtype])


def neighbours(D: Tensor, steps: int, rows: int) -> Tensor:
    """The J of T steps, (B, n, n), whose blocks are S given ones, (B, S, k, k), each for as many neighbours."""
    samples, some, k = D.shape[:3]
    d, stride = k // rows, -(-steps // some)
    J = torch.zeros(samples, steps, k, steps, k, dtype=D.dtype)
    for n in range(steps):
        J[:, n, :, n] = D[:, n // stride]
        if n:
            J[:, n, :, n - 1, k - d :] = -torch.eye(d, dtype=D.dtype).repeat(rows, 1)
    return J.reshape(samples, steps * k, steps * k)


@pytest.mark.parametrize(("steps", "some"), [(13, 13), (13, 2), (13, 1), (16, 2), (100, 12), (9, 7), (1, 1)])
@pytest.mark.parametrize(("rows", "d"), [(1, 1), (1, 3), (2, 3), (3, 1), (1, 20), (2, 20)])
def test_substitution_with_blocks_that_stand_for_their_neighbours(rows, d, steps, some):
    if steps * rows * d > 1000:
        steps, some = 20, 3
    k = rows * d
    D = torch.eye(k, dtype=torch.float64) * 1.5 + draw(7, 2, some, k, k) / (3 * k**0.5)
    r = draw(8, 2, steps, k)
    J, inverse = neighbours(D, steps, rows), torch.linalg.inv(D)
    forward = torch.linalg.solve(J, r.flatten(1)).unflatten(1, (steps, k))
    backward = torch.linalg.solve(J.mT, r.flatten(1)).unflatten(1, (steps, k))
    close(forward_substitution(inverse, r, rows), forward, SAME[torch.float64])
    close(backward_substitution(inverse, r, rows), backward, SAME[torch.float64])


# --- Quick solves, refined ---


class Rough:
    """x of the exact solve times 1 + error, but for some samples."""

    def __init__(self, system: System, error: float, only: slice = slice(None)):
        self.system, self.error, self.only, self.calls = system, error, only, 0

    def __call__(self, y: Tensor, transpose: bool):
        assert y.equal(self.system.y)

        def quick(rhs: Tensor) -> Tensor:
            self.calls += 1
            x = self.system.exact(transpose, rhs=rhs)
            x[self.only] *= 1 + self.error
            return x

        return quick


@both_ways
@pytest.mark.parametrize("error", [0.0, 1e-3, 0.2, -0.3])
def test_a_slightly_wrong_quick_solve_is_refined(error, transpose):
    system = System(rows=2)
    rough = Rough(system, error)
    operator = system.operator()
    found = system.direct(fast=rough, rtol=1e-6 if abs(error) > 0.1 else None).solve(operator, system.rhs, transpose=transpose)
    assert (found.status == Status.converged).all()
    assert found.stats.verified and (rough.calls > 1) == (error != 0)
    assert operator.products == found.stats.products == rough.calls  # none for blocks
    residual = system.rhs - (system.matrix(transpose) @ found.value.unsqueeze(2)).squeeze(2)
    torch.testing.assert_close(found.stats.residual, residual.norm(dim=1), rtol=1e-3, atol=1e-14)
    assert (found.stats.residual <= found.stats.tolerance).all()
    close(found.value, system.exact(transpose), SOLVED if abs(error) < 0.1 else 1e-5)


@both_ways
@pytest.mark.parametrize("only", [slice(None), slice(1)], ids=["all", "one sample"])
@pytest.mark.parametrize("error", [3.0, -2.5, 0.9, float("nan"), float("inf")])
def test_a_badly_wrong_quick_solve_leads_to_the_exact_one(error, only, transpose):
    system = System(rows=2)
    found = system.direct(fast=Rough(system, error, only)).solve(system.operator(), system.rhs, transpose=transpose)
    assert (found.status == Status.converged).all()
    assert not found.stats.verified
    close(found.value, system.exact(transpose), SAME[torch.float64])


def test_no_quick_solve_leads_to_the_exact_one():
    system = System()
    found = system.direct(fast=lambda y, transpose: None).solve(system.operator(), system.rhs)
    close(found.value, system.exact(False), SAME[torch.float64])


# --- Failures ---


@both_ways
@pytest.mark.parametrize("d", [2, 20], ids=["inverse", "LU"])
def test_a_singular_block_is_a_breakdown_of_its_sample(d, transpose):
    system = System(steps=5, d=d)

    def residual(y: Tensor) -> Tensor:  # a step of sample 1 in which nothing depends on the first unknown
        F = system.statement.residual(system.func, y, system.args)
        gone = torch.ones(3, 5, d, dtype=y.dtype)
        gone[1, 2, 0] = 0
        z = F.unflatten(1, (5, d)) * gone
        return z.flatten(1)

    found = system.direct().solve(system.operator(residual), system.rhs, transpose=transpose)
    assert found.status.tolist() == [Status.converged, Status.breakdown, Status.converged]
    assert found.value.isfinite().all()
    close(found.value[::2], system.exact(transpose)[::2], SAME[torch.float64])


@both_ways
@pytest.mark.parametrize(("rows", "d"), [(1, 3), (2, 2), (1, 20)])
def test_a_block_that_is_singular_but_for_rounding_is_a_breakdown(rows, d, transpose):
    system = System(rows, 5, d)
    combination = draw(12, rows * d - 1)

    def residual(y: Tensor) -> Tensor:  # in a step of sample 1 the last row is a combination of the others
        F = system.statement.residual(system.func, y, system.args).unflatten(1, (5, rows * d))
        last = F[..., -1].clone()
        last[1, 2] = F[1, 2, :-1] @ combination
        return torch.cat((F[..., :-1], last.unsqueeze(2)), dim=2).flatten(1)

    found = system.direct().solve(system.operator(residual), system.rhs, transpose=transpose)
    assert found.status.tolist() == [Status.converged, Status.breakdown, Status.converged]
    close(found.value[::2], system.exact(transpose)[::2], SAME[torch.float64])


@both_ways
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", ["y", "rhs"])
@pytest.mark.parametrize("d", [2, 20], ids=["inverse", "LU"])
def test_numbers_that_are_not_finite_stay_in_their_sample(d, place, bad, transpose):
    system = System(rows=2, steps=5, d=d)
    expected = system.direct().solve(system.operator(), system.rhs, transpose=transpose)
    getattr(system, place)[1, 7] = bad
    found = system.direct().solve(system.operator(), system.rhs, transpose=transpose)
    assert found.status.tolist() == [Status.converged, Status.non_finite, Status.converged]
    assert found.value[::2].equal(expected.value[::2])
    assert found.stats.residual[::2].equal(expected.stats.residual[::2])


@both_ways
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", ["y", "rhs"])
def test_the_solution_of_a_sample_that_is_not_finite_is_none(place, bad, transpose):
    system = System(rows=2, steps=5)
    getattr(system, place)[1, 7] = bad
    found = system.direct().solve(system.operator(), system.rhs, transpose=transpose)
    assert found.value[1].isnan().all()  # as from `Dense`
    dense = dil.Dense().solve(system.operator(), system.rhs, transpose=transpose)
    assert dense.status.equal(found.status) and dense.value.isnan().equal(found.value.isnan())


# --- Step after step ---


INNER = {"CG": CG(), "GMRES": GMRES(), "BiCGStab": BiCGStab(), "NormalCG": NormalCG(), "damped": GMRES(damping=0.3)}


@both_ways
@pytest.mark.parametrize(("rows", "steps", "d"), [(1, 1, 3), (1, 13, 2), (3, 5, 4), (2, 3, 20)])
@pytest.mark.parametrize("inner", INNER.values(), ids=INNER)
def test_one_step_after_another_is_the_dense_solve(inner, rows, steps, d, transpose):
    system = System(rows, steps, d)
    operator = system.operator()
    found = system.sequential(inner).solve(operator, system.rhs, transpose=transpose)
    assert (found.status == Status.converged).all()
    assert found.stats.exact and found.stats.method.startswith("step by step")
    assert (found.stats.residual <= found.stats.tolerance).all()
    assert (found.stats.steps >= steps).all()
    assert found.stats.products >= steps and operator.products >= found.stats.products
    close(found.value, system.exact(transpose, inner.damping), SOLVED)


@both_ways
@pytest.mark.parametrize("inner", [JacobianFree(), Neumann(max_steps=3)], ids=repr)
def test_an_approximate_solver_says_that_it_is_one(inner, transpose):
    system = System(rows=2)
    found = system.sequential(inner).solve(system.operator(), system.rhs, transpose=transpose)
    assert not found.stats.exact
    assert found.value.isfinite().all()
    exact = system.exact(transpose)
    error = (found.value - exact).norm(dim=1) / exact.norm(dim=1)
    assert (error > SOLVED).all() and (error < 0.5).all()


def test_the_first_terms_of_the_series_are_what_they_should_be():
    system = System(steps=4)
    found = system.sequential(JacobianFree()).solve(system.operator(), system.rhs, transpose=True)
    r = system.rhs.unflatten(1, (4, 2))
    expected = r.flip(1).cumsum(dim=1).flip(1)  # D_n taken for the identity
    close(found.value.unflatten(1, (4, 2)), expected, SAME[torch.float64])


def test_an_approximate_backward_pass_does_not_fail():
    system = System()
    y0 = system.args[0].requires_grad_()
    found = solve(system.func, y0, system.args[1], batch_dims=1, linear_solver=JacobianFree(), on_failure="raise")
    found.value[-1].sum().backward()
    assert not found.report.backward.stats.exact
    assert "approximate" in str(found.report)


@both_ways
def test_the_first_failure_of_a_sample_is_its_status(transpose):
    system = System(rows=2, steps=4, d=3)
    found = system.sequential(GMRES(max_steps=1)).solve(system.operator(), system.rhs, transpose=transpose)
    assert (found.status == Status.max_steps).all()
    assert (found.stats.residual > found.stats.tolerance).all()


@both_ways
@pytest.mark.parametrize("inner", [GMRES(), NormalCG()], ids=repr)
def test_a_sample_that_is_not_finite_leaves_the_others_alone_step_by_step(inner, transpose):
    system = System(steps=4)
    system.rhs[1, 3] = torch.nan
    found = system.sequential(inner).solve(system.operator(), system.rhs, transpose=transpose)
    assert found.status.tolist() == [Status.converged, Status.non_finite, Status.converged]
    exact = torch.linalg.solve(system.matrix(transpose)[::2], system.rhs[::2])
    close(found.value[::2], exact, SOLVED)


def test_without_the_function_the_matrix_is_solved_with_as_a_whole():
    system = System()
    whole = Sequential(steps=system.steps, rows=1, inner=GMRES())
    found = whole.solve(system.operator(), system.rhs, transpose=True)
    assert (found.status == Status.converged).all()
    close(found.value, system.exact(True), SOLVED)


@pytest.mark.parametrize(
    ("samples", "d", "power", "on_cpu", "on_gpu"),
    [
        (3, 200, 1.0, "Bidiagonal", "Bidiagonal"),
        (1, 300, 1.0, "step by step", "Bidiagonal"),
        (3, 300, 1.5, "step by step", "Bidiagonal"),
        (1, 1100, 1.0, "step by step", "step by step"),
    ],
)
def test_the_blocks_of_a_large_state_are_formed_where_it_pays(samples, d, power, on_cpu, on_gpu):
    W = (draw(5, d, d) / d**0.5).requires_grad_()
    y0, times = draw(6, samples, d).requires_grad_(), torch.linspace(0, 1, 33, dtype=torch.float64) ** power
    v = draw(7, 33, samples, d)
    found = solve(lambda t, y: torch.tanh(y @ W) - y, y0, times, method="backward_euler", batch_dims=1)
    gradient = torch.autograd.grad((v * found.value).sum(), (y0, W))
    expected = on_gpu if y0.is_cuda else on_cpu
    assert found.report.backward.stats.method.startswith(expected)
    with torch.no_grad():  # λ_n = (I - h J_n)⁻ᵀ (λ_{n+1} + v_n)
        states, h = found.value, times.diff()
        later, dW = torch.zeros_like(y0), torch.zeros_like(W)
        for n in reversed(range(32)):
            inner = 1 - torch.tanh(states[n + 1] @ W) ** 2
            eye = torch.eye(d, dtype=torch.float64)
            J = inner.unsqueeze(1) * W - eye  # its transpose, (B, D, D)
            later = torch.linalg.solve(eye - h[n] * J, later + v[n + 1])
            dW += h[n] * states[n + 1].T @ (inner * later)
        exact = later + v[0], dW
    for actual, wanted in zip(gradient, exact, strict=True):
        assert (actual - wanted).norm() <= 1e-6 * wanted.norm()


# --- Errors that the report estimates ---


@both_ways
@pytest.mark.parametrize("rough", [False, True], ids=["exact", "quick"])
def test_the_errors_of_a_solve_are_known(rough, transpose):
    system = System(rows=2)
    fast = Rough(system, 0.01) if rough else None
    operator = system.operator()
    operator.watched = draw(9, *system.rhs.shape)
    found = system.direct(fast=fast, rtol=1e-3).solve(operator, system.rhs, transpose=transpose)
    exact = system.exact(transpose)
    value_error = torch.linalg.solve(system.matrix(False), operator.watched).norm(dim=1)
    torch.testing.assert_close(found.stats.evidence.value_error(found.stats), value_error, rtol=ESTIMATED, atol=0)
    estimate = found.stats.evidence.adjoint_error(found.stats)
    error = (found.value - exact).norm(dim=1) / exact.norm(dim=1)
    if rough:
        torch.testing.assert_close(estimate, error, rtol=ESTIMATED, atol=0)
    else:
        assert (estimate < 1e-12).all() and (error < 1e-12).all()


@pytest.mark.parametrize("method", ["backward_euler", "radau3"])
def test_the_report_knows_how_far_the_trajectory_is_from_the_exact_one(method):
    system = System(samples=3)
    y0, times = system.args[0].requires_grad_(), torch.linspace(0, 2, 15, dtype=torch.float64)
    found = solve(system.func, y0, times, method=method, batch_dims=1, solver=SimplifiedNewton(rtol=1e-4))
    assert found.report.value_error is None and found.report.adjoint_error is None
    found.value.sum().backward()
    tight = dil.odeint(system.func, y0, times, method=method, batch_dims=1)
    error = (found.value - tight).detach()[1:].transpose(0, 1).flatten(1).norm(dim=1)
    assert (error > 1e-8).all()
    if method == "backward_euler":  # the unknowns are the states
        torch.testing.assert_close(found.report.value_error, error, rtol=ESTIMATED, atol=0)
    else:
        assert (found.report.value_error > 0.9 * error).all() and (found.report.value_error < 10 * error).all()
    assert (found.report.adjoint_error < 1e-10).all()
