"""Linear solvers: systems × the solvers that claim to solve them, against torch.linalg."""

import copy
import pickle
import threading
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import torchdil as dil
from torchdil import batch
from torchdil.linear import (
    CG,
    GMRES,
    MINRES,
    Auto,
    BiCGStab,
    Dense,
    JacobianFree,
    LinearSolver,
    Neumann,
    NormalCG,
    WarmStart,
)
from torchdil.linear.rounding import left_by_rounding
from torchdil.operator import Operator
from torchdil.solution import Result, Status

ATOL = 1e-7  # of the value, relative to its size: rtol 1e-10 times the condition numbers below
KRYLOV = Auto(dense_below=0)


def draw(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def with_eigenvalues(eigenvalues, samples, seed=0):
    """Symmetric matrices (B, n, n) with these eigenvalues and random eigenvectors, and those."""
    n = len(eigenvalues)
    Q = torch.linalg.qr(draw(seed, samples, n, n))[0]
    A = Q @ torch.diag(torch.as_tensor(eigenvalues, dtype=torch.float64)) @ Q.mT
    return (A + A.mT) / 2, Q


def operator_of(A, symmetric=False):
    return Operator(lambda y: (A @ y.unsqueeze(2)).squeeze(2), torch.zeros_like(A[:, 0]), symmetric)


def apply(A, x):
    return (A @ x.unsqueeze(2)).squeeze(2)


def least_squares(A, b):
    return apply(torch.linalg.pinv(A, rtol=1e-10), b)


def relative(a, b):
    return ((a - b).norm(dim=1) / b.norm(dim=1).clamp_min(1e-300)).max()


def names(status):
    return [Status(int(code)).name for code in status]


@dataclass(frozen=True)
class System:
    """A x = b for a batch; `consistent` if b is in the range of A."""

    name: str
    A: torch.Tensor
    b: torch.Tensor
    symmetric: bool
    solvers: tuple[LinearSolver, ...]
    consistent: bool = True


DEFINITE = (CG(), CG(flexible=True), NormalCG(), MINRES(), GMRES(), BiCGStab(), Dense(), Auto(), KRYLOV, WarmStart(CG()))
ANY = (CG(), NormalCG(), GMRES(), GMRES(restart=5), BiCGStab(), Dense(), Auto(), KRYLOV)


def systems(samples):
    n = 12
    b = draw(1, samples, n)
    singular = with_eigenvalues([0, 0, -1, *range(1, n - 2)], samples)[0]
    semidefinite = with_eigenvalues([0, 0, *range(1, n - 1)], samples)[0]
    indefinite = with_eigenvalues([-3, -2, -0.5, *range(1, n - 2)], samples)[0]
    ill = with_eigenvalues(torch.logspace(0, -6, n), samples)[0]
    general = draw(2, samples, n, n) + 5 * torch.eye(n, dtype=torch.float64)
    rank_deficient = draw(4, samples, n, 8) @ draw(5, samples, 8, n)
    eye = torch.eye(n, dtype=torch.float64).expand(samples, n, n)
    scalar = 2 + draw(3, samples, 1, 1) ** 2
    spd = with_eigenvalues(range(1, n + 1), samples)[0]
    return [
        System("definite", spd, b, True, DEFINITE),
        System("ill_conditioned", ill, b, True, (CG(), MINRES(), GMRES(), Dense(), Auto(), KRYLOV)),
        System("indefinite", indefinite, b, True, (MINRES(), GMRES(), BiCGStab(), NormalCG(), Dense(), Auto(), KRYLOV)),
        System("singular", singular, apply(singular, b), True, (MINRES(), GMRES(), Dense(), KRYLOV)),
        System("semidefinite", semidefinite, apply(semidefinite, b), True, (CG(), MINRES(), GMRES(), Dense(), KRYLOV)),
        System("inconsistent", singular, b, True, (MINRES(), NormalCG(), Dense(), KRYLOV), consistent=False),
        System("inconsistent_semidefinite", semidefinite, b, True, (MINRES(), Dense(), KRYLOV), consistent=False),
        System("inconsistent_general", rank_deficient, b, False, (CG(), NormalCG(), Dense()), consistent=False),
        System("general", general, b, False, ANY),
        System("scalar", scalar, b[:, :1], True, DEFINITE),
        System("scalar_general", scalar, b[:, :1], False, ANY),
        System("identity", eye, b, True, (*DEFINITE, Neumann())),
        System("contraction", eye - 0.01 * general, b, False, (*ANY, Neumann(max_steps=60))),
        System("zero", spd, torch.zeros_like(b), True, (*DEFINITE, Neumann(), JacobianFree())),
        System("zero_singular", singular, torch.zeros_like(b), True, (CG(), MINRES(), GMRES(), BiCGStab(), Dense())),
    ]


CASES = [
    pytest.param(system, solver, transpose, id=f"{system.name}-{samples}-{solver}-{transpose}".replace("rtol=None, ", ""))
    for samples in (1, 5)
    for system in systems(samples)
    for solver in system.solvers
    for transpose in (False, True)
]


@pytest.mark.parametrize(("system", "solver", "transpose"), CASES)
def test_solution(system, solver, transpose):
    A = system.A.mT if transpose else system.A
    result = copy.copy(solver).solve(operator_of(system.A, system.symmetric), system.b, transpose=transpose)
    expected = least_squares(A, system.b)
    assert relative(result.value, expected) < (ATOL if system.consistent else 1e-5)
    residual = (system.b - apply(A, result.value)).norm(dim=1)
    if system.consistent:
        assert set(names(result.status)) == {"converged"}
        assert (residual <= 1.1 * result.stats.tolerance + 1e-14).all()
        assert (result.stats.residual <= result.stats.tolerance).all()
    else:
        assert set(names(result.status)) <= {"stagnated", "breakdown"}
        torch.testing.assert_close(result.stats.residual, residual)
    if not system.b.any():
        assert not result.value.any()
        assert not result.stats.steps.any()


@pytest.mark.parametrize("solver", [CG(), NormalCG(), GMRES(), BiCGStab()], ids=str)
def test_inconsistent_systems_fail_without_garbage(solver):
    for eigenvalues in ([0, 0, *range(1, 11)], [0, *torch.logspace(0, -4, 30).tolist()]):
        A, Q = with_eigenvalues(eigenvalues, 5)
        for b in (draw(1, 5, len(eigenvalues)), Q[:, :, 0]):  # a part, or all of it, in the null space
            result = solver.solve(operator_of(A, True), b)
            assert (result.status != Status.converged).all()
            assert torch.isfinite(result.value).all()
            assert (apply(A, result.value) - b).norm() <= 1.01 * b.norm()
            assert result.value.norm() < 1e9 * b.norm()


ITERATIVE = [
    CG(),
    CG(flexible=True),
    NormalCG(),
    MINRES(),
    GMRES(),
    GMRES(restart=4),
    BiCGStab(),
    KRYLOV,
    Neumann(max_steps=200),
]


def contraction(samples=4, n=8):
    A, _ = with_eigenvalues(torch.linspace(0.5, 1.5, n), samples)
    return A, draw(5, samples, n)


@pytest.mark.parametrize("solver", ITERATIVE, ids=str)
class TestStart:
    def test_the_solution_costs_no_step(self, solver):
        A, b = contraction()
        x = torch.linalg.solve(A, b.unsqueeze(2)).squeeze(2)
        cold = solver.solve(operator_of(A, True), b)
        warm = solver.solve(operator_of(A, True), b, x)
        assert not warm.stats.steps.any()
        assert cold.stats.steps.min() > 2
        near = solver.solve(operator_of(A, True), b, x + 1e-8 * draw(6, *x.shape))
        assert (near.stats.steps < cold.stats.steps).all()
        torch.testing.assert_close(near.value, x, rtol=1e-9, atol=1e-9)

    @pytest.mark.parametrize("size", [1.0, 1e6, float("nan")])
    def test_a_wrong_start_does_no_harm(self, solver, size):
        A, b = contraction()
        x = torch.linalg.solve(A, b.unsqueeze(2)).squeeze(2)
        start = x.clone()
        start[1] = size * draw(7, 1, 8)
        kept = start.clone()
        result = solver.solve(operator_of(A, True), b, start)
        torch.testing.assert_close(result.value, x, rtol=1e-8, atol=1e-8)
        assert set(names(result.status)) == {"converged"}
        assert result.stats.steps[0] == 0
        torch.testing.assert_close(start, kept, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("solver", [*ITERATIVE, Dense(), JacobianFree()], ids=str)
@pytest.mark.parametrize("bad", ["nan_matrix", "nan_rhs", "ill_conditioned"])
def test_one_bad_sample_changes_nothing_for_the_others(solver, bad):
    A, b = contraction()
    alone = solver.solve(operator_of(A[1:], True), b[1:])
    A, b = A.clone(), b.clone()
    if bad == "nan_matrix":
        A[0, 2, 3] = A[0, 3, 2] = torch.nan
    elif bad == "nan_rhs":
        b[0, 2] = torch.nan
    else:
        A[:1] = with_eigenvalues(torch.logspace(0, -7, 8), 1)[0]
    together = solver.solve(operator_of(A, True), b)
    torch.testing.assert_close(together.value[1:], alone.value, rtol=0, atol=1e-12)
    assert names(together.status[1:]) == names(alone.status)
    assert (together.stats.steps[1:] == alone.stats.steps).all()
    if bad == "ill_conditioned":
        assert torch.isfinite(together.value).all()
    elif not isinstance(solver, JacobianFree) or bad == "nan_rhs":
        assert names(together.status)[0] == "non_finite"


@pytest.mark.parametrize("solver", ITERATIVE, ids=str)
def test_testing_convergence_rarely_changes_nothing(solver, monkeypatch):
    """As on a GPU: samples go on being asked for steps after they are done."""
    A, b = contraction()
    A[2] = 2 * torch.eye(8, dtype=torch.float64)
    often = solver.solve(operator_of(A, True), b)
    monkeypatch.setattr("torchdil.progress.check_every", lambda device: 5)
    rarely = solver.solve(operator_of(A, True), b)
    assert torch.equal(rarely.value, often.value)
    assert torch.equal(rarely.status, often.status)
    assert torch.equal(rarely.stats.steps, often.stats.steps)


@pytest.mark.parametrize("solver", [CG(), NormalCG(), MINRES(), GMRES(), BiCGStab(), Dense(), Auto(), KRYLOV], ids=str)
def test_damping_means_the_same_everywhere(solver):
    A = draw(8, 3, 10, 10) + 4 * torch.eye(10, dtype=torch.float64)
    symmetric = isinstance(solver, MINRES)
    A = A + A.mT if symmetric else A
    b = draw(9, 3, 10)
    for transpose in (False, True):
        shifted = (A.mT if transpose else A) + 0.3 * torch.eye(10, dtype=torch.float64)
        result = replace(solver, damping=0.3).solve(operator_of(A, symmetric), b, transpose=transpose)
        torch.testing.assert_close(result.value, torch.linalg.solve(shifted, b), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("solver", [CG(damping=0.5), NormalCG(damping=0.5), MINRES(damping=0.5), GMRES(damping=0.5)], ids=str)
def test_products_are_not_changed_in_place(solver):
    b = draw(10, 3, 5)
    shift = Operator(lambda y: y - 1, torch.zeros_like(b), True)  # its product may return the vector itself
    torch.testing.assert_close(solver.solve(shift, b).value, b / 1.5)


def test_cg_ends_in_as_many_steps_as_there_are_eigenvalues():
    for k in (1, 2, 3, 5):
        A, _ = with_eigenvalues([float(1 + i % k) for i in range(30)], 4)
        result = CG().solve(operator_of(A, True), draw(11, 4, 30))
        assert result.stats.steps.tolist() == [k] * 4


@pytest.mark.parametrize("solver", [CG(), MINRES(), GMRES(), NormalCG(), BiCGStab()], ids=str)
def test_a_multiple_of_the_identity_takes_one_step(solver):
    A = 2 * torch.eye(6, dtype=torch.float64).expand(3, 6, 6)
    b = draw(12, 3, 6)
    result = solver.solve(operator_of(A, True), b)
    torch.testing.assert_close(result.value, b / 2)
    assert result.stats.steps.tolist() == [1, 1, 1]


class TestSpectrum:
    EIGENVALUES = (0.1, 0.5, *range(1, 9))

    @pytest.mark.parametrize("solver", [CG(), KRYLOV, Dense()], ids=str)
    def test_ritz_values_of_a_definite_matrix(self, solver):
        A, _ = with_eigenvalues(self.EIGENVALUES, 3)
        low, high = replace(solver, rtol=1e-12).solve(operator_of(A, True), draw(13, 3, 10)).stats.spectrum.extremes()
        torch.testing.assert_close(low, torch.linalg.eigvalsh(A)[:, 0], rtol=1e-6, atol=0)
        torch.testing.assert_close(high, torch.linalg.eigvalsh(A)[:, -1], rtol=1e-6, atol=0)

    @pytest.mark.parametrize("solver", [MINRES(), KRYLOV, Dense()], ids=str)
    def test_signed_values_nearest_zero_of_an_indefinite_matrix(self, solver):
        A, _ = with_eigenvalues((-0.2, *self.EIGENVALUES[1:-1], -9), 3)
        low, high = replace(solver, rtol=1e-12).solve(operator_of(A, True), draw(13, 3, 10)).stats.spectrum.extremes()
        torch.testing.assert_close(low, torch.full((3,), -0.2, dtype=torch.float64), rtol=1e-6, atol=0)
        torch.testing.assert_close(high, torch.full((3,), -9.0, dtype=torch.float64), rtol=1e-6, atol=0)

    @pytest.mark.parametrize("solver", [NormalCG(), GMRES(), Dense()], ids=str)
    def test_singular_values(self, solver):
        A = draw(14, 3, 10, 10) + 4 * torch.eye(10, dtype=torch.float64)
        low, high = replace(solver, rtol=1e-12).solve(operator_of(A), draw(15, 3, 10)).stats.spectrum.extremes()
        torch.testing.assert_close(low, torch.linalg.svdvals(A)[:, -1], rtol=1e-5, atol=0)
        torch.testing.assert_close(high, torch.linalg.svdvals(A)[:, 0], rtol=1e-5, atol=0)

    @pytest.mark.parametrize("solver", [CG(), MINRES(), GMRES(), NormalCG(), Dense()], ids=str)
    def test_values_lie_inside_for_samples_that_end_early(self, solver):
        n = 10
        A = torch.cat([with_eigenvalues([3.0] * n, 1)[0], with_eigenvalues(range(1, n + 1), 2)[0]])
        b = draw(16, 3, n)
        b[2] = 0  # no step at all
        low, high = solver.solve(operator_of(A, True), b).stats.spectrum.extremes()
        torch.testing.assert_close(torch.stack([low[0], high[0]]), torch.tensor([3.0, 3.0], dtype=torch.float64))
        assert low[1] >= 1 - 1e-8
        assert high[1] <= n + 1e-8
        assert isinstance(solver, Dense) or low[2].isnan()

    @pytest.mark.parametrize("solver", [CG(), MINRES(), GMRES(), Dense()], ids=str)
    def test_nan_samples_do_not_break_it(self, solver):
        A, b = contraction()
        A[0, 0, 0] = torch.nan
        low, _ = solver.solve(operator_of(A, True), b).stats.spectrum.extremes()
        assert torch.isfinite(low[1:]).all()

    def test_a_preconditioned_solve_has_none(self):
        A, b = contraction()
        for solver in (CG, MINRES, GMRES):
            assert solver(preconditioner=lambda r: 0.5 * r).solve(operator_of(A, True), b).stats.spectrum is None


class TestStatus:
    """Every status that a linear solver can end with."""

    def test_converged_and_max_steps(self):
        A, _ = with_eigenvalues(torch.logspace(0, -5, 40), 2)
        b = draw(17, 2, 40)
        b[0] = 0
        for solver in (CG, NormalCG, MINRES, GMRES, BiCGStab, Neumann):
            result = solver(max_steps=3).solve(operator_of(A, True), b)
            assert names(result.status) == ["converged", "max_steps"]
            assert result.stats.steps.tolist() == [0, 3]

    def test_negative_curvature(self):
        A, _ = with_eigenvalues([-1, *range(1, 8)], 2)
        A[1] += 2 * torch.eye(8, dtype=torch.float64)
        assert names(CG().solve(operator_of(A, True), draw(18, 2, 8)).status) == ["negative_curvature", "converged"]

    def test_breakdown(self):
        A, Q = with_eigenvalues([0, *range(1, 8)], 2)
        for solver in (CG(), Dense()):
            assert set(names(solver.solve(operator_of(A, True), draw(18, 2, 8)).status)) == {"breakdown"}
        zero = torch.zeros_like(A)
        for solver in (CG(), NormalCG(), GMRES(), BiCGStab(), Dense()):
            result = solver.solve(operator_of(zero, True), Q[:, :, 0])
            assert set(names(result.status)) == {"breakdown"}
            assert torch.isfinite(result.value).all()

    def test_bicgstab_breaks_down_on_a_rotation(self):
        skew = torch.tensor([[[0.0, 1.0], [-1.0, 0.0]]], dtype=torch.float64)  # rᵀAr = 0 for every r
        b = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
        assert names(BiCGStab().solve(operator_of(skew), b).status) == ["breakdown"]
        result = KRYLOV.solve(operator_of(skew), b)
        torch.testing.assert_close(result.value, torch.tensor([[0.0, 1.0]], dtype=torch.float64))

    def test_stagnated(self):
        A, _ = with_eigenvalues([0, *range(1, 8)], 2)
        assert set(names(MINRES().solve(operator_of(A, True), draw(18, 2, 8)).status)) == {"stagnated"}
        diverging = 3 * torch.eye(8, dtype=torch.float64).expand(2, 8, 8)
        result = Neumann().solve(operator_of(diverging), draw(19, 2, 8))
        assert set(names(result.status)) == {"stagnated"}
        assert not result.value.any()  # the best point seen is zero

    def test_non_finite(self):
        A, b = contraction()
        A[0, 0, 0] = torch.inf
        for solver in (CG(), NormalCG(), MINRES(), GMRES(), BiCGStab(), Neumann(), Dense(), Auto(), KRYLOV):
            assert names(solver.solve(operator_of(A, True), b).status)[0] == "non_finite"


def test_dense_solves_badly_scaled_and_mixed_samples():
    A = torch.stack(
        [torch.diag(torch.tensor(d, dtype=torch.float64)) for d in ([1.0, 1e-20], [1.0, -2.0], [1.0, 2.0], [1.0, 0.0])]
    )
    b = torch.ones(4, 2, dtype=torch.float64)
    for symmetric in (True, False):
        result = Dense().solve(operator_of(A, symmetric), b)
        assert names(result.status) == ["converged"] * 3 + ["breakdown"]
        expected = torch.tensor([[1.0, 1e20], [1.0, -0.5], [1.0, 0.5], [1.0, 0.0]], dtype=torch.float64)
        torch.testing.assert_close(result.value, expected)
        assert result.stats.steps.tolist() == [1] * 4


def test_units_of_rows_make_no_matrix_singular():
    well, b = draw(36, 50, 6, 6) + 5 * torch.eye(6, dtype=torch.float64), draw(37, 50, 6)
    unit = 10 ** (16 * torch.rand(50, 6, generator=torch.Generator().manual_seed(38)).double())
    result = Dense().solve(operator_of(unit.unsqueeze(2) * well, False), unit.sqrt() * b)
    assert set(names(result.status)) == {"converged"}
    assert (result.stats.residual <= result.stats.tolerance).all()
    torch.testing.assert_close(result.value, torch.linalg.solve(well, b / unit.sqrt()), rtol=ATOL, atol=ATOL)


@pytest.mark.parametrize("n", [3, 6])
@pytest.mark.parametrize("kind", ["of integers", "of any numbers", "badly scaled"])
def test_no_singular_matrix_passes_for_one_that_is_badly_scaled(kind, n):
    """Some of their solutions, 1e16 and more, leave a residual that rounding accounts for, row by row."""
    generator = torch.Generator().manual_seed(40)
    if kind == "of integers":
        A, combination, b = (torch.randint(-9, 10, shape, generator=generator).double() for shape in singular_shapes(n))
    else:
        A, combination, b = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in singular_shapes(n))
    A[:, -1] = (combination * A[:, :-1]).sum(dim=1)
    if kind == "badly scaled":
        A = draw(41, 5000, n, 1).mul(5).exp() * A * draw(42, 5000, 1, n).mul(5).exp()
    LU, order, _ = torch.linalg.lu_factor_ex(A)

    def by_factors(b):
        return torch.linalg.lu_solve(LU, order, b.unsqueeze(2)).squeeze(2)

    x = by_factors(b)
    r, terms = b - apply(A, x), apply(A.abs(), x.abs()) + b.abs()
    assert (r.abs() <= 1e-15 * terms).all(dim=1).any()
    assert not left_by_rounding(by_factors, x, r, terms).any()


def singular_shapes(n):
    return (5000, n, n), (5000, n - 1, 1), (5000, n)


def test_minres_refuses_what_is_not_symmetric():
    A, b = contraction()
    with pytest.raises(ValueError, match=r"linear_solver=MINRES\(\) needs a symmetric J.*use GMRES"):
        MINRES().solve(operator_of(A), b)


def test_gmres_measures_the_true_residual():
    """With any preconditioner the tested residual is that of the system itself."""
    A = draw(20, 3, 15, 15) + 6 * torch.eye(15, dtype=torch.float64)
    b = draw(21, 3, 15)
    weights = torch.logspace(-2, 2, 15, dtype=torch.float64)
    result = GMRES(rtol=1e-6, restart=6, preconditioner=lambda r: weights * r).solve(operator_of(A), b)
    torch.testing.assert_close(result.stats.residual, (b - apply(A, result.value)).norm(dim=1))


@pytest.mark.parametrize("solver", [MINRES(), GMRES(), BiCGStab()], ids=str)
def test_claims_of_convergence_are_checked(solver):
    """These recurrences drift: what is reported is the true residual."""
    half = torch.logspace(0, -6, 15)
    A, _ = with_eigenvalues(torch.cat([half, -half]), 3)
    b = draw(22, 3, 30)
    result = solver.solve(operator_of(A, True), b)
    true = (b - apply(A, result.value)).norm(dim=1)
    rounding = torch.finfo(b.dtype).eps * float(result.value.norm(dim=1).max())  # of the product A x, whose sums may differ
    torch.testing.assert_close(result.stats.residual, true, rtol=1e-2, atol=rounding)
    if not isinstance(solver, BiCGStab):
        assert set(names(result.status)) == {"converged"}


@pytest.mark.parametrize("solver", [CG(), MINRES(), GMRES(), BiCGStab()], ids=str)
def test_a_sample_that_is_done_early_is_left_alone_in_half_precision(solver):
    """The others go on, and the reciprocal of what rounding has left of it is too large a number."""
    for seed in range(40):
        scale = torch.randint(0, 3, (3,), generator=torch.Generator().manual_seed(seed)) * 2.0**-10
        A = torch.diag_embed(torch.stack((2.0 + scale, torch.tensor([1.0, 3.0, 5.0])))).half()
        b = draw(seed, 2, 3).half()
        result = solver.solve(operator_of(A, True), b)
        assert names(result.status) == ["converged"] * 2, seed
        torch.testing.assert_close(
            result.value.double(), (b / torch.diagonal(A, dim1=1, dim2=2)).double(), rtol=0.05, atol=0.05
        )


class TestNeumann:
    def test_terms(self):
        A, b = contraction()
        B = torch.eye(8, dtype=torch.float64) - A
        expected, term = b.clone(), b
        for _ in range(4):
            term = apply(B, term)
            expected = expected + term
        result = Neumann(max_steps=5).solve(operator_of(A), b)
        torch.testing.assert_close(result.value, expected)
        assert not result.stats.exact
        assert result.stats.products == 5
        torch.testing.assert_close(result.stats.residual, (b - apply(A, result.value)).norm(dim=1))

    def test_a_series_that_diverges_is_a_failure(self):
        """Its best point may be zero, which is no approximation of anything."""
        theta = torch.ones(3, dtype=torch.float64, requires_grad=True)
        score = lambda y: 1.5 * ((y - theta) ** 2).sum()  # noqa: E731 (its Hessian is 3 I)
        y = dil.argmin(score, torch.zeros(3, dtype=torch.float64), linear_solver=Neumann()).value
        with pytest.warns(dil.ConvergenceWarning, match="the series diverges"):
            y.sum().backward()

    def test_jacobian_free_makes_no_product(self):
        A, b = contraction()
        b[1] = 0
        operator = operator_of(A)
        result = JacobianFree().solve(operator, b, transpose=True)
        assert torch.equal(result.value, b)
        assert operator.products == 0
        assert not result.stats.exact
        assert names(result.status) == ["max_steps", "converged", "max_steps", "max_steps"]
        assert result.stats.residual.isnan().tolist() == [True, False, True, True]


class TestAuto:
    def test_dense_below(self):
        A, b = contraction()
        assert Auto().solve(operator_of(A, True), b).stats.method == "Dense"
        assert Auto(dense_below=8).solve(operator_of(A, True), b).stats.method == "Dense"
        assert Auto(dense_below=7).solve(operator_of(A, True), b).stats.method == "CG"
        assert Auto(dense_below=7).solve(operator_of(A), b).stats.method == "GMRES(30)"

    def test_large_batches_are_not_made_dense(self):
        n = 64
        A = torch.eye(n, dtype=torch.float64).expand(65, n, n)
        most = 4 if A.device.type == "cpu" else 64  # beside CG
        for samples, symmetric, method in (
            (most, True, "Dense"),
            (most + 1, True, "CG"),
            (64, False, "Dense"),
            (65, False, "GMRES(30)"),
        ):
            result = Auto().solve(operator_of(A[:samples], symmetric), draw(23, samples, n))
            assert result.stats.method == method, samples

    def test_minres_takes_over_where_curvature_is_negative(self):
        A, _ = with_eigenvalues([-1, *range(1, 12)], 3)
        A[0] = with_eigenvalues(range(1, 13), 1)[0]
        b = draw(24, 3, 12)
        alone = CG().solve(operator_of(A[:1], True), b[:1])
        operator = operator_of(A, True)
        result = KRYLOV.solve(operator, b)
        assert result.stats.method == "CG, then MINRES"
        assert set(names(result.status)) == {"converged"}
        torch.testing.assert_close(result.value, torch.linalg.solve(A, b), rtol=1e-7, atol=1e-7)
        torch.testing.assert_close(result.value[:1], alone.value, rtol=0, atol=1e-12)
        assert result.stats.steps[0] == alone.stats.steps[0]
        assert result.stats.products == operator.products
        assert len(result.stats.history) > result.stats.steps.max()

    def test_bicgstab_takes_over_where_gmres_stops(self):
        n = 60
        A = draw(25, 2, n, n) / n**0.5 + torch.diag(torch.linspace(0.5, 40, n, dtype=torch.float64))
        b = draw(26, 2, n)
        result = Auto(dense_below=0, max_steps=45).solve(operator_of(A), b)
        assert result.stats.method == "GMRES(30), then BiCGStab"
        first = GMRES(max_steps=45).solve(operator_of(A), b)
        assert (result.stats.residual <= first.stats.residual).all()

    def test_settings_are_passed_on(self):
        A, b = contraction()
        used = []

        def precondition(r):
            used.append(r)
            return 0.5 * r

        solver = Auto(rtol=1e-3, max_steps=50, damping=0.5, preconditioner=precondition, product="traced", dense_below=0)
        result = solver.solve(operator_of(A, True), b)
        assert used
        assert result.stats.method == "preconditioned CG"
        torch.testing.assert_close(result.stats.tolerance, 1e-3 * b.norm(dim=1))
        x = torch.linalg.solve(A + 0.5 * torch.eye(8, dtype=torch.float64), b)
        assert 1e-12 < relative(result.value, x) < 1e-2


class TestWarmStart:
    def test_the_next_solve_is_shorter(self):
        A, b = contraction()
        solver = WarmStart(CG())
        cold = solver.solve(operator_of(A, True), b)
        warm = solver.solve(operator_of(A, True), b + 1e-7 * draw(27, *b.shape))
        assert warm.stats.steps.max() < cold.stats.steps.min()
        assert warm.stats.method == "CG, warm start"
        torch.testing.assert_close(warm.value, torch.linalg.solve(A, b), rtol=1e-5, atol=1e-5)
        solver.forget()
        assert solver.solve(operator_of(A, True), b).stats.steps.tolist() == cold.stats.steps.tolist()

    def test_only_for_the_same_kind_of_system(self):
        A = draw(28, 3, 6, 6) + 4 * torch.eye(6, dtype=torch.float64)
        b = draw(29, 3, 6)
        solver = WarmStart(GMRES())
        solver.solve(operator_of(A), b)
        assert solver.solve(operator_of(A), b, transpose=True).stats.method == "GMRES(30)"
        assert solver.solve(operator_of(A[:2]), b[:2]).stats.method == "GMRES(30)"
        assert solver.solve(operator_of(A[:2].float()), b[:2].float()).stats.method == "GMRES(30)"
        x = solver.solve(operator_of(A), b, transpose=True).value
        torch.testing.assert_close(x, torch.linalg.solve(A.mT, b), rtol=1e-8, atol=1e-8)

    def test_failed_and_useless_starts_are_dropped(self):
        A, b = contraction()
        solver = WarmStart(CG())
        bad = b.clone()
        bad[0] = torch.nan
        solver.solve(operator_of(A, True), bad)
        solver.solve(operator_of(A, True), -b)  # the worst start for what follows
        result = solver.solve(operator_of(A, True), b)
        assert result.stats.steps.tolist() == CG().solve(operator_of(A, True), b).stats.steps.tolist()
        assert set(names(result.status)) == {"converged"}

    def test_copies_and_pickles_leave_the_memory_behind(self):
        A, b = contraction()
        solver = WarmStart(CG(damping=0.1))
        solver.solve(operator_of(A, True), b)
        for other in (copy.copy(solver), copy.deepcopy(solver), pickle.loads(pickle.dumps(solver))):
            assert other.solver == solver.solver
            assert other.damping == 0.1
            assert other.solve(operator_of(A, True), b).stats.method == "CG"
            assert other != solver
        assert repr(solver) == f"WarmStart({solver.solver!r})"

    def test_threads(self):
        A, b = contraction()
        solver, results = WarmStart(CG()), []

        def work(k):
            results.append((k, solver.solve(operator_of(A, True), k * b)))

        threads = [threading.Thread(target=work, args=(k,)) for k in range(1, 9)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        x = torch.linalg.solve(A, b)
        assert len(results) == 8
        for k, result in results:
            torch.testing.assert_close(result.value, k * x, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("solver", [CG(), NormalCG(), MINRES(), GMRES(), BiCGStab(), Dense(), KRYLOV], ids=str)
def test_float32(solver):
    A, _ = with_eigenvalues(range(1, 21), 3)
    b = draw(30, 3, 20)
    result = solver.solve(operator_of(A.float(), True), b.float())
    assert result.value.dtype == result.stats.residual.dtype == torch.float32
    assert set(names(result.status)) == {"converged"}
    assert relative(result.value.double(), torch.linalg.solve(A, b)) < 1e-4


@pytest.mark.parametrize("solver", [CG(), MINRES(), GMRES(), Dense()], ids=str)
def test_float32_inconsistent(solver):
    A, _ = with_eigenvalues([0, *range(1, 20)], 3)
    b = draw(31, 3, 20)
    result = solver.solve(operator_of(A.float(), True), b.float())
    assert (result.status != Status.converged).all()
    assert result.value.norm() < 100 * least_squares(A, b).norm()


def test_half_precision():
    A, b = contraction()
    x = torch.linalg.solve(A, b)
    for solver in (CG(), Dense()):
        result = solver.solve(operator_of(A.bfloat16(), True), b.bfloat16())
        assert result.value.dtype == torch.bfloat16
        assert relative(result.value.double(), x) < 0.1


@settings(max_examples=30, deadline=None)
@given(samples=st.integers(1, 6), n=st.integers(1, 12), seed=st.integers(0, 2**16), transpose=st.booleans())
def test_any_shape(samples, n, seed, transpose):
    noise, b = draw(seed, samples, n, n), draw(seed + 1, samples, n)
    eye = torch.eye(n, dtype=torch.float64)
    general, definite = noise + 3 * n**0.5 * eye, noise @ noise.mT / n + 0.1 * eye
    for A, symmetric, solvers in (
        (general, False, (CG(), NormalCG(), GMRES(), GMRES(restart=4), BiCGStab(), Dense(), Auto(), KRYLOV)),
        (definite, True, (CG(), MINRES(), GMRES(), Dense(), Auto(), KRYLOV)),
    ):
        x = torch.linalg.solve(A.mT if transpose else A, b)
        for solver in solvers:
            result = solver.solve(operator_of(A, symmetric), b, transpose=transpose)
            assert result.value.shape == (samples, n)
            assert relative(result.value, x) < ATOL, solver
            assert set(names(result.status)) == {"converged"}, solver


@pytest.mark.parametrize(
    ("make", "error", "sentence"),
    [
        (lambda: CG(rtol=-1.0), ValueError, "rtol must be a number >= 0 or None, got -1.0."),
        (lambda: GMRES(atol=float("nan")), ValueError, "atol must be a number >= 0, got nan."),
        (lambda: MINRES(damping=-0.1), ValueError, "damping must be a number >= 0"),
        (lambda: BiCGStab(max_steps=0), ValueError, "max_steps must be an integer >= 1 or None, got 0."),
        (lambda: Dense(product="magic"), ValueError, "product must be one of"),
        (lambda: CG(preconditioner=3), TypeError, "preconditioner must be a callable"),
        (lambda: GMRES(restart=0), ValueError, "restart must be an integer >= 1, got 0."),
        (lambda: Auto(dense_below=-1), ValueError, "dense_below must be an integer >= 0 or None, got -1."),
        (lambda: WarmStart("CG"), TypeError, "solver must be a linear solver"),
    ],
)
def test_bad_fields(make, error, sentence):
    with pytest.raises(error, match=sentence):
        make()


AT_ONCE = [
    dil.Dense(),
    dil.Dense(damping=0.3),
    dil.CG(),
    dil.CG(damping=0.3),
    dil.GMRES(),
    dil.GMRES(damping=0.3),
    dil.CG(rtol=1e-4),
]


def at_once(solver, A, rhs, F, steps):
    """What the solver gives in one go, as a `Result` where all samples are good, and which are."""
    operator = Operator(lambda y: (A @ y.unsqueeze(2)).squeeze(2), torch.zeros_like(rhs), isinstance(solver, dil.CG))
    one = solver.at_once(operator, True, steps)
    x, good, *rest = one.routine(lambda p: ((A.mT @ p.unsqueeze(-1)).squeeze(-1),), rhs, F)
    return Result(x, *one.finished(torch.linalg.vector_norm(x, dim=1), solver.damping, *rest)), good


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("samples", [5, 1])
@pytest.mark.parametrize("solver", AT_ONCE, ids=str)
def test_a_solve_at_once_equals_the_solve(solver, samples, dtype):
    generator = torch.Generator().manual_seed(0)
    A, rhs, F = (torch.randn(*shape, generator=generator, dtype=dtype)[:samples] for shape in ((5, 6, 6), (5, 6), (5, 6)))
    A = (A @ A.mT / 6 if isinstance(solver, dil.CG) else 0.2 * A) + torch.eye(6, dtype=dtype)
    rhs[3:4] = 0.0
    result, good = at_once(solver, A, rhs, F, 6)
    operator = Operator(lambda y: (A @ y.unsqueeze(2)).squeeze(2), torch.zeros_like(rhs), isinstance(solver, dil.CG))
    operator.watched = F
    plain = solver.solve(operator, rhs, transpose=True)
    assert bool(good.all()) and bool((plain.status == dil.Status.converged).all())
    exact = torch.linalg.solve(A.mT + solver.damping * torch.eye(6, dtype=dtype), rhs)
    error, size = (torch.linalg.vector_norm(t, dim=1) for t in (result.value - exact, exact))
    assert bool((error <= (10 * solver.rtol if solver.rtol else 1e-4 if dtype == torch.float32 else 1e-8) * size).all())
    assert bool((result.status == dil.Status.converged).all()) and result.stats.method == plain.stats.method
    assert bool((result.stats.residual <= 10 * result.stats.tolerance).all())
    estimates = []
    for stats in (result.stats, plain.stats):
        stats.norm, stats.damping = torch.linalg.vector_norm(result.value, dim=1), solver.damping
        estimates.append((stats.evidence.value_error(stats), stats.evidence.adjoint_error(stats)))
    moved = torch.tensor([0, 1, 2, 4][:samples])
    torch.testing.assert_close(estimates[0][0][moved], estimates[1][0][moved], rtol=0.3, atol=0)
    true = torch.linalg.vector_norm(result.value - torch.linalg.solve(A.mT, rhs), dim=1) / torch.linalg.vector_norm(
        torch.linalg.solve(A.mT, rhs), dim=1
    )
    bound = estimates[0][1].to(dtype)[moved] + (1e-4 if dtype == torch.float32 else 1e-12)
    assert bool((true[moved] <= 3 * bound).all())
    for one, other in zip(result.stats.spectrum.extremes(), plain.stats.spectrum.extremes(), strict=True):
        torch.testing.assert_close(one[moved], other[moved], rtol=0.05, atol=0)


@pytest.mark.parametrize("solver", [dil.CG(), dil.GMRES()], ids=str)
def test_a_solve_at_once_says_that_it_needs_more_steps(solver):
    generator = torch.Generator().manual_seed(1)
    A, rhs = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((3, 6, 6), (3, 6)))
    A = A @ A.mT + torch.eye(6, dtype=torch.float64)
    A[1] = torch.eye(6, dtype=torch.float64)  # one step is enough
    _, good = at_once(solver, A, rhs, rhs, 1)
    assert good.tolist() == [False, True, False]


@pytest.mark.parametrize("solver", [dil.Dense(), dil.CG(), dil.GMRES()], ids=str)
@pytest.mark.parametrize("trouble", ["singular", "nan", "inf"])
def test_a_solve_at_once_says_that_something_is_wrong(solver, trouble):
    A = torch.eye(4, dtype=torch.float64).repeat(2, 1, 1) * torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    rhs = torch.ones(2, 4, dtype=torch.float64)
    if trouble == "singular":
        A[0, 0, 0] = 0.0
    else:
        rhs[0, 1] = float(trouble)
    _, good = at_once(solver, A, rhs, rhs, 4)
    assert good.tolist() == [False, True]


@pytest.mark.parametrize("samples", [1, 3])
def test_cg_at_once_sees_a_curvature_that_is_rounding(samples):
    eps = torch.finfo(torch.float32).eps
    for least, expected in ((5 * eps, False), (1e-3, True)):
        A = torch.diag(torch.tensor([1.0, least])).repeat(samples, 1, 1)
        rhs = torch.ones(samples, 2)
        _, good = at_once(dil.CG(), A, rhs, rhs, 3)
        assert good.tolist() == [expected] * samples


def test_cg_at_once_sees_negative_curvature():
    A = torch.diag(torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)).unsqueeze(0)
    _, good = at_once(dil.CG(), A, torch.ones(1, 3, dtype=torch.float64), torch.ones(1, 3, dtype=torch.float64), 3)
    assert not bool(good)


def test_the_residual_of_gmres_in_one_piece_is_that_of_its_answer(monkeypatch):
    """Which is not found by a product, and is right though the basis is far from orthogonal."""
    n, steps, bases, combine = 40, 32, [], batch.combine
    monkeypatch.setattr(batch, "combine", lambda A, c: bases.append(A) or combine(A, c))
    left, right = (torch.linalg.qr(draw(seed, 3, n, n))[0] for seed in (0, 1))
    A, rhs = left * torch.logspace(0, -9, n, dtype=torch.float64) @ right, draw(2, 3, n)
    x, _, _, residual, *_ = GMRES()._all_steps([lambda p: (A @ p.unsqueeze(2)).squeeze(2)] * steps, False, rhs, rhs)
    true = torch.linalg.vector_norm(rhs - (A @ x.unsqueeze(2)).squeeze(2), dim=1)
    rounding = 1e-14 * (torch.linalg.vector_norm(x, dim=1) + torch.linalg.vector_norm(rhs, dim=1))
    assert ((residual - true).abs() <= rounding).all()
    assert (true < 0.9 * torch.linalg.vector_norm(rhs, dim=1)).all()
    overlap = bases[0] @ bases[0].mT - torch.eye(steps, dtype=torch.float64)
    assert overlap.abs().max() > 1e-6
