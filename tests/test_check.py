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
    assert check.error > check.rtol
    if name != "dropout":  # which spoils every part
        assert check.errors[blame] == max(check.errors.values())
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
    [
        dil.Newton(),
        dil.Newton(linear_solver=dil.CG()),
        dil.GradientDescent(),
        dil.GradientDescent(nesterov=True),
        dil.LBFGS(),
        stops_early,
    ],
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


@pytest.mark.parametrize(
    ("settings", "blame", "advice"),
    [
        ({"solver": dil.GradientDescent(atol=0.3)}, "forward solve", "lower atol of GradientDescent from 3e-01 to "),
        ({"linear_solver": dil.CG(atol=0.3)}, "backward solve", "lower atol of CG from 3e-01 to "),
    ],
)
def test_the_tolerance_that_was_met_is_the_one_to_change(settings, blame, advice):
    check = dil.check_gradient(argmin_layer(**settings), X)
    assert check.blame == blame and advice in check.advice
    atol = float(check.advice.split(" to ")[1].split(",")[0])
    (part,) = settings
    mended = dil.check_gradient(argmin_layer(**{part: type(settings[part])(atol=0.5 * atol)}), X)
    assert mended.errors[blame] < mended.rtol


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
    assert check.blame == "function" and check.tensors[1][0] == "theta"


