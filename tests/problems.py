"""The problems that tests are run on: small, seeded, with closed forms where there are any.

A problem says f, F or g as `fn(y, *params)`. `solve` hands it to the library; the tests differentiate with respect to `params`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from sklearn.datasets import load_breast_cancer
from torch import Tensor, nn
from torch.nn.functional import softplus
from torch.utils import _pytree as pytree

import torchdil as dil


@dataclass(frozen=True)
class Problem:
    """y(params), defined by `fn`.

    Attributes:
        kind: "argmin", "root" or "fixed_point".
        fn: fn(y, *params): the score, the residual or the map.
        y0: a start from which the default solver converges.
        params: what to differentiate with respect to.
        exact: the closed form params -> y, or None.
        batch: how many independent problems `fn` states; 0: one, without a batch axis.
        symmetric: a root whose J is symmetric, but not positive definite: solved as a root, attached with `symmetric=True`.
        damping: the ε that the problem needs, being singular.
        closure: fn as a function of y alone that has `params` inside, or None.
    """

    name: str
    kind: str
    fn: Callable[..., Any]
    y0: Any
    params: tuple[Tensor, ...]
    exact: Callable[..., Any] | None = None
    batch: int = 0
    symmetric: bool = False
    damping: float = 0.0
    closure: Callable[[Any], Any] | None = None

    def leaves(self) -> tuple[Tensor, ...]:
        """The parameters, requiring grad; those inside a closure are themselves."""
        return self.params if self.closure else tuple(p.detach().clone().requires_grad_() for p in self.params)

    def solve(self, params: tuple[Tensor, ...], y0: Any = None, **settings: Any) -> dil.Solution:
        """`dil.argmin`, `dil.root` or `dil.fixed_point`, whichever it is."""
        y0 = self.y0 if y0 is None else y0
        fn, args = (self.closure, ()) if self.closure else (self.fn, tuple(params))
        if self.kind == "argmin":
            return dil.argmin(fn, y0, args, **settings)
        function = dil.root if self.kind == "root" else dil.fixed_point
        return function(fn, y0, args, batch_dims=int(self.batch > 0), **settings)

    def value(self, params: tuple[Tensor, ...], y0: Any = None, **settings: Any) -> Any:
        """y, attached: through `dil.attach` for a saddle."""
        if not self.symmetric:
            return self.solve(params, y0, **settings).value
        linear_solver = settings.pop("linear_solver", None)
        y = self.solve(tuple(p.detach() for p in params), y0, **settings).value
        batch_dims = int(self.batch > 0)
        return dil.attach(self.fn, y, params, linear_solver=linear_solver, batch_dims=batch_dims, symmetric=True)

    def residual(self, y: Tensor, *params: Tensor) -> Tensor:
        """F of all unknowns as one vector, stated anew with torch.func: what oracles are made of."""
        like, spec = pytree.tree_flatten(self.y0)
        parts = y.split([leaf.numel() for leaf in like])
        unknown = pytree.tree_unflatten([part.view_as(leaf) for part, leaf in zip(parts, like, strict=True)], spec)
        if self.kind == "argmin":
            return flatten(torch.func.grad(lambda u: self.fn(u, *params).sum())(unknown))
        value = flatten(self.fn(unknown, *params))
        return value if self.kind == "root" else y - value


def flatten(y: Any) -> Tensor:
    """All unknowns as one vector."""
    return torch.cat([leaf.reshape(-1) for leaf in pytree.tree_leaves(y)])


def problems(dtype: torch.dtype = torch.float64) -> list[Problem]:
    """The list, in one precision."""
    made = [make(_Draw(seed, dtype)) for seed, make in enumerate(_MAKERS)]
    return [problem for group in made for problem in (group if isinstance(group, list) else [group])]


class _Draw:
    """Normal random numbers from a seed, drawn in float64 whatever the dtype."""

    def __init__(self, seed: int, dtype: torch.dtype):
        self.dtype = dtype
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._generator, dtype=torch.float64).to(self.dtype)

    def tensor(self, *numbers: float) -> Tensor:
        return torch.tensor(numbers, dtype=self.dtype)

    def scalar(self, number: float) -> Tensor:
        return torch.tensor(number, dtype=self.dtype)

    def zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=self.dtype)


def _quadratic(draw: _Draw) -> Problem:
    def matrix(L):
        return L @ L.mT + torch.eye(2, dtype=L.dtype)

    def score(y, L, b):
        return 0.5 * y @ matrix(L) @ y - b @ y

    return Problem(
        "quadratic",
        "argmin",
        score,
        draw.zeros(2),
        (draw(2, 2), draw(2)),
        exact=lambda L, b: torch.linalg.solve(matrix(L), b),
    )


def _mlp_energy(draw: _Draw) -> Problem:
    """Convex: softplus of an affine map, with positive weights, on top of a quadratic."""

    def score(y, x, W, b, w):
        return 0.5 * (y - x).square().sum() + softplus(w) @ softplus(W @ y + b)

    return Problem("mlp_energy", "argmin", score, draw.zeros(2), (draw(2), draw(3, 2), draw(3), draw(3)))


def _rosenbrock(draw: _Draw) -> Problem:
    def score(y, a, b):
        return (a - y[0]) ** 2 + b * (y[1] - y[0] ** 2) ** 2

    return Problem(
        "rosenbrock",
        "argmin",
        score,
        draw.tensor(-1.2, 1.0),
        (draw.scalar(1.1), draw.scalar(20.0)),
        exact=lambda a, b: torch.stack([a, a**2]),
    )


def _kepler(draw: _Draw) -> list[Problem]:
    """E - e sin E = M: three samples as an argmin, one system as a root."""

    def residual(E, e, M):
        return E - e * torch.sin(E) - M

    def score(E, e, M):
        return 0.5 * residual(E, e, M).square()

    params = draw.tensor(0.1, 0.4, 0.7), draw.tensor(0.5, 1.5, 2.5)
    return [
        Problem("kepler_argmin", "argmin", score, params[1], params, batch=3),
        Problem("kepler_root", "root", residual, params[1], params),
    ]


def _logistic(draw: _Draw) -> Problem:
    """L2-regularised logistic regression; the parameters are the logarithms of each feature's weight decay."""
    data = load_breast_cancer()
    X = torch.as_tensor(data.data[:60, :8])
    X = ((X - X.mean(0)) / X.std(0)).to(draw.dtype)
    sign = torch.as_tensor(2 * data.target[:60] - 1).to(draw.dtype)

    def score(w, log_decay):
        return softplus(-sign * (X @ w)).mean() + 0.5 * (log_decay.exp() * w.square()).sum()

    return Problem("logistic", "argmin", score, draw.zeros(8), (0.3 * draw(8) - 2,))


