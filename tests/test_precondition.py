"""Preconditioners: positive definite, repeatable, and worth their cost."""

import pytest
import torch

from torchdil.linear import CG, GMRES, MINRES, BiCGStab, Jacobi, NormalCG, Nystrom, SecantMemory
from torchdil.operator import Operator
from torchdil.solution import Status


def draw(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def operator_of(A, symmetric=True):
    return Operator(lambda y: (A @ y.unsqueeze(2)).squeeze(2), torch.zeros_like(A[:, 0]), symmetric)


def matrix_of(apply, samples, n):
    """M⁻¹ as a (B, n, n) matrix."""
    eye = torch.eye(n, dtype=torch.float64)
    return torch.stack([apply(e.expand(samples, n)) for e in eye], dim=2)


def scaled(samples, n):
    """Dominated by a diagonal that spans six orders of magnitude."""
    root = torch.logspace(0, 3, n, dtype=torch.float64)
    coupling = 0.02 * draw(1, samples, n, n)
    A = torch.eye(n, dtype=torch.float64) + (coupling + coupling.mT) / 2
    return root[:, None] * A * root


def few_large(samples, n, rank=10):
    """The identity plus a few eigenvalues of up to 1e4."""
    U = torch.linalg.qr(draw(2, samples, n, rank))[0]
    return torch.eye(n, dtype=torch.float64) + U @ torch.diag(torch.logspace(1, 4, rank, dtype=torch.float64)) @ U.mT


def secant_operator(A, count=8):
    operator = operator_of(A)
    for k in range(count):
        s = draw(10 + k, *A.shape[:2])
        operator.pairs.append((s, (A @ s.unsqueeze(2)).squeeze(2)))
    return operator


BUILDERS = [Jacobi(), Jacobi(samples=4), Nystrom(), Nystrom(rank=3), SecantMemory(), SecantMemory(history=2)]
MATRICES = {
    "scaled": lambda n: scaled(3, n),
    "few_large": lambda n: few_large(3, n, min(n, 10)),
    "indefinite": lambda n: draw(3, 3, n, n) + draw(3, 3, n, n).mT,
    "negative": lambda n: -few_large(3, n, min(n, 10)),
    "zero": lambda n: torch.zeros(3, n, n, dtype=torch.float64),
}


@pytest.mark.parametrize("preconditioner", BUILDERS, ids=str)
@pytest.mark.parametrize("matrix", MATRICES)
@pytest.mark.parametrize("n", [1, 12, 70])
@pytest.mark.parametrize("damping", [0.0, 0.1])
def test_positive_definite(preconditioner, matrix, n, damping):
    A = MATRICES[matrix](n)
    M = matrix_of(preconditioner.build(secant_operator(A), False, damping), 3, n)
    torch.testing.assert_close(M, M.mT, rtol=1e-8, atol=1e-8 * float(M.abs().max()))
    scale = torch.diagonal(M, dim1=1, dim2=2).rsqrt()  # eigenvalues of very different size are not to be lost in rounding
    assert (torch.linalg.eigvalsh(scale.unsqueeze(2) * M * scale.unsqueeze(1)) > 0).all()


@pytest.mark.parametrize("preconditioner", [Jacobi(), Nystrom(rank=5), SecantMemory()], ids=str)
def test_repeatable_and_independent_of_the_neighbours(preconditioner):
    A, r = scaled(4, 80), draw(4, 4, 80)
    state = torch.random.get_rng_state()
    first = preconditioner.build(secant_operator(A), True, 0.0)(r)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(first, preconditioner.build(secant_operator(A), True, 0.0)(r))
    broken = A.clone()
    broken[0] = torch.nan
    torch.testing.assert_close(preconditioner.build(secant_operator(broken), True, 0.0)(r)[1:], first[1:], rtol=1e-12, atol=0)


def steps(solver, operator, b):
    result = solver.solve(operator, b)
    assert (result.status == Status.converged).all()
    return int(result.stats.steps.max())


@pytest.mark.parametrize("solver", [CG, MINRES, GMRES, BiCGStab])
@pytest.mark.parametrize("n", [40, 100])
def test_jacobi_halves_the_steps(solver, n):
    A, b = scaled(3, n), draw(5, 3, n)
    plain = solver(rtol=1e-6).solve(operator_of(A), b)
    assert 2 * steps(solver(rtol=1e-6, preconditioner=Jacobi()), operator_of(A), b) <= int(plain.stats.steps.max())


def test_jacobi_on_the_normal_equations():
    A, b = scaled(3, 20)[:, :, :], draw(5, 3, 20)
    A = A + draw(6, 3, 20, 20) * 0.01
    plain = NormalCG(rtol=1e-6).solve(operator_of(A, False), b)
    with_jacobi = NormalCG(rtol=1e-6, preconditioner=Jacobi()).solve(operator_of(A, False), b)
    assert 2 * int(with_jacobi.stats.steps.max()) <= int(plain.stats.steps.max())


def spread(samples, n):
    """Twenty eigenvalues from 10 to 1e4 and the rest between 1 and 3."""
    eigenvalues = torch.cat([torch.linspace(1, 3, n - 20), torch.logspace(1, 4, 20)]).double()
    Q = torch.linalg.qr(draw(2, samples, n, n))[0]
    return Q @ torch.diag(eigenvalues) @ Q.mT, Q


@pytest.mark.parametrize("solver", [CG, MINRES, GMRES])
def test_nystrom_halves_the_steps(solver):
    A, b = spread(3, 100)[0], draw(7, 3, 100)
    plain = solver().solve(operator_of(A), b)
    assert 2 * steps(solver(preconditioner=Nystrom(rank=40)), operator_of(A), b) <= int(plain.stats.steps.max())


def test_nystrom_knows_the_damping():
    """Low rank with ε: M is then J + ε itself, up to rounding."""
    A = few_large(3, 50) - torch.eye(50, dtype=torch.float64)
    b = draw(8, 3, 50)
    assert steps(CG(damping=1e-2, preconditioner=Nystrom(rank=12)), operator_of(A), b) <= 3
    assert steps(CG(damping=1e-2), operator_of(A), b) >= 10


def test_secant_pairs_halve_the_steps():
    (A, Q), b = spread(3, 60), draw(9, 3, 60)
    operator = operator_of(A)
    for k in range(40, 60):  # a forward solver moves along the stiff directions
        s = Q[:, :, k] + 1e-3 * draw(20 + k, 3, 60)
        operator.pairs.append((s, (A @ s.unsqueeze(2)).squeeze(2)))
    plain = steps(CG(), operator_of(A), b)
    assert 2 * steps(CG(preconditioner=SecantMemory(history=20)), operator, b) <= plain


def test_secant_equation_and_skipped_pairs():
    A = scaled(3, 12)
    operator = secant_operator(A, count=3)
    s, q = operator.pairs[-1]
    torch.testing.assert_close(SecantMemory().build(operator, False, 0.0)(q), s)
    with_damping = SecantMemory().build(operator, False, 0.5)
    torch.testing.assert_close(with_damping(q + 0.5 * s), s)
    before = SecantMemory().build(operator, False, 0.0)(draw(10, 3, 12))
    operator.pairs.append((s, -q))  # negative curvature
    operator.pairs.append((torch.full_like(s, torch.nan), q))
    torch.testing.assert_close(SecantMemory().build(operator, False, 0.0)(draw(10, 3, 12)), before)


def test_secant_memory_without_pairs_is_the_identity():
    A, b = scaled(3, 12), draw(11, 3, 12)
    assert torch.equal(SecantMemory().build(operator_of(A), False, 0.0)(b), b)


def test_flexible_cg_bears_a_changing_preconditioner():
    A, b = scaled(3, 60), draw(12, 3, 60)
    inverse = 1 / torch.diagonal(A, dim1=1, dim2=2)

    def solve(flexible):
        calls = []

        def changing(r):
            calls.append(None)
            return inverse ** (0.6 + 0.4 * (len(calls) % 2)) * r

        return CG(rtol=1e-8, flexible=flexible, preconditioner=changing).solve(operator_of(A), b)

    plain, flexible = solve(False), solve(True)
    assert (flexible.status == Status.converged).all()
    assert 2 * int(flexible.stats.steps.max()) <= int(plain.stats.steps.max())


def test_inner_cg_slows_ordinary_cg_down_and_not_the_flexible():
    """A few steps of CG are another preconditioner for each residual."""
    A, b = spread(3, 60)[0], draw(14, 3, 60)
    inner, operator = CG(rtol=0.0, max_steps=5), operator_of(A)

    def solve(flexible):
        solver = CG(rtol=1e-8, max_steps=200, flexible=flexible, preconditioner=lambda r: inner.solve(operator, r).value)
        return solver.solve(operator_of(A), b)

    plain, flexible = solve(False), solve(True)
    assert (flexible.status == Status.converged).all() and (flexible.stats.steps < plain.stats.steps).all()
    torch.testing.assert_close(flexible.value, torch.linalg.solve(A, b), rtol=1e-6, atol=1e-8)


def test_flexible_cg_is_the_ordinary_with_a_fixed_preconditioner():
    A, b = scaled(3, 60), draw(15, 3, 60)
    inverse = 1 / torch.diagonal(A, dim1=1, dim2=2)
    plain, flexible = (CG(rtol=1e-8, flexible=f, preconditioner=lambda r: inverse * r).solve(operator_of(A), b) for f in (0, 1))
    assert torch.equal(plain.stats.steps, flexible.stats.steps) and plain.stats.products == flexible.stats.products
    torch.testing.assert_close(plain.value, flexible.value, rtol=1e-7, atol=1e-12)


def test_cg_preconditions_once_a_step():
    """And not after the last one, where a dear preconditioner would be wasted."""
    A, b = scaled(3, 60), draw(16, 3, 60)
    inverse, calls = 1 / torch.diagonal(A, dim1=1, dim2=2), []

    def counted(r):
        calls.append(None)
        return inverse * r

    assert steps(CG(rtol=1e-8, preconditioner=counted), operator_of(A), b) == len(calls)


def test_any_callable_serves():
    A, b = few_large(3, 30), draw(13, 3, 30)
    inverse = torch.linalg.inv(A)
    for solver in (CG, MINRES, GMRES, BiCGStab):
        exact = solver(preconditioner=lambda r: (inverse @ r.unsqueeze(2)).squeeze(2))
        assert steps(exact, operator_of(A), b) <= 2


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Jacobi(samples=0), "samples must be an integer >= 1, got 0."),
        (lambda: Nystrom(rank=0), "rank must be an integer >= 1, got 0."),
        (lambda: SecantMemory(history=0), "history must be an integer >= 1, got 0."),
        (
            lambda: Nystrom().build(operator_of(scaled(1, 4), False), False, 0.0),
            r"preconditioner=Nystrom\(\) needs a symmetric J",
        ),
    ],
)
def test_bad_fields(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        make()
