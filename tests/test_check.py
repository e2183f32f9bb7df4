"""`check_gradient`: it passes what is right, and names the fault that was planted."""

import copy
import re

import pytest
import torch
from problems import PROBLEMS
from torch import nn

import torchdil as dil

SAMPLES = 4
# Of a right gradient: solves to 1e-10, times the condition numbers of the problems; some derivatives are zero.
RIGHT = 1e-5


def real(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)


ZERO = torch.zeros((), dtype=torch.float64)


def draw(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def network():
    net = nn.Linear(5, 3).double()
    with torch.no_grad():
        net.weight.copy_(draw(3, 5))
        net.bias.copy_(draw(3))
    return net


class Energy(nn.Module):
    """A convex score of y, with a network of x inside and unequal curvatures."""

    def __init__(self):
        super().__init__()
        self.net = network()

    def forward(self, y, x):
        return (real(1.0, 3.0, 9.0).to(y) * (y - self.net(x)) ** 2 + torch.cosh(y)).sum(-1)


def argmin_layer(**settings):
    return dil.ArgminLayer(Energy(), init=(3,), **settings)


def stops_early(fn, y0):
    """A solver of the user's that takes three steps of gradient descent."""
    y = y0
    for _ in range(3):
        y = y.detach().requires_grad_()
        y = y - 0.05 * torch.autograd.grad(fn(y).sum(), y)[0]
    return y.detach()


def equilibrium(**settings):
    net = network()
    turn = torch.linalg.qr(draw(3, 3))[0]
    return dil.FixedPointLayer(lambda y, x: torch.tanh(0.9 * y @ turn.mT + net(x)), init=(3,), **settings)


class Wrong(torch.autograd.Function):
    """2 t, with the derivative of 3 t."""

    @staticmethod
    def forward(ctx, t):
        return 2 * t

    @staticmethod
    def backward(ctx, grad):
        return 3 * grad


def score_with_abs(y, x):
    """Its minimiser is 0, where the score has a kink, for every small x."""
    return ((y - 0.1 * x[:, :3]) ** 2).sum(-1) + 5 * y.abs().sum(-1)


def relu_root(y, x):
    """At x = 0 the solution is 0: its slope is 1 to the left and 1/2 to the right."""
    return y + torch.relu(y) - x


NET = network()


def through_detach(y, x):
    return ((y - NET(x).detach()) ** 2 + torch.cosh(y)).sum(-1)


X = draw(SAMPLES, 5)

# name: (the layer, its inputs, who is to blame, what the advice must say)
FAULTS = {
    "few steps": (argmin_layer(solver=dil.GradientDescent(max_steps=3)), (X,), "forward solve", "raise max_steps of GradientD"),
    "loose rtol": (argmin_layer(solver=dil.LBFGS(rtol=0.1)), (X,), "forward solve", "tighten rtol of LBFGS from 1e-01 to "),
    "few steps of Picard": (
        equilibrium(solver=dil.Picard(max_steps=5)),
        (X,),
        "forward solve",
        "raise max_steps of Picard, now 5",
    ),
    "a solver that stops early": (
        argmin_layer(solver=stops_early),
        (X,),
        "forward solve",
        "let the solver .stops_early. run on",
    ),
    "no solution attached": (
        lambda a: dil.attach(lambda y: y**2 - a, a.detach().sqrt() + 0.02),
        (real(1.0, 2.0),),
        "forward solve",
        "refine y_star",
    ),
    "one step of CG": (argmin_layer(linear_solver=dil.CG(max_steps=1)), (X,), "backward solve", "raise max_steps of CG, now 1"),
    "loose CG": (argmin_layer(linear_solver=dil.CG(rtol=0.5)), (X,), "backward solve", "tighten rtol of CG from 5e-01 to"),
    "loose GMRES": (equilibrium(linear_solver=dil.GMRES(rtol=0.3)), (X,), "backward solve", "tighten rtol of GMRES"),
    "damping": (argmin_layer(linear_solver=dil.CG(damping=0.5)), (X,), "backward solve", "lower damping of CG, now 5e-01"),
    "no Jacobian": (equilibrium(linear_solver=dil.JacobianFree()), (X,), "backward solve", "JacobianFree approximates on purp"),
    "three terms": (
        equilibrium(linear_solver=dil.Neumann(max_steps=3)),
        (X,),
        "backward solve",
        "Neumann approximates on purpose",
    ),
    "a kink of the score": (
        dil.ArgminLayer(score_with_abs, solver=lambda fn, y0: 0 * y0, init=(3,)),
        (X,),
        "function",
        "replace what is not smooth",
    ),
    "a kink of the residual": (
        dil.RootLayer(relu_root, init=(3,)),
        (torch.zeros(2, 3, dtype=torch.float64),),
        "function",
        "replace what is not smooth",
    ),
    "detach": (dil.ArgminLayer(through_detach, init=(3,)), (X,), "function", "detach"),
    "item": (lambda a: dil.root(lambda y: y**3 + y - a.item(), ZERO + 1), (ZERO + 2,), "function", "item"),
    "a wrong backward": (
        dil.RootLayer(lambda y, x: y + 0.1 * y**3 - Wrong.apply(x), init=(5,)),
        (X,),
        "function",
        "autograd.Function with a wrong backward",
    ),
    "dropout": (nn.Sequential(nn.Dropout(0.5), argmin_layer()), (X,), "function", "eval"),
    "a wrong backward outside": (lambda x: Wrong.apply(x), (X,), "function", "autograd.Function with a wrong backward"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named(name):
    layer, inputs, blame, advice = FAULTS[name]
    check = dil.check_gradient(layer, *inputs)
    assert not check.ok
    assert check.blame == blame
    assert check.error > check.rtol and check.errors[blame] == max(check.errors.values())
    assert re.search(advice, check.advice), check.advice
    assert f"wrong, and the {blame} is to blame" in str(check) and check.advice in str(check)


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.name)
def test_a_right_gradient_is_called_right(problem):
    linear_solver = dil.CG(damping=problem.damping) if problem.damping else None
    params = problem.leaves()
    check = dil.check_gradient(lambda *p: problem.value(p, linear_solver=linear_solver), *params)
    assert check.ok, str(check)
    assert check.error <= (10 * problem.damping if problem.damping else RIGHT)


@pytest.mark.parametrize(
    "solver",
    [dil.Newton(), dil.GradientDescent(), dil.GradientDescent(nesterov=True), dil.LBFGS(), stops_early],
    ids=lambda s: getattr(s, "__name__", type(s).__name__),
)
def test_unrolling_agrees_with_differences(solver):
    check = dil.check_gradient(argmin_layer(solver=solver), X)
    for _, _, _, difference, unrolled, _ in check.tensors[1:]:
        assert abs(float(unrolled) - float(difference)) <= 1e-5 * abs(float(difference))
    own = "Newton" if solver is stops_early else type(solver).__name__
    assert check.tensors[0][4] == f"unrolled {own}"


def test_what_each_solve_adds_is_what_was_planted():
    """Both solves are bad: each one's part is what it alone does, measured here by hand."""
    few, loose = dil.GradientDescent(max_steps=4), dil.CG(rtol=0.3)
    energy = Energy()

    def gradient(**settings):
        x = X.clone().requires_grad_()
        y = dil.ArgminLayer(energy, init=(3,), on_failure="ignore", **settings)(x)
        return torch.autograd.grad((weights * y).sum(), [x, *energy.parameters()])

    weights = torch.randn(SAMPLES, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    exact = gradient(solver=dil.Newton(rtol=1e-14), linear_solver=dil.Dense())
    parts = {
        "forward solve": gradient(solver=few, linear_solver=dil.Dense()),
        "backward solve": gradient(solver=dil.Newton(rtol=1e-14), linear_solver=loose),
    }
    check = dil.check_gradient(dil.ArgminLayer(energy, init=(3,), solver=few, linear_solver=loose), X)
    for name, grads in parts.items():
        by_hand = max(float((g - e).norm() / e.norm()) for g, e in zip(grads, exact, strict=True))
        assert check.errors[name] == pytest.approx(by_hand, rel=1e-6)


def test_following_the_advice_mends_the_gradient():
    check = dil.check_gradient(argmin_layer(solver=dil.LBFGS(rtol=0.1)), X)
    rtol = float(check.advice.split(" to ")[1].split(",")[0])
    assert dil.check_gradient(argmin_layer(solver=dil.LBFGS(rtol=rtol)), X).ok


def test_of_two_layers_the_bad_one_is_named():
    model = nn.Sequential(argmin_layer(), nn.Linear(3, 5).double(), argmin_layer(linear_solver=dil.CG(max_steps=1)))
    assert dil.check_gradient(model, X).blame == "backward solve 2"
    model = nn.Sequential(argmin_layer(solver=dil.GradientDescent(max_steps=2)), nn.Linear(3, 5).double(), argmin_layer())
    check = dil.check_gradient(model, X)
    assert check.blame == "forward solve 1"
    assert {row[0] for row in check.tensors[1:]} >= {"input 0", "1.weight", "0.function.net.bias"}


def test_a_layer_inside_a_layer_is_part_of_its_function():
    def outer(y, a):
        inner = dil.root(lambda z: z**3 + z - a, ZERO).value
        return (y - inner) ** 2 + 0.1 * y**4

    check = dil.check_gradient(lambda a: dil.argmin(outer, ZERO + 1, (a,)), ZERO + 1.5)
    assert check.ok
    assert [row[0] for row in check.suspects[1:]] == ["function", "forward solve", "backward solve"]


def test_parameters_are_left_as_they_were():
    layer = argmin_layer(solver=dil.GradientDescent(max_steps=3))
    before = copy.deepcopy(layer.state_dict())
    x = X.clone()
    dil.check_gradient(layer, x)
    assert all(torch.equal(before[name], value) for name, value in layer.state_dict().items())
    assert torch.equal(x, X) and not x.requires_grad
    assert all(p.grad is None for p in layer.parameters())


def test_tensors_of_a_closure_are_checked_though_their_gradient_is_cut():
    theta = real(1.0, 2.0).requires_grad_()
    check = dil.check_gradient(lambda: dil.argmin(lambda y: ((y - theta.detach()) ** 2).sum(), torch.zeros_like(theta)))
    assert check.blame == "function" and check.tensors[1][0] == "captured 0"


def test_the_seed_makes_it_repeatable():
    layer = argmin_layer()
    assert str(dil.check_gradient(layer, X)) == str(dil.check_gradient(layer, X))
    assert str(dil.check_gradient(layer, X)) != str(dil.check_gradient(layer, X, seed=1))


def test_the_allowed_error_is_the_users():
    layer = argmin_layer(solver=dil.GradientDescent(rtol=1e-4))
    error = dil.check_gradient(layer, X).error
    assert dil.check_gradient(layer, X, rtol=2 * error).ok
    assert not dil.check_gradient(layer, X, rtol=error / 2).ok


def test_single_precision():
    energy = Energy().float()
    assert dil.check_gradient(dil.ArgminLayer(energy, init=(3,)), X.float()).ok
    bad = dil.ArgminLayer(energy, init=(3,), linear_solver=dil.CG(damping=1.0))
    assert dil.check_gradient(bad, X.float()).blame == "backward solve"


def test_bad_input():
    with pytest.raises(TypeError, match="layer_or_fn must be a module or a function, got int"):
        dil.check_gradient(3)
    with pytest.raises(TypeError, match="must return a floating-point tensor or a Solution, got int"):
        dil.check_gradient(lambda x: 3, X)
    with pytest.raises(ValueError, match="inputs must hold a floating-point tensor"):
        dil.check_gradient(lambda n: torch.ones(n), 3)
