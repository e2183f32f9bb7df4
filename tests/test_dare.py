"""Riccati equations: against SciPy, closed forms, the paper's analytic gradient and finite differences; and their failures."""

import math
import sys
import time
import warnings

import numpy as np
import pytest
import torch
from scipy.linalg import solve_discrete_are
from torch.autograd import forward_ad, gradcheck, gradgradcheck

import torchdil as dil
from torchdil.control import Stein, dare, dlqr
from torchdil.control.dare import Doubling, RiccatiEquation, at_once, doubled, riccati_residual
from torchdil.control.stein import Loop, closed_loop, is_stable
from torchdil.operator import Operator
from torchdil.solution import Status

VALUE = 1e-9  # relative, of S: against SciPy, on well-conditioned systems
GRADIENT = 1e-6  # relative, against finite differences and, for iterative solvers, the analytic gradient
EXACT = 1e-10  # relative, direct solves against the analytic gradient
ALONE = 1e-12  # what another sample of the batch may change: the rounding of batched kernels
FLOAT32 = 1e-4  # relative, of S
SIZES = [1, 2, 5, 10, 20, 50]
BACKWARD = {"Stein": None, "CG": dil.CG(), "Dense": dil.Dense()}
# Differences of derivatives see their errors enlarged.
TIGHT = {"rtol": 1e-13}
LINEAR_SOLVERS = [None, dil.CG(**TIGHT), dil.Dense(), dil.GMRES(**TIGHT), dil.BiCGStab(**TIGHT), dil.Auto()]
NAMES = ("A", "B", "Q", "R")


def system(n, m, *batch, seed=0, rho=0.9, dtype=torch.float64):
    """A, B, Q, R; A has eigenvalues of about rho at most."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*batch, *shape, generator=generator, dtype=torch.float64)

    A, B, C, D = rho * draw(n, n) / n**0.5, draw(n, m) / n**0.5, draw(n, n), draw(m, m)
    Q, R = torch.eye(n, dtype=A.dtype) + C @ C.mT / n, torch.eye(m, dtype=A.dtype) + D @ D.mT / m
    return tuple(t.to(dtype) for t in (A, B, Q, R))


def tracked(matrices):
    return [t.detach().clone().requires_grad_() for t in matrices]


def relative(actual, expected):
    """The largest error of a sample, relative to its norm."""
    error, size = (torch.linalg.matrix_norm(t.detach()) for t in (actual - expected, expected))
    return float((error / size).max())


def by_scipy(A, B, Q, R):
    Q, R = 0.5 * (Q + Q.mT), 0.5 * (R + R.mT)
    flat = [t.detach().double().reshape(-1, *t.shape[-2:]).numpy() for t in (A, B, Q, R)]
    return torch.as_tensor(np.stack([solve_discrete_are(*one) for one in zip(*flat, strict=True)])).reshape(Q.shape)


def analytic(matrices, S, V):
    """The paper's gradient of (S * V).sum(): W = M W Mᵀ + sym(V), solved as a dense linear system."""
    A, B, _, R = (t.detach() for t in matrices)
    n = A.shape[0]
    K = torch.linalg.solve(R + B.T @ S @ B, B.T @ S @ A)
    M = A - B @ K
    W = torch.linalg.solve(torch.eye(n * n, dtype=A.dtype) - torch.kron(M, M), (0.5 * (V + V.T)).flatten()).view(n, n)
    return 2 * S @ M @ W, -2 * S @ M @ W @ K.T, W, K @ W @ K.T


def cotangent(n, *batch):
    return torch.randn(*batch, n, n, generator=torch.Generator().manual_seed(99), dtype=torch.float64)


# Values


@pytest.mark.parametrize("rho", [0.5, 1.5])
@pytest.mark.parametrize("n, m", [(1, 1), (2, 1), (2, 5), (5, 2), (10, 3), (20, 4), (50, 10)])
def test_doubling_agrees_with_scipy(n, m, rho):
    matrices = system(n, m, 7, rho=rho)
    S = dare(*matrices, on_failure="raise")
    assert relative(S, by_scipy(*matrices)) <= VALUE
    assert torch.equal(S, S.mT)


@pytest.mark.parametrize("n, m", [(1, 1), (3, 2), (50, 3)])
def test_one_system_is_solved_as_in_a_batch(n, m):
    matrices = system(n, m)
    pair = dare(*(torch.stack((t, t)) for t in matrices), on_failure="raise")
    assert relative(dare(*matrices, on_failure="raise"), pair[0]) <= VALUE