def _deq(draw: _Draw) -> list[Problem]:
    """tanh(W y + U x + b) with ‖W‖ < 1."""
    x, xs = draw(2), draw(4, 2)

    def g(y, W, U, b):
        return torch.tanh(y @ W.mT + (x if y.dim() == 1 else xs) @ U.mT + b)

    W = draw(2, 2)
    params = 0.6 * W / torch.linalg.matrix_norm(W, 2), draw(2, 2), draw(2)
    return [
        Problem("deq", "fixed_point", g, draw.zeros(2), params),
        Problem("deq_batch4", "fixed_point", g, draw.zeros(4, 2), params, batch=4),
    ]


def _huber_pooling(draw: _Draw) -> Problem:
    """The pseudo-Huber mean of five points, one of them far out."""

    def score(y, points, log_delta):
        delta = log_delta.exp()
        return (delta**2 * (torch.sqrt(1 + ((points - y) / delta).square().sum(-1)) - 1)).sum()

    points = draw(5, 2)
    points[0] += 10
    return Problem("huber_pooling", "argmin", score, draw.zeros(2), (points, draw.scalar(-0.3)))


def _saddle(draw: _Draw) -> Problem:
    """A stationary point of an indefinite function: the Hessian has eigenvalues of both signs."""
    Q = torch.linalg.qr(draw(3, 3))[0]
    H = Q @ torch.diag(draw.tensor(3.0, 1.0, -2.0)) @ Q.mT

    def gradient(y, a, b):
        return H @ y + a * y**3 - b

    return Problem("saddle", "root", gradient, draw.zeros(3), (0.1 * draw(3), draw(3)), symmetric=True)


def _singular(draw: _Draw) -> Problem:
    """y₀ - y₁ is flat: the minimiser nearest to the start is the symmetric one."""

    def score(y, a, b):
        total = y[0] + y[1]
        return torch.cosh(total - a) + (y[2] - a * b) ** 2 + 0.5 * total**2

    return Problem("singular", "argmin", score, draw.zeros(3), (draw.scalar(0.7), draw.scalar(1.3)), damping=1e-4)


def _module(draw: _Draw) -> Problem:
    """A closure over nn.Linear, whose parameters no argument shows."""
    linear = nn.Linear(2, 2).to(draw.dtype)
    with torch.no_grad():
        linear.weight.copy_(draw(2, 2))
        linear.bias.copy_(draw(2))
    names = [name for name, _ in linear.named_parameters()]

    def energy(y, features):
        return torch.log(torch.cosh(features)).sum() + 0.5 * (y - 1).square().sum()

    def score(y, *params):
        return energy(y, torch.func.functional_call(linear, dict(zip(names, params, strict=True)), (y,)))

    return Problem(
        "module",
        "argmin",
        score,
        draw.zeros(2),
        tuple(linear.parameters()),
        closure=lambda y: energy(y, linear(y)),
    )


