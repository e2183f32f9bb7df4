"""`check_gradient`: it passes what is right, and names the fault that was planted."""

import copy
import re

import pytest
import torch
from problems import PROBLEMS
from torch import nn

import torchdil as dil
from experiments.faults import Energy, argmin_layer, draw, faults, stops_early

# Of a right gradient: solves to 1e-10, times the condition numbers of the problems; some derivatives are zero.
RIGHT = 1e-5

X = draw(4, 5)
ZERO = torch.zeros((), dtype=torch.float64)

# What the advice must say.
ADVICE = {
    "few steps": "raise max_steps of GradientDescent, now 3",
    "loose rtol": "tighten rtol of LBFGS from 1e-01 to ",
    "few steps of Picard": "raise max_steps of Picard, now 5",
    "a solver that stops early": r"let the solver \(stops_early\) run on",
    "no solution attached": "refine y_star",
    "one step of CG": "raise max_steps of CG, now 1",
    "loose CG": "tighten rtol of CG from 5e-01 to ",
    "loose GMRES": "tighten rtol of GMRES from 3e-01 to ",
    "damping": "lower damping of CG, now 5e-01",
    "no Jacobian": "JacobianFree approximates on purpose",
    "three terms": "Neumann approximates on purpose",
    "a kink of the score": "replace what is not smooth",
    "a kink of the residual": "replace what is not smooth",
    "detach": r"detach\(\)",
    "item": r"\.item\(\)",
    "a wrong backward": "autograd.Function with a wrong backward",
    "dropout": r"eval\(\)",
    "a wrong backward outside": "autograd.Function with a wrong backward",
}
FAULTS = faults()


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named(name):
    layer, inputs, blame = FAULTS[name]
    check = dil.check_gradient(layer, *inputs)
    assert not check.ok
    assert check.blame == blame
    assert check.error > check.rtol and check.errors[blame] == max(check.errors.values())
    assert re.search(ADVICE[name], check.advice), check.advice
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

    weights = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
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
    theta = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
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