def test_the_scalar_equation_has_its_closed_form():
    a, b, q, r = (
        torch.tensor(values, dtype=torch.float64)
        for values in ((0.5, 1.0, 3.0), (1.0, 0.1, 2.0), (1.0, 2.0, 0.0), (1.0, 5.0, 1.0))
    )
    half = (r - a**2 * r - q * b**2) / 2
    exact = (-half + torch.sqrt(half**2 + b**2 * q * r)) / b**2
    S = dare(*(t[:, None, None] for t in (a, b, q, r)), on_failure="raise")
    torch.testing.assert_close(S.flatten(), exact, rtol=1e-12, atol=0)


def test_only_symmetric_parts_of_the_costs_matter():
    A, B, Q, R = system(3, 2, 2)
    skew = torch.triu(torch.ones(3, 3, dtype=A.dtype), 1)
    torch.testing.assert_close(dare(A, B, Q + skew - skew.T, R), dare(A, B, Q, R), rtol=0, atol=1e-14)
    Q.requires_grad_()
    (grad,) = torch.autograd.grad(dare(A, B, Q, R)[..., 0, 1].sum(), Q)
    assert torch.equal(grad, grad.mT)


def test_leading_axes_broadcast_and_gradients_add_up():
    (A, _, Q, _), (_, B, _, R) = system(3, 2), system(3, 2, 4, 1, 5)
    matrices = tracked((A, B, Q[None].expand(5, 3, 3), R))
    S = dare(*matrices, on_failure="raise")
    assert S.shape == (4, 1, 5, 3, 3)
    V = cotangent(3, 4, 1, 5)
    grads = torch.autograd.grad((S * V).sum(), matrices)
    full = tracked(t.expand(4, 1, 5, *t.shape[-2:]).contiguous() for t in matrices)
    expected = torch.autograd.grad((dare(*full) * V).sum(), full)
    for got, want, like in zip(grads, expected, matrices, strict=True):
        torch.testing.assert_close(got, want.sum_to_size(like.shape), rtol=1e-12, atol=1e-12)


def test_a_batch_of_none_is_solved():
    matrices = tracked(system(3, 2, 0))
    for function, shape in ((dare, (0, 3, 3)), (dlqr, (0, 2, 3))):
        value = function(*matrices, on_failure="raise")
        assert value.shape == shape
        assert [g.shape for g in torch.autograd.grad(value.sum(), matrices)] == [t.shape for t in matrices]


def test_the_gain_minimises_the_cost():
    A, B, Q, R = system(4, 2, 3)
    K, S = dlqr(A, B, Q, R, on_failure="raise"), dare(A, B, Q, R)
    M = A - B @ K
    torch.testing.assert_close(S, Q + K.mT @ R @ K + M.mT @ S @ M, rtol=1e-10, atol=1e-10)
    worse = K + 0.01
    N = A - B @ worse
    cost = Loop(N).solve(Q + worse.mT @ R @ worse)[0]
    assert bool((torch.linalg.eigvalsh(cost - S) > -1e-12).all())


def exact_gain(A, B, Q, R, digits=80):
    """K in so many digits, S by doubling."""
    mp = pytest.importorskip("mpmath")
    with mp.workdps(digits):
        A, B, Q, R = (mp.matrix(t.tolist()) if torch.is_tensor(t) else t for t in (A, B, Q, R))
        power, G, S = A, B * R**-1 * B.T, Q
        for _ in range(12):
            inverse = (mp.eye(A.rows) + G * S) ** -1
            power, G, S = power * inverse * power, G + power * inverse * G * power.T, S + power.T * S * inverse * power
        return (R + B.T * S * B) ** -1 * (B.T * S * A)


