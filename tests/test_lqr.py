"""The finite-horizon regulator: against the dense quadratic program in all controls, and `dare` for long horizons."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import torchdil as dil
from torchdil.control import dare, dlqr, lqr

EXACT = 1e-10  # two direct solves of one problem

TERMS = {
    "plain": (),
    "cross": ("N",),
    "linear": ("q", "r"),
    "affine": ("c",),
    "terminal": ("Qf", "qf"),
    "all": ("N", "q", "r", "c", "Qf", "qf"),
}


def problem(n, m, *batch, terms=(), seed=0, terminal_batch=None):
    """A, B, Q, R and the further terms by name."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape, batch=batch):
        return torch.randn(*batch, *shape, generator=generator, dtype=torch.float64)

    def positive(k, batch=batch):
        C = draw(k, k, batch=batch)
        return C @ C.mT / k + torch.eye(k, dtype=C.dtype)

    final = batch if terminal_batch is None else terminal_batch
    A, B, Q, R = draw(n, n) / n**0.5, draw(n, m), positive(n), positive(m)
    further = {"N": 0.1 * draw(n, m), "q": draw(n), "r": draw(m), "c": draw(n)}
    further |= {"Qf": positive(n, final), "qf": draw(n, batch=final)}
    return (A, B, Q, R), {name: further[name] for name in terms}


def total(matrices, further, xs, us):
    """The cost of one trajectory, written out; the matrices have an axis of time."""
    (A, B, Q, R), H = matrices, len(us)
    n, m = B.shape[-2:]
    zeros = {"N": A.new_zeros(H, n, m), "q": A.new_zeros(H, n), "r": A.new_zeros(H, m), "c": A.new_zeros(H, n)}
    t = zeros | further
    cost = sum(
        xs[i] @ Q[i] @ xs[i]
        + us[i] @ R[i] @ us[i]
        + 2 * xs[i] @ t["N"][i] @ us[i]
        + 2 * t["q"][i] @ xs[i]
        + 2 * t["r"][i] @ us[i]
        for i in range(H)
    )
    Qf, qf = further.get("Qf", Q[-1]), further.get("qf", t["q"][-1])
    return cost + xs[-1] @ Qf @ xs[-1] + 2 * qf @ xs[-1]


def best_controls(matrices, further, x0, H):
    """The minimiser over all H m controls of the cost, a quadratic function: one dense solve with its Hessian."""
    A, B = matrices[:2]
    m = B.shape[-1]

    def cost(u):
        us, xs = u.view(H, m), [x0]
        for t in range(H):
            c = further["c"][t] if "c" in further else 0.0
            xs.append(A[t] @ xs[-1] + B[t] @ us[t] + c)
        return total(matrices, further, xs, us)

    zero = torch.zeros(H * m, dtype=x0.dtype)
    hessian = torch.autograd.functional.hessian(cost, zero)
    gradient = torch.autograd.functional.jacobian(cost, zero)
    u = -torch.linalg.solve(hessian, gradient)
    return u.view(H, m)


def over_time(matrices, further, H):
    """Constant matrices with an axis of time."""
    timed = {name: t if name in ("Qf", "qf") else t.expand(H, *t.shape) for name, t in further.items()}
    return tuple(t.expand(H, *t.shape) for t in matrices), timed


def leaf(t):
    return t.detach().clone().requires_grad_()