def test_tensors_of_a_closure_have_their_names():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Tanh()).double()
    ones = [torch.ones(2, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    scales = {"first": ones[0]}

    def energy(y, offset=ones[1]):
        return (model(y) ** 2).sum() + ((y - offset) ** 2 * scales["first"]).sum()

    check = dil.check_gradient(lambda: dil.argmin(energy, torch.zeros(2, dtype=torch.float64)))
    assert check.ok
    names = {row[0] for row in check.tensors[1:]}
    assert names == {"energy.model.0.weight", "energy.model.0.bias", "energy.offset", "energy.scales.first"}


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


def root_of_square_roots(y, x):
    """torch.where hides the value of a square root of a negative number, but not its derivative."""
    return y + y**3 - torch.where(x > 0, torch.sqrt(x), 0 * x)


@pytest.mark.parametrize(
    ("fn", "x"),
    [
        (lambda x: torch.where(x > 0, torch.sqrt(x), 0 * x), draw(3, 3)),
        (lambda x: torch.log(x), -draw(3).abs()),
        (dil.RootLayer(root_of_square_roots, init=(3,)), draw(2, 3)),
    ],
)
def test_what_is_not_finite_is_named(fn, x):
    check = dil.check_gradient(fn, x)
    assert check.blame == "function" and "torch.where" in check.advice


def test_a_long_step_of_the_differences_is_shortened():
    assert dil.check_gradient(torch.sin, ZERO + 1e5).ok


def test_single_precision_with_many_unknowns():
    curvature = torch.logspace(0, 3, 300)
    layer = dil.ArgminLayer(lambda y, x: 0.5 * (curvature * (y - x / curvature) ** 2).sum(-1), init=(300,))
    assert dil.check_gradient(layer, draw(2, 300).float()).ok


def test_solves_under_torch_func_are_not_blamed_on_the_function():
    def one(x):
        solver = dil.GradientDescent(max_steps=1)
        return dil.argmin(
            lambda y, x: ((y - x) ** 2 + torch.cosh(y)).sum(), 0 * x, (x,), solver=solver, on_failure="ignore"
        ).value

    check = dil.check_gradient(torch.vmap(one), draw(4, 3))
    assert check.blame == "function" and "without torch.func" in check.advice


@pytest.mark.parametrize("init", [dil.LastSolution((3,)), (3,)], ids=repr)
def test_a_layer_with_a_memory_is_found_and_left_as_it_was(init):
    layer = dil.ArgminLayer(Energy(), init=init, solver=dil.GradientDescent(max_steps=1), on_failure="ignore")
    fresh = dil.check_gradient(layer, X)
    assert fresh.blame == "forward solve" and layer.report is None
    layer(X)
    report, last = layer.report, layer._last
    dil.check_gradient(layer, X)
    assert layer.report is report and layer._last is last


def test_buffers_and_random_numbers_are_left_as_they_were():
    norm, layer = nn.BatchNorm1d(5, dtype=torch.float64), argmin_layer()
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    dil.check_gradient(nn.Sequential(norm, nn.Dropout(0.1), layer), X)
    assert int(norm.num_batches_tracked) == 0 and bool((norm.running_mean == 0).all())
    assert torch.equal(torch.rand(1), expected)


def test_the_random_numbers_of_a_solver_are_not_those_of_the_function():
    solver = dil.CEM(seed=torch.Generator().manual_seed(0), polish=dil.Newton(), max_steps=3, particles=50)
    assert dil.check_gradient(argmin_layer(solver=solver), X).ok
    alone = dil.CEM(max_steps=3, particles=50)
    assert "a polish" in dil.check_gradient(argmin_layer(solver=alone), X).advice


def test_under_inference_mode():
    layer = argmin_layer()
    with torch.inference_mode():
        assert dil.check_gradient(layer, X.clone()).ok


@pytest.mark.parametrize("policy", ["zero", "nan"])
def test_a_policy_is_part_of_the_gradient(policy):
    layer = argmin_layer(solver=dil.GradientDescent(max_steps=3), on_failure=policy)
    check = dil.check_gradient(layer, X)
    assert check.blame == "forward solve" and check.error >= 1


def test_a_flat_minimum_does_not_fail():
    check = dil.check_gradient(dil.ArgminLayer(lambda y, x: ((y - x) ** 4).sum(-1), init=(2,)), torch.zeros(1, 2).double())
    assert isinstance(str(check), str)


def test_nothing_to_mend_has_no_advice():
    assert dil.check_gradient(argmin_layer(), X).advice == ""


def test_bad_input():
    with pytest.raises(TypeError, match="layer_or_fn must be a module or a function, got int"):
        dil.check_gradient(3)
    with pytest.raises(TypeError, match="must return a floating-point tensor or a Solution, got int"):
        dil.check_gradient(lambda x: 3, X)
    with pytest.raises(ValueError, match="rtol must be a number > 0"):
        dil.check_gradient(argmin_layer(), X, rtol=-1.0)
    with pytest.raises(ValueError, match="at least one number, got empty"):
        dil.check_gradient(argmin_layer(), X[:0])
    with pytest.raises(TypeError, match="to be checked, got torch"):
        dil.check_gradient(lambda x: x**2, X.bfloat16())
    with pytest.raises(ValueError, match="inputs must hold a floating-point tensor"):
        dil.check_gradient(lambda n: torch.ones(n), 3)


def test_of_a_stiff_trajectory_with_adaptive_steps():
    """Hundreds of unknowns, badly conditioned: no solver finds the exact trajectory that does not know its structure."""
    log_rates = torch.tensor([0.04, 3e7, 1e4], dtype=torch.float64).log().requires_grad_()

    def robertson(t, y):
        (a, b, c), (slow, fast, back) = y.unbind(-1), log_rates.exp()
        return torch.stack((back * b * c - slow * a, slow * a - back * b * c - fast * b * b, fast * b * b), dim=-1)

    y0, t = torch.eye(3, dtype=torch.float64)[:1], torch.tensor([0.0, 1e-2, 1.0, 1e2], dtype=torch.float64)
    size = torch.tensor([1.0, 1e-5, 1.0], dtype=torch.float64)
    node = dil.NeuralODE(robertson, method="radauIIA5", rtol=1e-5, atol=1e-9)
    check = dil.check_gradient(lambda: node(y0, t) / size)
    assert check.ok and check.error < 1e-5
    assert not any("no exact solution" in row[2] for row in check.suspects)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("method", "tolerance"), [("trbdf2", 1e-4), ("radauIIA5", 1e-4), ("kvaerno5", 1e-6)])
def test_of_adaptive_steps_that_follow_the_inputs(method, tolerance, seed):
    """The gradient is that on the grid that was chosen, and the differences are made on it, too."""
    torch.manual_seed(seed)
    damping = torch.tensor(20.0, dtype=torch.float64, requires_grad=True)
    node = dil.NeuralODE(lambda t, y: torch.sin(y.flip(-1)) - damping * y, method=method, rtol=tolerance, atol=1e-2 * tolerance)
    check = dil.check_gradient(node, torch.rand(3, 2, dtype=torch.float64), torch.linspace(0, 1, 5, dtype=torch.float64))
    assert check.ok and {"forward solve 1", "forward solve 2", "function"} <= check.errors.keys()
    assert check.errors["function"] < 1e-6


def test_times_that_must_ascend_are_moved_by_parts_of_themselves():
    """A step of the size of the last time would put the first ones out of order."""
    t = torch.cat((torch.zeros(1), torch.logspace(-4, 2, 7))).double()
    node = dil.NeuralODE(lambda t, y: -torch.cosh(t / 100) * y**3, method="sdirk2")
    check = dil.check_gradient(node, draw(3, 2), t)
    assert check.ok and check.error < 1e-6 and not check.unchecked
    name, _, _, difference, _, _ = check.tensors[2]
    assert name == "input 1" and float(difference) != 0

    late = copy.deepcopy(node)
    late.register_forward_hook(lambda module, inputs, y: y + (inputs[1] - inputs[1].detach()).sum())
    check = dil.check_gradient(late, draw(3, 2), t)
    assert check.blame == "function"  # the small steps still see what is wrong


@pytest.mark.parametrize("x", [torch.logspace(-8, 0, 9, dtype=torch.float64), torch.linspace(1, 2, 3, dtype=torch.float64)])
def test_a_function_that_ends_near_its_inputs_is_not_blamed(x):
    check = dil.check_gradient(lambda x: torch.log(x) * x.sqrt(), x)
    assert check.ok and not check.unchecked, str(check)


def test_an_input_that_cannot_be_moved_is_named_in_a_line():
    def whole(x, n):
        if not bool((n == n.round()).all()):
            raise ValueError("n must be whole.\nOr so.")
        return x**3 * n

    check = dil.check_gradient(whole, draw(3), torch.ones(3).double())
    (line,) = check.unchecked
    assert check.ok and line in str(check).splitlines()
    assert line == "input 1 could not be checked, as the function refuses what is next to it: n must be whole."
    assert check.tensors[2][3] == check.tensors[2][5] == "-"

    check = dil.check_gradient(lambda n: whole(n, n), torch.ones(3).double())
    assert check.blame == "function" and "not defined next to its inputs" in str(check)