@pytest.mark.parametrize("r", [1e-14, 1e-8, 1.0, 1e4])
@pytest.mark.parametrize("n, m", [(1, 2), (2, 5), (3, 3)])
def test_the_gain_keeps_its_digits_where_controls_cost_little(n, m, r):
    """With more controls than states it is R that decides, however small it is. (With fewer, S itself has fewer digits.)"""
    mp = pytest.importorskip("mpmath")
    A, B, Q, R = system(n, m)
    units = torch.logspace(-2, 2, m, dtype=torch.float64)
    matrices = tracked((A, B / units, Q, r * R / units / units[:, None]))
    K = dlqr(*(t.expand(2, *t.shape) for t in matrices), on_failure="raise")[0]  # two, so that S is not SciPy's
    exact = torch.tensor(exact_gain(*matrices).tolist(), dtype=torch.float64)
    assert relative(K / units[:, None], exact / units[:, None]) <= 1e-11

    with mp.workdps(80):  # the derivative of a number of K by one of A and one of B
        for k in (0, 1):
            (grad,) = torch.autograd.grad(K[0, 0], matrices[k], retain_graph=True)
            ways = []
            for step in (1, -1):
                moved = [mp.matrix(t.tolist()) for t in matrices]
                moved[k][0, 0] += step * mp.mpf(10) ** -20
                ways.append(exact_gain(*moved)[0, 0])
            slope = float((ways[0] - ways[1]) / (2 * mp.mpf(10) ** -20))
            assert abs(float(grad[0, 0]) - slope) <= 1e-9 * abs(slope)


@pytest.mark.parametrize("m", [1, 3])
def test_unstable_modes_without_cost_are_stabilised(m):
    """S = 0 solves the equation, too, but leaves the loop unstable: with Q = 0 the eigenvalue 2 goes to 1/2."""
    A, B = 2 * torch.eye(3, dtype=torch.float64), torch.eye(3, dtype=torch.float64)
    matrices = A.expand(m, 3, 3), B, torch.zeros_like(A), B
    S = dare(*matrices, on_failure="raise")
    torch.testing.assert_close(S, 3 * B.expand(m, 3, 3), rtol=1e-9, atol=1e-9)


def test_what_doubling_cannot_do_is_left_to_scipy():
    """In float32 doubling loses a mode that Q hardly sees, and finds a solution that does not stabilise."""
    A, B, _, _ = system(2, 1, 40, seed=3, rho=3.0, dtype=torch.float32)
    Q, R = 1e-10 * torch.eye(2), torch.eye(1)
    G = B @ B.mT
    first, found, _ = doubled(A, G, Q.expand_as(A), 32)
    lost = ~(found & is_stable(closed_loop(first, A, B, R.expand(40, 1, 1))[0]))
    assert bool(lost.any())
    S = dare(A, B, Q, R, on_failure="raise")
    assert bool(is_stable(closed_loop(S, A, B, R.expand(40, 1, 1))[0]).all())
    reference = by_scipy(A, B, Q.expand(40, 2, 2), R.expand(40, 1, 1))
    assert relative(S[lost].double(), reference[lost]) <= FLOAT32


# Precision


@pytest.mark.parametrize("batch", [(), (3,)])
def test_float32_is_as_good_as_float32_can_be(batch):
    matrices = system(8, 3, *batch, dtype=torch.float32)
    S = dare(*matrices, on_failure="raise")
    assert S.dtype == torch.float32
    assert relative(S.double(), by_scipy(*matrices)) <= FLOAT32


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("a", [1.0, 1.01, 100.0])
def test_a_solution_much_larger_than_its_cost_is_no_failure_in_float32(a, scale):
    """S is 1e2 to 1e10 times Q; the closed form, in float64, is of the float32 numbers."""
    matrices = [torch.tensor([[[x]]]).expand(2, 1, 1) for x in (a, 1.0, 1e-4 * scale, scale)]
    S = dare(*matrices, on_failure="raise")
    assert relative(S.double(), by_scipy(*matrices)) <= 1e-3


def test_an_answer_that_is_not_good_enough_is_refined(monkeypatch):
    """Doubling that leaves a millionth of S, as it does where S is a billion times Q, is mended by Newton's method."""

    def rough(*args):
        S, found, steps = doubled(*args)
        return (1 + 1e-6) * S, found, steps

    matrices = system(5, 2, 50, seed=1)
    monkeypatch.setattr(sys.modules["torchdil.control.dare"], "doubled", rough)
    assert relative(dare(*matrices, on_failure="raise"), by_scipy(*matrices)) < VALUE


def test_the_cause_of_a_failure_outlives_the_refinement_of_others():
    A, B, _, _ = system(5, 2, 50, seed=1, rho=3.0)
    B[7] = 0
    Q, R = 1e-4 * torch.eye(5, dtype=A.dtype), 1e4 * torch.eye(2, dtype=A.dtype)
    with pytest.raises(dil.ConvergenceError, match=r"then Newton\) failed for 1 of 50 samples: \(A, B\) is not stabilisable"):
        dare(A, B, Q, R, on_failure="raise")


