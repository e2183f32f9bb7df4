"""Properties that hold for every shape, structure, batch and dtype, on problems that Hypothesis draws."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import flatten
from torch.utils import _pytree as pytree

import torchdil as dil
from torchdil.batch import Layout

# Relative, of values and gradients: a few times the default rtol, the condition numbers being below 10.
RTOL = {torch.float64: 1e-8, torch.float32: 1e-3}
# The same numbers computed in another batch: the rounding of batched kernels.
BATCH = {torch.float64: 1e-12, torch.float32: 1e-4}

PROPERTY = settings(deadline=None, derandomize=True, max_examples=25)

shapes = st.lists(st.integers(1, 3), min_size=0, max_size=3).map(tuple)
structures = st.recursive(
    shapes.map(lambda shape: ("leaf", shape)),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map(lambda pair: ("tuple", pair)),
        st.fixed_dictionaries({"a": inner, "b": inner}).map(lambda made: ("dict", made)),
    ),
    max_leaves=3,
)
dtypes = st.sampled_from([torch.float64, torch.float32])
batches = st.integers(1, 4)
seeds = st.integers(0, 2**16)
linear_solvers = st.sampled_from([dil.Auto(), dil.CG(), dil.MINRES(), dil.GMRES(), dil.Dense(), dil.Auto(dense_below=0)])


def generator(seed):
    return torch.Generator().manual_seed(seed)


def random(structure, batch_shape, dtype, g):
    """Normal numbers in a structure."""
    tag, inside = structure
    if tag == "leaf":
        return torch.randn(batch_shape + inside, generator=g, dtype=torch.float64).to(dtype)
    if tag == "tuple":
        return tuple(random(part, batch_shape, dtype, g) for part in inside)
    return {key: random(part, batch_shape, dtype, g) for key, part in inside.items()}


def rows(y, samples):
    """(B, n), written without `Layout`."""
    return torch.cat([leaf.reshape(samples, -1) if samples else leaf.flatten(1) for leaf in pytree.tree_leaves(y)], dim=1)


def matrices(samples, n, dtype, g):
    """Positive definite, with eigenvalues from 1 to 5."""
    Q = torch.linalg.qr(torch.randn(samples, n, n, generator=g, dtype=torch.float64))[0]
    eigenvalues = 1 + 4 * torch.rand(samples, n, generator=g, dtype=torch.float64)
    return (Q @ torch.diag_embed(eigenvalues) @ Q.mT).to(dtype)


def score(y, H, x, theta):
    """A strongly convex quadratic and a quartic, one value a sample; y (B, n) or nested."""
    u = rows(y, len(H))
    quadratic = 0.5 * torch.einsum("bi,bij,bj->b", u, H, u) - (theta.exp() * x * u).sum(-1)
    return quadratic + 0.1 * (u**4).sum(-1)


def problem(samples, n, dtype, seed):
    """H, x, θ and a cotangent."""
    g = generator(seed)
    H = matrices(samples, n, dtype, g)
    x, v = (torch.randn(samples, n, generator=g, dtype=torch.float64).to(dtype) for _ in range(2))
    return H, x, (0.3 * torch.randn((), generator=g, dtype=torch.float64)).to(dtype), v


def close(a, b, rtol):
    return float((a - b).detach().norm()) <= rtol * float(b.detach().norm() + 1e-3)


@PROPERTY
@given(structures, st.lists(st.integers(1, 3), max_size=2).map(tuple), dtypes, seeds)
def test_layout_round_trip(structure, batch_shape, dtype, seed):
    y = random(structure, batch_shape, dtype, generator(seed))
    layout = Layout.of(y, len(batch_shape))
    flat = layout.ravel(y)
    assert flat.shape == (layout.samples, layout.size)
    assert torch.equal(flat, rows(y, layout.samples))
    leaves, spec = pytree.tree_flatten(layout.unravel(flat))
    expected, expected_spec = pytree.tree_flatten(y)
    assert spec == expected_spec
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(leaves, expected, strict=True))


@PROPERTY
@given(structures, st.integers(0, 4), dtypes, seeds, linear_solvers)
def test_gradient_of_a_convex_argmin_is_the_dense_theorem(structure, batch, dtype, seed, linear_solver):
    """Structures, batched or not, against one dense solve a sample in float64."""
    samples = max(batch, 1)
    batch_shape = (batch,) if batch else ()
    y0 = random(structure, batch_shape, dtype, generator(seed))
    H, x, theta, v = problem(samples, rows(y0, samples).shape[1], dtype, seed)
    inputs = tuple(t.requires_grad_() for t in (H, x, theta))
    solution = dil.argmin(lambda y, *args: score(y, *args).view(batch_shape), y0, inputs, linear_solver=linear_solver)
    assert solution.status.shape == batch_shape and bool(solution.converged.all())
    assert pytree.tree_structure(solution.value) == pytree.tree_structure(y0)
    y = rows(solution.value, samples)
    assert y.dtype == dtype
    got = torch.autograd.grad(y, inputs, v)

    H, x, theta, v = (t.detach().double() for t in (H, x, theta, v))
    exact = dil.argmin(score, torch.zeros_like(x), (H, x, theta), solver=dil.Newton(rtol=1e-13)).value
    F = torch.func.grad(lambda u, H, x, theta: score(u[None], H[None], x[None], theta).sum())
    expected = [torch.zeros_like(t) for t in (H, x, theta)]
    for i in range(samples):
        J, *partial = torch.func.jacrev(F, (0, 1, 2, 3))(exact[i], H[i], x[i], theta)
        adjoint = torch.linalg.solve(J, v[i])
        for total, P in zip(expected, partial, strict=True):
            part = -torch.tensordot(adjoint, P, dims=1)
            total.add_(part) if total.dim() == 0 else total[i].copy_(part)
    assert close(y.double(), exact, RTOL[dtype])
    assert all(close(a.double(), b, RTOL[dtype]) for a, b in zip(got, expected, strict=True))


def solve(H, x, theta, v, solver, linear_solver):
    """y and the gradients of x and θ."""
    x, theta = x.clone().requires_grad_(), theta.clone().requires_grad_()
    y = dil.argmin(score, torch.zeros_like(x), (H, x, theta), solver=solver, linear_solver=linear_solver).value
    return y.detach(), *torch.autograd.grad(y, (x, theta), v)


forward_solvers = st.sampled_from([dil.Newton(), dil.Newton(linear_solver=dil.CG()), dil.GradientDescent()])


@PROPERTY
@given(batches, st.integers(1, 6), dtypes, seeds, forward_solvers, linear_solvers)
def test_a_batch_is_so_many_single_solves(samples, n, dtype, seed, solver, linear_solver):
    H, x, theta, v = problem(samples, n, dtype, seed)
    y, grad_x, grad_theta = solve(H, x, theta, v, solver, linear_solver)
    # One sample is summed up in another order than a batch, and Barzilai-Borwein steps blow such a difference up.
    rtol = RTOL[dtype] if isinstance(solver, dil.GradientDescent) else BATCH[dtype]
    total = torch.zeros_like(theta)
    for i in range(samples):
        one = slice(i, i + 1)
        y_one, grad_x_one, grad_theta_one = solve(H[one], x[one], theta, v[one], solver, linear_solver)
        assert close(y[one], y_one, rtol)
        assert close(grad_x[one], grad_x_one, rtol)
        total = total + grad_theta_one
    assert close(grad_theta, total, rtol)


@PROPERTY
@given(st.integers(2, 5), st.integers(1, 6), dtypes, seeds, forward_solvers, linear_solvers)
def test_permuted_samples_have_permuted_results(samples, n, dtype, seed, solver, linear_solver):
    H, x, theta, v = problem(samples, n, dtype, seed)
    order = torch.randperm(samples, generator=generator(seed))
    y, grad_x, grad_theta = solve(H, x, theta, v, solver, linear_solver)
    y_permuted, grad_x_permuted, grad_theta_permuted = solve(H[order], x[order], theta, v[order], solver, linear_solver)
    assert close(y_permuted, y[order], BATCH[dtype])
    assert close(grad_x_permuted, grad_x[order], BATCH[dtype])
    assert close(grad_theta_permuted, grad_theta, BATCH[dtype])


@PROPERTY
@given(batches, st.integers(1, 6), dtypes, seeds, linear_solvers, st.booleans())
def test_a_closure_gets_the_gradient_of_explicit_arguments(samples, n, dtype, seed, linear_solver, history):
    H, x, theta, v = problem(samples, n, dtype, seed)
    leaves = [t.requires_grad_() for t in (H, x, theta)]

    def gradients(closed):
        inputs = [t * 1.0 for t in leaves] if history else leaves
        fn = (lambda y: score(y, *inputs)) if closed else score
        y = dil.argmin(fn, torch.zeros_like(x), () if closed else tuple(inputs), linear_solver=linear_solver).value
        first = torch.autograd.grad(y, leaves, v, create_graph=True)
        second = torch.autograd.grad(sum(grad.square().sum() for grad in first), leaves)
        return flatten(first), flatten(second)

    for closed, explicit in zip(gradients(True), gradients(False), strict=True):
        assert close(closed, explicit, BATCH[dtype])


@PROPERTY
@given(shapes, dtypes, seeds, st.sampled_from([dil.Auto(), dil.CG(), dil.NormalCG(), dil.GMRES(), dil.BiCGStab(), dil.Dense()]))
def test_fixed_point_argmin_and_root_agree(shape, dtype, seed, linear_solver):
    """The same y as the minimiser of ½ (y - x)² + s log cosh y, its root x - s tanh y = y, and that fixed point."""
    g = generator(seed)
    x, v = (torch.randn(shape, generator=g, dtype=torch.float64).to(dtype) for _ in range(2))
    s = torch.tensor(0.5, dtype=dtype)
    inputs = tuple(t.requires_grad_() for t in (x, s))
    y0 = torch.zeros_like(x)
    answers = [
        dil.argmin(
            lambda y, x, s: (0.5 * (y - x) ** 2 + s * torch.log(torch.cosh(y))).sum(), y0, inputs, linear_solver=linear_solver
        ),
        dil.root(lambda y, x, s: y - x + s * torch.tanh(y), y0, inputs, linear_solver=linear_solver),
        dil.fixed_point(lambda y, x, s: x - s * torch.tanh(y), y0, inputs, linear_solver=linear_solver),
    ]
    results = [flatten([a.value, *torch.autograd.grad(a.value, inputs, v)]).detach() for a in answers]
    assert all(bool(a.converged) for a in answers)
    assert close(results[1], results[0], RTOL[dtype]) and close(results[2], results[0], RTOL[dtype])


# --- any solver with any linear solver, on inputs of any layout -------------------------------------------------------------

# The least of ½ uᵀHu - eᶿ x·u + 0.1 Σ u⁴ as an argmin, as the root of its gradient, and as the fixed point of a step down.
KINDS = {
    "argmin": [
        dil.Newton(),
        dil.Newton(linear_solver=dil.CG()),
        dil.LBFGS(),
        dil.GradientDescent(),
        dil.SciPy(),
        dil.SciPy("trust-ncg"),
        dil.RandomShooting(particles=30, polish=dil.Newton()),
        lambda f, y: dil.argmin(f, y, solver=dil.LBFGS()).value.detach(),
    ],
    "root": [dil.Newton(), dil.Newton(linear_solver=dil.GMRES()), dil.Broyden(), dil.SciPy()],
    "fixed_point": [dil.Picard(), dil.Anderson(), dil.Broyden(), dil.Newton(), dil.SciPy("anderson")],
}
ANY_LINEAR = [
    dil.Auto(),
    dil.Auto(dense_below=0),
    dil.CG(),
    dil.CG(preconditioner=dil.Jacobi()),
    dil.NormalCG(),
    dil.GMRES(),
    dil.BiCGStab(),
    dil.Dense(),
]
kinds = st.sampled_from(sorted(KINDS)).flatmap(lambda kind: st.tuples(st.just(kind), st.sampled_from(KINDS[kind])))
layouts = st.sampled_from(["contiguous", "transposed", "strided", "expanded"])
# Solvers that stop at tolerances of their own are accepted with half the digits.
HALF = {torch.float64: 1e-4, torch.float32: 3e-2}


def force(y, H, x, theta):
    return torch.einsum("bij,bj->bi", H, y) - theta.exp() * x + 0.4 * y**3


def find(kind, solver, linear_solver, H, x, theta, y0=None):
    """y (B, n), by the function of that kind."""
    y0 = torch.zeros_like(x) if y0 is None else y0
    settings = {"solver": solver, "linear_solver": linear_solver}
    if kind == "argmin":
        return dil.argmin(score, y0, (H, x, theta), **settings)
    if kind == "root":
        return dil.root(force, y0, (H, x, theta), batch_dims=1, **settings)
    return dil.fixed_point(lambda y, *args: y - 0.1 * force(y, *args), y0, (H, x, theta), batch_dims=1, **settings)


def laid_out(t, layout):
    """The same numbers, in memory otherwise; "expanded": one row of them, for all."""
    if layout == "transposed":
        return t.mT.contiguous().mT
    if layout == "strided":
        wide = torch.empty(*t.shape[:-1], 2 * t.shape[-1], dtype=t.dtype, device=t.device)
        wide[..., ::2] = t
        return wide[..., ::2]
    return t[:1].expand_as(t) if layout == "expanded" and len(t) else t


def oracle(H, x, theta, v):
    """y and the gradients of x and θ, a dense solve each, in float64."""
    H, x, theta, v = (t.detach().double() for t in (H, x, theta, v))
    y = torch.zeros_like(x)
    for _ in range(50):
        J = H + torch.diag_embed(1.2 * y**2)
        y = y - torch.linalg.solve(J, force(y, H, x, theta))
    g = torch.linalg.solve(H + torch.diag_embed(1.2 * y**2), v)
    return y, theta.exp() * g, (theta.exp() * x * g).sum()


@settings(PROPERTY, max_examples=60)
@given(kinds, st.sampled_from(ANY_LINEAR), st.integers(0, 5), st.integers(1, 5), dtypes, seeds, layouts)
def test_any_solver_with_any_linear_solver_on_any_layout(device, kind, linear_solver, samples, n, dtype, seed, layout):
    kind, solver = kind
    H, x, theta, v = (t.to(device) for t in problem(samples, n, dtype, seed))
    H, x, v = (laid_out(t, layout) for t in (H, x, v))
    # One row for all: a leaf of one row, whose gradient is the sum.
    leaf = x[:1].detach().clone().requires_grad_() if layout == "expanded" and samples else x.detach().requires_grad_()
    theta.requires_grad_()
    solution = find(kind, solver, linear_solver, H, leaf.expand(samples, n) if len(leaf) != samples else leaf, theta)
    assert bool(solution.converged.all()) and solution.value.shape == (samples, n)
    grad_x, grad_theta = torch.autograd.grad(solution.value, (leaf, theta), v)
    exact, expected_x, expected_theta = oracle(H, x, theta, v)
    loose = callable(solver) or isinstance(solver, dil.SciPy)
    rtol = HALF[dtype] if loose else 10 * RTOL[dtype]
    if len(leaf) != samples:
        expected_x = expected_x.sum(0, keepdim=True)
    assert grad_x.shape == leaf.shape and grad_theta.shape == ()
    assert close(solution.value.double(), exact, rtol)
    assert close(grad_x.double(), expected_x, rtol)
    assert close(grad_theta.double(), expected_theta, rtol)


@settings(PROPERTY, max_examples=25)
@given(kinds, st.sampled_from(ANY_LINEAR), st.integers(2, 5), st.integers(1, 4), seeds)
def test_samples_of_any_solver_know_nothing_of_each_other(device, kind, linear_solver, samples, n, seed):
    """A batch in another order, and with one sample replaced by a hard one: the others have the same answers."""
    kind, solver = kind
    H, x, theta, v = (t.to(device) for t in problem(samples, n, torch.float64, seed))
    order = torch.randperm(samples, generator=generator(seed)).to(device)

    def answers(H, x, v):
        x = x.detach().requires_grad_()
        y = find(kind, solver, linear_solver, H, x, theta).value
        return y.detach(), torch.autograd.grad(y, x, v)[0]

    rtol = HALF[torch.float64] if callable(solver) or isinstance(solver, dil.SciPy) else RTOL[torch.float64]
    y, grad = answers(H, x, v)
    y_permuted, grad_permuted = answers(H[order], x[order], v[order])
    assert close(y_permuted, y[order], rtol) and close(grad_permuted, grad[order], rtol)
    hard = x.clone()
    hard[-1] *= 3
    y_hard, grad_hard = answers(H, hard, v)
    assert close(y_hard[:-1], y[:-1], rtol) and close(grad_hard[:-1], grad[:-1], rtol)


class Tied(torch.nn.Module):
    """One weight in two places, and once more from outside."""

    def __init__(self, W):
        super().__init__()
        self.first = torch.nn.Parameter(W)
        self.second = self.first

    def forward(self, y, W):
        u = torch.cat([part.flatten(1) for part in (y["a"], *y["b"])], dim=1)
        inner = torch.tanh(u @ self.first) @ self.second.mT
        return (0.5 * u**2).sum(1) + 0.1 * (inner * u).sum(1) - (u @ W).sum(1)


@PROPERTY
@given(batches, dtypes, seeds, st.sampled_from(ANY_LINEAR))
def test_shared_parameters_of_nested_unknowns_get_the_sum(device, samples, dtype, seed, linear_solver):
    """One tensor as a parameter twice and as an argument: its gradient is that of three, added up."""
    g = generator(seed)
    W = (0.4 * torch.randn(4, 4, generator=g, dtype=torch.float64)).to(dtype).to(device)
    v = torch.randn(samples, 4, generator=g, dtype=torch.float64).to(dtype).to(device)
    like = torch.zeros(samples, 2, dtype=dtype, device=device)
    y0 = {"a": like, "b": (like[:, :1].unsqueeze(2), like[:, 0])}

    def value(function, W):
        y = dil.argmin(function, y0, (W,), linear_solver=linear_solver).value
        return torch.cat([part.flatten(1) for part in (y["a"], y["b"][0], y["b"][1].unsqueeze(1))], dim=1)

    class Flat(Tied):
        def forward(self, y, W):
            return super().forward({"a": y["a"], "b": (y["b"][0], y["b"][1].unsqueeze(1))}, W)

    tied = Flat(W.clone())
    (total,) = torch.autograd.grad(value(tied, tied.first), tied.first, v)
    apart = Flat(W.clone())
    apart.second = torch.nn.Parameter(W.clone())
    outside = W.clone().requires_grad_()
    parts = torch.autograd.grad(value(apart, outside), (apart.first, apart.second, outside), v)
    assert close(total, sum(parts), 10 * RTOL[dtype])
    assert all(float(part.norm()) > 1e-3 * float(total.norm()) for part in parts[2:])