@pytest.mark.parametrize("terms", TERMS.values(), ids=TERMS)
@pytest.mark.parametrize("n, m, H", [(1, 1, 1), (3, 2, 6), (2, 3, 4)])
def test_the_policy_minimises_the_cost(n, m, H, terms):
    matrices, further = problem(n, m, terms=terms)
    x0 = torch.linspace(-1, 2, n, dtype=torch.float64)
    xs, us = lqr(*matrices, horizon=H, **further).rollout(x0)
    assert xs.shape == (H + 1, n)
    best = best_controls(*over_time(matrices, further, H), x0, H)
    torch.testing.assert_close(us, best, rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("terms", TERMS.values(), ids=TERMS)
def test_matrices_may_change_over_time(terms):
    n, m, H = 3, 2, 5
    matrices, further = problem(n, m, H, terms=terms, terminal_batch=())
    x0 = torch.ones(n, dtype=torch.float64)
    _, us = lqr(*matrices, **further).rollout(x0)
    torch.testing.assert_close(us, best_controls(matrices, further, x0, H), rtol=EXACT, atol=EXACT)


def test_a_batch_is_its_samples():
    n, m, H = 3, 2, 5
    matrices, further = problem(n, m, 4, H, terms=TERMS["all"], terminal_batch=(4,))
    policy = lqr(*matrices, **further)
    x0 = torch.randn(4, n, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    xs, us = policy.rollout(x0)
    assert [t.shape for t in (policy.K, policy.k, policy.S, policy.s)] == [
        (4, H, m, n),
        (4, H, m),
        (4, H + 1, n, n),
        (4, H + 1, n),
    ]
    for i in range(4):
        one = lqr(*(t[i] for t in matrices), **{name: t[i] for name, t in further.items()})
        states, controls = one.rollout(x0[i])
        torch.testing.assert_close(us[i], controls, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(xs[i], states, rtol=1e-12, atol=1e-12)


def test_leading_axes_broadcast():
    (A, B, Q, R), _ = problem(2, 1)
    many = torch.stack([R, 2 * R, 3 * R])
    policy = lqr(A, B, Q, many, horizon=4, Qf=torch.stack([Q, Q])[:, None])
    assert policy.K.shape == (2, 3, 4, 1, 2)
    torch.testing.assert_close(policy.K[1, 2], lqr(A, B, Q, 3 * R, horizon=4, Qf=Q).K, rtol=1e-12, atol=1e-14)
    timed = lqr(A.expand(4, 2, 2), B, Q, R)  # one matrix with time is enough
    torch.testing.assert_close(timed.K, lqr(A, B, Q, R, horizon=4).K, rtol=1e-12, atol=1e-14)
    rollout = policy.rollout(torch.ones(2, dtype=A.dtype))
    assert isinstance(rollout, dil.control.Rollout)
    states, controls = rollout
    assert states is rollout.states and controls is rollout.controls
    assert states.shape == (2, 3, 5, 2)
    assert controls.shape == (2, 3, 4, 1)


def test_the_value_is_the_cost_of_the_trajectory():
    """xᵀSx + 2 sᵀx, without the constant: its gradient in x0 is that of the least cost."""
    n, m, H = 3, 2, 5
    matrices, further = problem(n, m, H, terms=TERMS["all"], terminal_batch=())
    policy = lqr(*matrices, **further)
    x0 = leaf(torch.ones(n, dtype=torch.float64))
    xs, us = policy.rollout(x0)
    (slope,) = torch.autograd.grad(total(matrices, further, list(xs), us), x0)
    torch.testing.assert_close(slope, 2 * (policy.S[0] @ x0 + policy.s[0]).detach(), rtol=EXACT, atol=EXACT)


def test_a_long_horizon_is_the_infinite_one():
    matrices, _ = problem(4, 2, 3)
    policy = lqr(*matrices, horizon=300)
    torch.testing.assert_close(policy.S[:, 0], dare(*matrices, on_failure="raise"), rtol=EXACT, atol=EXACT)
    torch.testing.assert_close(policy.K[:, 0], dlqr(*matrices), rtol=EXACT, atol=EXACT)


def test_the_infinite_gradient_is_the_limit_too():
    matrices, _ = problem(3, 2)
    leaves = [leaf(t) for t in matrices]
    grads = [torch.autograd.grad(S.sin().sum(), leaves) for S in (lqr(*leaves, horizon=300).S[0], dare(*leaves))]
    for unrolled, implicit in zip(*grads, strict=True):
        torch.testing.assert_close(unrolled, implicit, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("timed", [False, True])
def test_derivatives_of_both_orders(timed):
    n, m, H = 2, 1, 3
    matrices, further = problem(n, m, *([H] if timed else []), terms=TERMS["all"], terminal_batch=())
    x0 = leaf(torch.ones(n, dtype=torch.float64))
    leaves = [leaf(t) for t in (*matrices, *further.values())]

    def controls(x0, A, B, Q, R, *others):
        named = dict(zip(further, others, strict=True))
        return lqr(A, B, Q, R, horizon=None if timed else H, **named).rollout(x0)[1]

    assert gradcheck(controls, [x0, *leaves], check_forward_ad=True)
    assert gradgradcheck(controls, [x0, *leaves])


def test_vmap_sees_no_difference():
    matrices, _ = problem(2, 1, 3)
    gains = torch.vmap(lambda *t: lqr(*t, horizon=4).K)(*matrices)
    torch.testing.assert_close(gains, lqr(*matrices, horizon=4).K, rtol=1e-12, atol=1e-14)


def test_float32_stays_float32():
    matrices, _ = problem(3, 2)
    single = lqr(*(t.float() for t in matrices), horizon=10)
    assert single.K.dtype == torch.float32
    torch.testing.assert_close(single.K.double(), lqr(*matrices, horizon=10).K, rtol=1e-4, atol=1e-5)


def test_samples_without_a_minimum_are_named():
    (A, B, Q, R), _ = problem(2, 1, 3)
    R[1] = -100.0
    with pytest.raises(dil.ConvergenceError, match=r"R \+ Bᵀ S B is not positive definite at step 3 \(sample 1\)"):
        lqr(A, B, Q, R, horizon=4, on_failure="raise")
    with pytest.warns(dil.ConvergenceWarning, match="1 of 3 samples"):
        lqr(A, B, Q, R, horizon=4)
    gains = torch.vmap(lambda *t: lqr(*t, horizon=4).K)(A, B, Q, R)
    assert gains.isnan().flatten(1).any(dim=1).tolist() == [False, True, False]


(A, B, Q, R), _ = problem(2, 1)
BAD = [
    ("horizon must be an integer >= 1", {"horizon": 0}, ValueError),
    ("horizon must be an integer >= 1", {"horizon": 2.0}, ValueError),
    ("horizon must be given", {}, ValueError),
    (r"N must have the shape \(..., 2, 1\)", {"horizon": 2, "N": Q}, ValueError),
    (r"r must have the shape \(..., 1\)", {"horizon": 2, "r": Q[0]}, ValueError),
    ("q must have at least 1 axis", {"horizon": 2, "q": Q[0, 0]}, ValueError),
    ("c must be a tensor, got float", {"horizon": 2, "c": 1.0}, TypeError),
    ("qf must have the dtype of A", {"horizon": 2, "qf": Q[0].float()}, TypeError),
    (
        r"Qf must have leading axes that broadcast with \(3,\), got \(4,\)",
        {"horizon": 2, "q": Q.new_zeros(3, 2), "Qf": Q.expand(4, 2, 2)},
        ValueError,
    ),
]


@pytest.mark.parametrize("sentence, further, error", BAD, ids=[str(i) for i in range(len(BAD))])
def test_bad_input_gets_one_sentence(sentence, further, error):
    with pytest.raises(error, match=sentence):
        lqr(A, B, Q, R, **further)


def test_a_bad_start_gets_one_sentence():
    policy = lqr(*(t.expand(3, *t.shape) for t in (A, B, Q, R)), horizon=2)
    with pytest.raises(ValueError, match=r"x0 must have the shape \(..., 2\)"):
        policy.rollout(torch.zeros(3, dtype=torch.float64))
    with pytest.raises(ValueError, match="x0 must have leading axes that broadcast"):
        policy.rollout(torch.zeros(2, 2, dtype=torch.float64))
    with pytest.raises(TypeError, match="x0 must have the dtype of A"):
        policy.rollout(torch.zeros(2))


@pytest.mark.parametrize("spoil", ["R", "A"])
@pytest.mark.parametrize("on_failure", ["ignore", "zero", "nan"])
def test_a_sample_that_fails_changes_no_other(spoil, on_failure):
    (A, B, Q, R), _ = problem(2, 1, 3)
    alone = lqr(A, B, Q[0], R, horizon=4)
    shared = Q[0].clone().requires_grad_()
    A, R = A.clone(), R.clone()
    (A if spoil == "A" else R)[1] = torch.nan if spoil == "A" else -100.0
    A.requires_grad_()
    policy = lqr(A, B, shared, R, horizon=4, on_failure=on_failure)
    for t in (policy.K, policy.k, policy.S, policy.s):
        assert t[1].isnan().all()
    assert torch.equal(policy.K[[0, 2]], alone.K[[0, 2]])
    own, others = torch.autograd.grad(policy.K.nansum(), (A, shared))
    if on_failure == "zero":
        (good,) = torch.autograd.grad(lqr(A.detach()[[0, 2]], B[[0, 2]], shared, R[[0, 2]], horizon=4).K.sum(), shared)
        assert torch.equal(own[1], torch.zeros(2, 2, dtype=A.dtype))
        torch.testing.assert_close(others, good)
    elif on_failure == "nan":
        policy = lqr(A, B, shared, R, horizon=4, on_failure=on_failure)
        assert torch.autograd.grad(policy.K.sum(), A)[0][1].isnan().any()


def test_a_number_that_is_not_finite_is_named():
    (A, B, Q, R), _ = problem(2, 1, 3)
    A[2, 0, 0] = torch.nan
    with pytest.raises(dil.ConvergenceError, match=r"a value of the matrices is not finite \(sample 2\)"):
        lqr(A, B, Q, R, horizon=4, on_failure="raise")