def _dict(draw: _Draw) -> Problem:
    """Ridge regression with an intercept, and a quartic: {"w": (2,), "b": ()}."""
    X = draw(6, 2)

    def score(y, target, decay):
        error = X @ y["w"] + y["b"] - target
        return 0.5 * error.square().sum() + decay * (y["w"].square().sum() + (y["w"] ** 4).sum())

    return Problem("dict", "argmin", score, {"w": draw.zeros(2), "b": draw.zeros()}, (draw(6), draw.scalar(0.5)))


def _nested(draw: _Draw) -> list[Problem]:
    """A root in a nested tuple, and a batch of argmins in one with a dict inside."""

    def residual(y, a, b):
        u, (v, w) = y
        return u + 0.3 * torch.tanh(v) - a, (2 * v + 0.5 * torch.sin(w) - b * u.sum(), w**3 + w + v.sum() - b)

    def score(y, x, scale):
        u, rest = y
        coupling = (u.sum(-1) - rest["v"].sum((-1, -2))).square()
        return (u - x).square().sum(-1) + coupling + (scale * rest["v"] ** 4 + rest["v"].square()).sum((-1, -2))

    return [
        Problem(
            "nested_root",
            "root",
            residual,
            (draw.zeros(2), (draw.zeros(1), draw.zeros())),
            (draw(2), draw.scalar(0.8)),
        ),
        Problem(
            "nested_batch3",
            "argmin",
            score,
            (draw.zeros(3, 2), {"v": draw.zeros(3, 1, 2)}),
            (draw(3, 2), draw.scalar(0.7)),
            batch=3,
        ),
    ]


def _batched(draw: _Draw) -> list[Problem]:
    """Quartic bowls with inputs of their own and a shared parameter; and roots with a shared, non-symmetric matrix."""

    def score(y, x, theta):
        quadratic = (y - x).square().sum(-1) + (y.sum(-1) * theta).square()
        return quadratic + 0.25 * (y**4).sum(-1)

    def residual(y, x, A):
        return y + 0.2 * y**3 + y @ A.mT - x

    made = []
    for samples in (1, 4):
        y0 = draw.zeros(samples, 2)
        made.append(Problem(f"argmin_batch{samples}", "argmin", score, y0, (draw(samples, 2), draw.scalar(0.9)), batch=samples))
        made.append(Problem(f"root_batch{samples}", "root", residual, y0, (draw(samples, 2), 0.4 * draw(2, 2)), batch=samples))
    return made


def _scalar(draw: _Draw) -> Problem:
    """y³ + a y = b by Cardano's formula: y of shape ()."""

    def score(y, a, b):
        return 0.25 * y**4 + 0.5 * a * y**2 - b * y

    def exact(a, b):
        root = torch.sqrt(b**2 / 4 + a**3 / 27)
        return (b / 2 + root).pow(1 / 3) - (root - b / 2).pow(1 / 3)

    return Problem("scalar", "argmin", score, draw.zeros(), (draw.scalar(1.5), draw.scalar(0.8)), exact=exact)


def _linear(draw: _Draw) -> Problem:
    """A y = b with a rotation in A: eigenvalues far from the real axis."""
    turn = math.pi / 3
    rotation = draw.tensor(math.cos(turn), -math.sin(turn), math.sin(turn), math.cos(turn)).view(2, 2)

    def residual(y, A, b):
        return A @ y - b

    params = 2 * rotation + 0.2 * draw(2, 2), draw(2)
    return Problem("linear", "root", residual, draw.zeros(2), params, exact=lambda A, b: torch.linalg.solve(A, b))


_MAKERS = (
    _quadratic,
    _mlp_energy,
    _rosenbrock,
    _kepler,
    _logistic,
    _deq,
    _huber_pooling,
    _saddle,
    _singular,
    _module,
    _dict,
    _nested,
    _batched,
    _scalar,
    _linear,
)

PROBLEMS = problems()


class Cube(torch.autograd.Function):
    """y³ with a backward that can be differentiated again, but neither a forward-mode nor a batching rule."""

    @staticmethod
    def forward(ctx, y):
        ctx.save_for_backward(y)
        return y**3

    @staticmethod
    def backward(ctx, v):
        (y,) = ctx.saved_tensors
        return 3 * y**2 * v