# Gradients


@pytest.mark.parametrize("name", BACKWARD)
@pytest.mark.parametrize("n", SIZES)
def test_gradients_agree_with_the_analytic_ones(n, name):
    m = max(1, n // 2)
    matrices, V = tracked(system(n, m, rho=0.7)), cotangent(n)
    S = dare(*matrices, linear_solver=BACKWARD[name], on_failure="raise")
    expected = analytic(matrices, S.detach(), V)
    grads = torch.autograd.grad((S * V).sum(), matrices)
    for got, want in zip(grads, expected, strict=True):
        assert relative(got, want) <= (GRADIENT if name == "CG" else EXACT)


@pytest.mark.parametrize("name", BACKWARD)
@pytest.mark.parametrize("n", SIZES)
def test_gradients_agree_with_finite_differences(n, name):
    """Along a random direction of all four matrices, by differences of fourth order."""
    matrices, V = tracked(system(n, max(1, n // 2))), cotangent(n)
    generator = torch.Generator().manual_seed(5)
    directions = [torch.randn(t.shape, generator=generator, dtype=t.dtype) / n for t in matrices]
    S = dare(*matrices, linear_solver=BACKWARD[name], on_failure="raise")
    grads = torch.autograd.grad((S * V).sum(), matrices)
    slope = sum(float((g * d).sum()) for g, d in zip(grads, directions, strict=True))

    def along(h):
        return float((by_scipy(*(t.detach() + h * d for t, d in zip(matrices, directions, strict=True))) * V).sum())

    h = 1e-3
    difference = (8 * (along(h) - along(-h)) - (along(2 * h) - along(-2 * h))) / (12 * h)
    assert math.isclose(slope, difference, rel_tol=GRADIENT)


@pytest.mark.parametrize("solver", LINEAR_SOLVERS, ids=lambda s: type(s).__name__)
def test_derivatives_of_all_kinds_and_both_orders(solver):
    matrices = tracked(system(2, 1, 2))

    def function(*matrices):
        return dare(*matrices, linear_solver=solver, on_failure="raise")

    assert gradcheck(function, matrices, check_forward_ad=True)
    assert gradgradcheck(function, matrices)


def test_derivatives_of_one_system():
    matrices = tracked(system(2, 1))
    assert gradcheck(dare, matrices, check_forward_ad=True)
    assert gradgradcheck(dare, matrices)


def test_derivatives_of_the_gain():
    for m in (1, 3):
        matrices = tracked(system(2, m, 2))
        assert gradcheck(dlqr, matrices, check_forward_ad=True)
        assert gradgradcheck(dlqr, matrices)
        torch.testing.assert_close(torch.vmap(dlqr)(*matrices), dlqr(*matrices), rtol=1e-12, atol=1e-12)


def test_solvers_that_cannot_do_it_say_so():
    matrices = tracked(system(2, 1))
    with pytest.raises(ValueError, match="needs a symmetric J"):
        dare(*matrices, linear_solver=dil.MINRES()).sum().backward()
    with pytest.raises(TypeError, match="linear_solver must be a torchdil linear solver"):
        dare(*matrices, linear_solver="CG")


def test_torch_func_gives_the_same_derivatives():
    matrices = system(3, 2, 4)
    leaves = tracked(matrices)
    total = dare(*leaves).sum()
    expected = torch.autograd.grad(total, leaves)
    grad = torch.func.grad(lambda *t: dare(*t).sum(), argnums=(0, 1, 2, 3))
    one_by_one = torch.vmap(grad)
    for got in (grad(*matrices), one_by_one(*matrices)):
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(torch.vmap(dare)(*matrices), dare(*matrices), rtol=1e-12, atol=1e-12)
    shared = torch.vmap(dare, in_dims=(0, 0, None, None))(*matrices[:2], matrices[2][0], matrices[3][0])
    torch.testing.assert_close(shared, dare(*matrices[:2], matrices[2][0], matrices[3][0]), rtol=1e-12, atol=1e-12)


def test_jacobians_and_tangents_agree():
    A, *others = system(2, 1, 3)
    tangent = torch.ones_like(A)
    by_rows = torch.func.jacrev(lambda A: dare(A, *others))(A)
    torch.testing.assert_close(torch.func.jacfwd(lambda A: dare(A, *others))(A), by_rows, rtol=1e-9, atol=1e-11)
    expected = torch.einsum("bijckl,ckl->bij", by_rows, tangent)
    _, got = torch.func.jvp(lambda A: dare(A, *others), (A,), (tangent,))
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-11)
    with forward_ad.dual_level():
        dual = forward_ad.unpack_dual(dare(forward_ad.make_dual(A, tangent), *others)).tangent
    torch.testing.assert_close(dual, expected, rtol=1e-9, atol=1e-11)


# The Stein solver


def stein_system(*batch_rho, n=3, m=2):
    """J at S of systems with the eigenvalues of A scaled; A alone decides, as B is tiny."""
    A, B, Q, R = system(n, m, len(batch_rho))
    A = A / torch.linalg.eigvals(A).abs().amax(dim=1)[:, None, None] * torch.tensor(batch_rho, dtype=A.dtype)[:, None, None]
    rows = tuple(t.flatten(1) for t in (A, 1e-3 * B, Q, R))
    statement = RiccatiEquation(torch.Size([len(batch_rho)]), n, False)
    operator = Operator(lambda y: statement.residual(riccati_residual, y, rows), Q.flatten(1), False)
    operator.bound = riccati_residual, rows
    return operator, cotangent(n, len(batch_rho)).flatten(1)


@pytest.mark.parametrize("damping", [0.0, 0.3])
@pytest.mark.parametrize("transpose", [False, True])
def test_stein_solves_what_dense_does(transpose, damping):
    operator, rhs = stein_system(0.1, 0.9, 0.999)
    value, status, stats = Stein(damping=damping).solve(operator, rhs, transpose=transpose)
    expected = dil.Dense(damping=damping).solve(operator, rhs, transpose=transpose).value
    torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-9)
    assert status.tolist() == [Status.converged] * 3
    assert stats.verified
    product = operator.rmv(value) if transpose else operator.mv(value)
    assert bool(((rhs - product - damping * value).norm(dim=1) <= stats.tolerance).all())


def test_stein_leaves_unstable_loops_to_others():
    operator, rhs = stein_system(0.5, 1.5, 0.9)
    value, status, stats = Stein().solve(operator, rhs, transpose=True)
    assert status.tolist() == [Status.converged] * 3
    assert "then" in stats.method
    torch.testing.assert_close(value, dil.Dense().solve(operator, rhs, transpose=True).value, rtol=1e-9, atol=1e-9)
    calm, right = stein_system(0.5, 0.4, 0.9)
    assert torch.equal(Stein().solve(calm, right, transpose=True).value[0], value[0])


def test_stein_without_the_matrices_is_auto():
    operator, rhs = stein_system(0.5, 0.9)
    expected = Stein().solve(operator, rhs).value
    operator.bound = None
    torch.testing.assert_close(Stein().solve(operator, rhs).value, expected, rtol=1e-9, atol=1e-9)


def test_stein_marks_what_is_not_finite():
    operator, rhs = stein_system(0.5, 0.9)
    rhs[0, 0] = torch.nan
    value, status, _ = Stein().solve(operator, rhs)
    assert status.tolist() == [Status.non_finite, Status.converged]
    assert bool(value[0].isnan().all())
    assert bool(value[1].isfinite().all())


def test_stein_knows_its_errors():
    """Newton's step J⁻¹F is the error of a y nearby; damping is an error of the adjoint."""
    matrices = system(3, 2, 2)
    rows = tuple(t.flatten(1) for t in matrices)
    S = dare(*matrices)
    near = (S + 1e-6 * torch.eye(3, dtype=S.dtype)).flatten(1)
    statement = RiccatiEquation(torch.Size([2]), 3, False)
    operator = Operator(lambda y: statement.residual(riccati_residual, y, rows), near, False)
    operator.bound, operator.watched = (riccati_residual, rows), operator.graph()[1].detach()
    value, _, stats = Stein(damping=1e-3).solve(operator, near, transpose=True)
    stats.norm, stats.damping = value.norm(dim=1), 1e-3
    exact = Stein().solve(operator, near, transpose=True).value
    error = (value - exact).norm(dim=1) / stats.norm
    torch.testing.assert_close(stats.evidence.adjoint_error(stats), 1.1 * error, rtol=1e-6, atol=0)
    torch.testing.assert_close(stats.evidence.value_error(stats), torch.full_like(error, 1.1e-6 * 3**0.5), rtol=1e-4, atol=0)


# Failures

I2 = torch.eye(2, dtype=torch.float64)
ROTATION = torch.tensor([[0.6, 0.8], [-0.8, 0.6]], dtype=torch.float64)
CAUSES = {
    "R is not positive definite": (0.5 * I2, I2, I2, torch.ones_like(I2)),
    "a value of A is not finite": (0.5 * I2 * torch.nan, I2, I2, I2),
    "a value of Q is not finite": (0.5 * I2, I2, I2 / 0, I2),
    r"\(A, B\) is not stabilisable: no control moves the eigenvalue 2 of A": (
        torch.diag(I2.new_tensor([2.0, 0.5])),
        I2 * I2[1],
        I2,
        I2,
    ),
    "not stabilisable: no control moves the eigenvalue 1 of A": (I2, 0 * I2, I2, I2),
    r"Q does not see the eigenvalue 0.6 ± 0.8i of A, which is on the unit circle": (ROTATION, I2, 0 * I2, I2),
}


def mixed():
    """A good system, one for each cause, and a good one."""
    good = system(2, 2, 2)
    bad = [torch.stack(part) for part in zip(*CAUSES.values(), strict=True)]
    return tuple(torch.cat((a[:1], b, a[1:])) for a, b in zip(good, bad, strict=True)), good


@pytest.mark.parametrize("copies", [0, 2])
@pytest.mark.parametrize("cause", CAUSES)
def test_each_cause_has_its_sentence(cause, copies):
    matrices = CAUSES[cause] if not copies else [torch.stack([t] * copies) for t in CAUSES[cause]]
    with pytest.raises(dil.ConvergenceError, match=cause):
        dare(*matrices, on_failure="raise")
    with pytest.warns(dil.ConvergenceWarning, match=cause) as record:
        S = dare(*matrices)
    assert len(record) == 1
    assert bool(S.isnan().all())


def test_failing_samples_are_named_and_change_nothing_for_others():
    matrices, good = mixed()
    with pytest.warns(dil.ConvergenceWarning, match=f"failed for {len(CAUSES)} of {len(CAUSES) + 2} samples") as record:
        S = dare(*matrices)
    message = str(record[0].message)
    assert "R is not positive definite (sample 1)" in message
    assert "a value of A is not finite (sample 2)" in message
    assert S.isnan().flatten(1).all(dim=1).tolist() == [False] + [True] * len(CAUSES) + [False]
    torch.testing.assert_close(S[[0, -1]], dare(*good), rtol=ALONE, atol=0)


@pytest.mark.parametrize("function", [dare, dlqr])
def test_zero_keeps_failed_samples_out_of_shared_gradients(function):
    matrices, good = mixed()
    leaves, alone = tracked(matrices), tracked(good)
    value = function(*leaves, on_failure="zero")
    grads = torch.autograd.grad(value.nansum(), leaves)
    expected = torch.autograd.grad(function(*alone).sum(), alone)
    for name, got, want in zip(NAMES, grads, expected, strict=True):
        assert bool(got[1:-1].eq(0).all()), name
        torch.testing.assert_close(got[[0, -1]], want, rtol=1e-10, atol=1e-12)
    shared = torch.ones((), dtype=torch.float64, requires_grad=True)
    value = function(matrices[0], matrices[1], matrices[2], shared * I2, on_failure="zero")
    (grad,) = torch.autograd.grad(value[[0, -1]].sum(), shared)
    lone = torch.autograd.grad(function(*good[:3], shared * I2).sum(), shared)[0]
    torch.testing.assert_close(grad, lone, rtol=1e-10, atol=0)


@pytest.mark.parametrize("function", [dare, dlqr])
def test_nan_and_zero_are_for_the_failed_samples_only(function):
    matrices, good = mixed()
    alone = tracked(good)
    expected = torch.autograd.grad(function(*alone).sum(), alone)
    leaves = tracked(matrices)
    grads = torch.autograd.grad(function(*leaves, on_failure="nan").sum(), leaves)
    for got, want in zip(grads, expected, strict=True):
        torch.testing.assert_close(got[[0, -1]], want, rtol=1e-10, atol=1e-12)
        assert bool(got[1:-1].isnan().flatten(1).any(dim=1).all())


def test_zero_holds_under_torch_func():
    matrices, _ = mixed()
    leaves = tracked(matrices)
    expected = torch.autograd.grad(dare(*leaves, on_failure="zero").nansum(), leaves)
    grads = torch.func.grad(lambda *t: dare(*t, on_failure="zero").nansum(), argnums=(0, 1, 2, 3))(*matrices)
    for got, want in zip(grads, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


def test_ignore_is_silent():
    matrices, _ = mixed()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert bool(dare(*matrices, on_failure="ignore")[0].isfinite().all())


def test_many_eigenvalues_out_of_reach_make_one_sentence():
    A = torch.diag_embed(torch.tensor([[2.0, 0.1], [3.0, 0.1], [4.0, 0.1]], dtype=torch.float64))
    with pytest.warns(dil.ConvergenceWarning, match=r"no control moves eigenvalues such as 2 of A \(samples 0, 1, 2\)"):
        dare(A, 0 * I2, I2, I2)


A, B, Q, R = system(2, 1)
BAD = [
    ("A must be a tensor", TypeError, ([[1.0]], B, Q, R)),
    ("A must be a tensor|Q must be a tensor", TypeError, (A, B, None, R)),
    ("A must have dtype float32 or float64, got torch.int64", TypeError, (A.long(), B, Q, R)),
    ("R must have the dtype of A, torch.float64, got torch.float32", TypeError, (A, B, Q, R.float())),
    ("Q must be on the device of A", ValueError, (A, B, Q.to("meta"), R)),
    ("B must have at least 2 axes", ValueError, (A, B[:, 0], Q, R)),
    (r"A must have the shape \(..., 2, 2\)", ValueError, (A[:1], B, Q, R)),
    (r"Q must have the shape \(..., 2, 2\)", ValueError, (A, B, Q[:1, :1], R)),
    (r"R must have the shape \(..., 1, 1\)", ValueError, (A, B, Q, Q)),
    (r"B must have the shape \(..., n, m\) with n, m >= 1", ValueError, (A, B[:, :0], Q, R)),
    (
        r"B must have leading axes that broadcast with \(3,\), got \(2,\)",
        ValueError,
        (A.expand(3, 2, 2), B.expand(2, 2, 1), Q, R),
    ),
]


@pytest.mark.parametrize("sentence, error, matrices", BAD, ids=[sentence[:30] for sentence, _, _ in BAD])
@pytest.mark.parametrize("function", [dare, dlqr])
def test_bad_input_gets_one_sentence(function, sentence, error, matrices):
    with pytest.raises(error, match=sentence):
        function(*matrices)


def test_the_policy_is_checked():
    with pytest.raises(ValueError, match="on_failure must be one of"):
        dare(A, B, Q, R, on_failure="hide")


def test_solvers_are_values():
    assert Stein(damping=0.1) == Stein(damping=0.1) != Stein()
    assert hash(Doubling()) == hash(Doubling())
    with pytest.raises(ValueError, match="damping must be a number >= 0"):
        Stein(damping=-1)


def test_a_batch_is_faster_than_a_loop():
    """The target is 20 times; a shared machine is allowed a quarter of that."""
    matrices, V = tracked(system(8, 3, 1024, rho=1.1)), cotangent(8, 1024)

    def batched():
        torch.autograd.grad((dare(*matrices) * V).sum(), matrices)

    def loop(samples=64):
        for one in zip(*(t.detach()[:samples] for t in matrices), V, strict=False):
            S = torch.as_tensor(solve_discrete_are(*(t.numpy() for t in one[:4])))
            analytic(one[:4], S, one[4])

    def seconds(function):
        start = time.process_time()
        function()
        return time.process_time() - start

    batched()
    ours, theirs = (min(seconds(f) for _ in range(3)) for f in (batched, loop))
    assert 16 * theirs / ours >= 5


def test_doublings_in_one_go_leave_slow_systems_to_the_loop():
    """What a GPU does, on the CPU: traced after some calls, and the same to rounding."""
    A, B, Q, R = system(4, 2, 6)
    A[2], B[2] = 0.9999 * torch.eye(4, dtype=A.dtype), 1e-3 * B[2]  # a closed loop near the unit circle
    G = B @ torch.linalg.solve(R, B.mT)
    expected, all_found, steps = doubled(A, G, Q, 32)
    assert all_found.all() and steps[2] > 9
    for _ in range(12):
        S, found, taken = at_once(A, G, Q, 32)
        assert found.all() and taken[2] == steps[2]
        assert relative(S, expected) < EXACT
