"""The first hour: what people get wrong ends in the right answer, or in one sentence that says what to do.

`STOPS` raise, `WARNS` go on and say what is wrong, and the rest are no mistakes here though they may be elsewhere. Bad values
of single arguments are in test_errors.py and test_ode_errors.py.
"""

import copy
import pickle
import re
import traceback
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist
from problems import problems
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchdil as dil

F64 = torch.float64
X = torch.tensor([[1.5, -0.3, -2.2], [0.6, -1.1, -1.4], [0.4, 0.8, -0.7], [-0.4, -0.6, 0.2]], dtype=F64)
Y0 = torch.zeros_like(X)
T = torch.linspace(0, 1, 5, dtype=F64)


def score(y, x):
    return ((y - x) ** 2 + torch.cosh(y)).sum(-1)


def slope(y):
    """dy/dx at the minimum of `score`."""
    return 2 / (2 + torch.cosh(y))


def argmin(function=score, y0=Y0, args=(X,), **settings):
    return dil.argmin(function, y0, args, **settings)


def solved():
    return argmin()


def leaf(a=X):
    return a.clone().requires_grad_()


def decay(t, y):
    return -y


class Energy(nn.Module):
    """`score` with a learned target."""

    def __init__(self, dtype=torch.float32, *more):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 3, dtype=dtype), *more)
        self.unused = nn.Parameter(torch.ones(2, dtype=dtype))

    def forward(self, y, x):
        return score(y, self.net(x))


def changes_y(y, x):
    y -= x
    return (y**2).sum(-1)


def calls_backward(y, x):
    value = score(y, WEIGHT * x)
    value.sum().backward()
    return value


def residual_calls_backward(y, x):
    score(y, WEIGHT * x).sum().backward()
    return y - WEIGHT * x


def prints_only(y, x):
    print(score(y, x))


WEIGHT = torch.ones(3, dtype=F64, requires_grad=True)
VALUE = r"its \.value"

# id: (call, error, what the sentence must say)
STOPS = {
    # .value forgotten
    "a method of the solution": (lambda: solved().sum(), AttributeError, r"write \.value\.sum"),
    "backward of the solution": (lambda: solved().backward(), AttributeError, r"write \.value\.backward"),
    "the shape of the solution": (lambda: solved().shape, AttributeError, r"write \.value\.shape"),
    "the solution plus one": (lambda: solved() + 1, TypeError, VALUE),
    "a tensor minus the solution": (lambda: X - solved(), TypeError, VALUE),
    "the solution in a function": (lambda: torch.relu(solved()), TypeError, f"relu needs a tensor.*{VALUE}"),
    "the solution in a layer": (lambda: nn.Linear(3, 1)(solved()), TypeError, f"linear needs a tensor.*{VALUE}"),
    "the solution in a loss": (lambda: nn.functional.mse_loss(solved(), X), TypeError, f"mse_loss needs.*{VALUE}"),
    "a part of the solution": (lambda: solved()[0], TypeError, VALUE),
    "the solution unpacked": (lambda: (lambda y, info: y)(*solved()), TypeError, VALUE),
    "the solution compared": (lambda: solved() == 0, TypeError, VALUE),
    "the solution in numpy": (lambda: np.asarray(solved()), TypeError, VALUE),
    "the solution made a tensor": (lambda: torch.tensor(solved()), TypeError, VALUE),
    "the solution as a number": (lambda: float(solved()), TypeError, VALUE),
    # the score
    "a column for each sample": (lambda: argmin(lambda y, x: score(y, x)[:, None]), ValueError, r"\(B,\).*got \(4, 1\)"),
    "a number of Python": (lambda: argmin(lambda y, x: score(y, x).sum().item()), TypeError, "floating-point tensor.*float"),
    "nothing returned": (lambda: argmin(prints_only), TypeError, "score must return.*NoneType"),
    "a score with its parts": (lambda: argmin(lambda y, x: (score(y, x), y)), TypeError, "score must return.*tuple"),
    "y changed in place": (lambda: argmin(changes_y), RuntimeError, r"score must not change y in place: .*y\.clone\(\)"),
    "y changed in place in a root": (lambda: dil.root(torch.Tensor.neg_, Y0), RuntimeError, "residual must not change y"),
    "y changed in place in an ODE": (lambda: dil.odeint(lambda t, y: y.neg_(), Y0, T), RuntimeError, "func must not change y"),
    "backward in the score": (lambda: argmin(calls_backward), RuntimeError, r"score must not call \.backward\(\)"),
    "backward in a root": (
        lambda: dil.root(residual_calls_backward, Y0, (X,)),
        RuntimeError,
        r"residual must not call \.backward\(\).*torch\.autograd\.grad",
    ),
    "numpy in the score": (
        lambda: argmin(lambda y, x: torch.tensor(((y.detach().numpy() - x.numpy()) ** 2).sum(-1))),
        ValueError,
        r"depend on y differentiably.*no detach\(\), item\(\) or numpy",
    ),
    "steps in the score": (lambda: argmin(lambda y, x: (y > x).double().sum(-1)), ValueError, "depend on y differentiably"),
    "a class in place of a network": (
        lambda: dil.NeuralODE(nn.Tanh),
        TypeError,
        r"field must be callable as field\(t, y\), got the class Tanh: make one of it first",
    ),
    "a class in place of dynamics": (
        lambda: dil.control.MPC(nn.Linear, score, 3, 3),
        TypeError,
        "dynamics .* the class Linear",
    ),
    "a network that takes no time": (
        lambda: dil.odeint(nn.Linear(3, 3).double(), Y0, T),
        TypeError,
        r"it takes \(input.*wrap it, lambda t, y: func\(y\)",
    ),
    "a list of rates": (
        lambda: dil.odeint(lambda t, y: [y, y], Y0, T),
        TypeError,
        "got list: make one tensor of it by torch.stack",
    ),
    "Picard for an argmin": (
        lambda: argmin(solver=dil.Picard()),
        ValueError,
        r"Picard\(\) finds fixed points and roots: use Newton",
    ),
    "planning in half precision": (
        lambda: dil.control.MPC(lambda x, u: x + u, lambda x, u: x.sum(-1), 3, 3)(X.half()),
        TypeError,
        r"x_obs must be float32 or float64.*x_obs\.float\(\)",
    ),
    "x forgotten": (lambda: argmin(args=()), TypeError, r"callable as score\(y\): missing a required argument: 'x'"),
    "x without a tuple": (lambda: argmin(args=X), TypeError, r"write args=\(x,\)"),
    "two inputs of a layer": (
        lambda: dil.ArgminLayer(lambda y, a, b: score(y, a + b), init=(3,))((X, X)),
        TypeError,
        r"callable as score\(y, args\[0\]\): missing a required argument: 'b'",
    ),
    "no input of a layer": (lambda: dil.ArgminLayer(score, init=(3,))(), TypeError, "missing a required argument: 'x'"),
    # y0
    "a list of numbers": (lambda: argmin(y0=[0.0, 0.0]), TypeError, "y0 must be a tensor.*got list of float: use torch.tensor"),
    "a shape": (lambda: argmin(y0=(4, 3)), TypeError, "y0 must be a tensor.*int"),
    "integers": (lambda: argmin(y0=torch.zeros(4, 3, dtype=torch.long)), TypeError, r"y0\.double\(\)"),
    "complex numbers": (lambda: argmin(y0=Y0 + 0j), TypeError, "torch.view_as_real"),
    "one start for all": (
        lambda: argmin(y0=Y0[:1]),
        ValueError,
        r"B the first axis of y0, got \(4,\) for y0 of shape \(1, 3\)",
    ),
    "a start of another dtype": (
        lambda: dil.root(lambda y, x: y - x, Y0.float(), (X,)),
        TypeError,
        "dtype of y, torch.float32",
    ),
    "a start on another device": (lambda: argmin(y0=Y0.to("meta")), ValueError, "args must be on the device of y0"),
    "init as a number": (lambda: dil.ArgminLayer(score, init=3), TypeError, r"init must be the shape .*such as \(3,\).*got 3"),
    "init as a tensor": (
        lambda: dil.ArgminLayer(score, init=Y0),
        TypeError,
        r"init must be the shape .*tensor of shape \(4, 3\)",
    ),
    "init with the batch": (lambda: dil.ArgminLayer(score, init=(4, 3))(X), ValueError, r"y0 of shape \(4, 4, 3\)"),
    # the solver
    "a solver by name": (lambda: argmin(solver="newton"), TypeError, r"such as Newton\(\).*'newton'"),
    "a solver's class": (lambda: argmin(solver=dil.Newton), TypeError, r"such as Newton\(\).*class"),
    "an optimiser's class": (lambda: argmin(solver=torch.optim.Adam), TypeError, "torchdil solver"),
    "an optimiser by name": (lambda: dil.TorchOptim("adam"), TypeError, "optimiser class such as torch.optim.Adam"),
    "a solver that returns numpy": (lambda: argmin(solver=lambda f, y: y.numpy()), TypeError, "tensors.*ndarray"),
    "a solver that returns more": (lambda: argmin(solver=lambda f, y: (y, 3)), TypeError, "structure of y0, got tuple"),
    "a solver with other arguments": (lambda: argmin(solver=lambda f, y, x: y), TypeError, r"callable as solver\(fn, y0\)"),
    "a policy misspelt": (lambda: argmin(on_failure="warning"), ValueError, "on_failure must be one of.*'warning'"),
    # roots and fixed points
    "fewer equations than unknowns": (
        lambda: dil.root(lambda y: y[:1], torch.ones(3)),
        ValueError,
        r"shape of y, \(3,\), got \(1,\)",
    ),
    "one equation for many unknowns": (lambda: dil.root(lambda y: y.sum(), torch.ones(3)), ValueError, r"\(3,\), got \(\)"),
    "a map to another size": (
        lambda: dil.fixed_point(nn.Linear(3, 2), torch.ones(5, 3)),
        ValueError,
        r"\(5, 3\), got \(5, 2\)",
    ),
    # ODEs
    "the time second": (lambda: dil.odeint(lambda y, t: -X * y, Y0, T), TypeError, r"called as func\(t, y\).*\(y, t\).*order"),
    "a field without time": (lambda: dil.odeint(lambda y: -y, Y0, T), TypeError, r"callable as func\(t, y\)"),
    "integer times": (lambda: dil.odeint(decay, Y0, torch.arange(3)), TypeError, r"t must have a floating dtype.*t\.to"),
    "times in a list": (lambda: dil.odeint(decay, Y0, [0.0, 1.0]), TypeError, "torch.linspace"),
    "times that turn": (lambda: dil.odeint(decay, Y0, T[[0, 2, 1]]), ValueError, "strictly increasing"),
    "torchdiffeq's default method": (lambda: dil.odeint(decay, Y0, T, method="dopri5"), ValueError, '"kvaerno5"'),
    "a field that returns a list": (lambda: dil.odeint(lambda t, y: [-y], Y0, T), TypeError, "structure of y, got list"),
    "the ODE's state in half": (lambda: dil.odeint(decay, Y0.half(), T.half()), TypeError, "float32 or float64"),
    # control
    "a cost for each state": (
        lambda: dil.control.MPC(lambda x, u: x + u, lambda x, u: x**2 + u**2, 3, 3)(X),
        ValueError,
        r"cost must return shape \(4,\).*\(4, 3\)",
    ),
    "a cost for the batch": (
        lambda: dil.control.MPC(lambda x, u: x + u, lambda x, u: (x**2 + u**2).sum(), 3, 3)(X),
        ValueError,
        r"cost must return shape \(4,\).*\(\)",
    ),
    "bounds the wrong way": (
        lambda: dil.control.MPC(lambda x, u: x + u, lambda x, u: x.sum(-1), 3, 3, bounds=(1.0, -1.0))(X),
        ValueError,
        "low < high",
    ),
    "dynamics without controls": (
        lambda: dil.control.MPC(lambda x: x, lambda x, u: x.sum(-1), 3, 3)(X),
        TypeError,
        r"dynamics must be callable as dynamics\(x, u\): too many",
    ),
    "a terminal cost of the control": (
        lambda: dil.control.MPC(lambda x, u: x + u, lambda x, u: x.sum(-1), 3, 3, terminal=lambda x, u: x.sum(-1))(X),
        TypeError,
        r"terminal must be callable as terminal\(x\): missing",
    ),
    "a setting in quotes": (lambda: dil.CG(damping="1e-3"), ValueError, "damping must be a number >= 0, got '1e-3'"),
    "a network as the field": (
        lambda: dil.NeuralODE(nn.Sequential(nn.Linear(3, 3)))(X, T),
        TypeError,
        r"func\(t, y\): too many",
    ),
    # check_gradient
    "a tensor to check": (lambda: dil.check_gradient(argmin(args=(leaf(),)).value), TypeError, "module or a function"),
}


@pytest.mark.parametrize("name", STOPS)
def test_stops(name):
    call, error, words = STOPS[name]
    WEIGHT.grad = None
    with pytest.raises(error) as caught:
        call()
    text = str(caught.value)
    assert re.search(words, text), text
    assert "\n" not in text and text.endswith(".") and ". " not in text, "one sentence"


def changing(noise):
    return lambda y, x: score(y, noise(x))


def mixes(y, x):
    return y**3 + y - torch.sin(y.mean(0)) - x


def kinked(y, x):
    return (torch.relu(y) + torch.relu(-y) + 0.05 * (y - x) ** 2).sum(-1)


# id: (call, what the warning must say)
def lasso_of_groups(y, x):
    """The minimum is y = x, and the gradient next to it is as long as anywhere."""
    return (y - x).norm(dim=-1) + 0.1 * ((y - x) ** 2 + torch.cosh(y)).sum(-1)


def cost_of_control(x, u):
    return ((x - 1) ** 2).sum(-1) + (u**2).sum(-1)


WARNS = {
    "maximising": (lambda: argmin(lambda y, x: -score(y, x)), "score falls without end.*check its sign"),
    "maximising by LBFGS": (lambda: argmin(lambda y, x: -((y - x) ** 2).sum(-1), solver=dil.LBFGS()), "falls without end"),
    "maximising from the maximum": (
        lambda: argmin(lambda y, x: -((y - x) ** 2).sum(-1), X.clone()),
        "maximum or a saddle.*minimise its negative",
    ),
    "a linear score": (lambda: argmin(lambda y, x: (x * y).sum(-1)), "falls without end"),
    "a cost that falls": (
        lambda: dil.control.MPC(lambda x, u: x + u, lambda x, u: -(x**2).sum(-1), 3, 3)(X),
        "cost falls without end",
    ),
    "dropout": (lambda: argmin(changing(nn.Dropout(0.5))), r"another value each time.*dropout off with \.eval\(\)"),
    "noise": (lambda: argmin(changing(lambda x: x + torch.randn_like(x))), "draw the noise outside"),
    "dropout in a fixed point": (
        lambda: dil.fixed_point(lambda y, x: 0.3 * nn.functional.dropout(y) + x, Y0, (X,), batch_dims=1),
        "g gives another value each time",
    ),
    "batch normalisation": (
        lambda: argmin(lambda y, x: score(y, x) + 0.1 * nn.functional.batch_norm(y, None, None, training=True).pow(3).sum(-1)),
        r"score mixes samples.*shape \(\).*\.eval\(\)",
    ),
    "samples mixed in a root": (lambda: dil.root(mixes, Y0, (X,), batch_dims=1), "residual mixes samples.*batch_dims=0"),
    "samples mixed in an ODE": (
        lambda: dil.odeint(lambda t, y: -(y**3) + 9 * y.mean(0).sin(), X, 2 * T[::2], batch_dims=1),
        "func mixes samples.*batch_dims=0",
    ),
    "a kink": (lambda: argmin(kinked), r"jumps at the answer.*\(relu, abs, max\)"),
    "a way without gradient": (
        lambda: argmin(lambda y, x: ((y - x) ** 2 + y.detach() * y).sum(-1)),
        r"the derivative of score is not its slope: use no detach\(\)",
    ),
    "item() on the way": (
        lambda: argmin(lambda y, x: ((y - x) ** 2).sum() + y[0, 0].item() * y[0, 0]),
        r"is not its slope.*item\(\)",
    ),
    "no root": (lambda: dil.root(lambda y: y**2 + 1, torch.ones(3, dtype=F64)), "there may be no root"),
    "a map that expands": (
        lambda: dil.fixed_point(lambda y: 2 * y + 1, torch.ones(3)),
        r"does not contract: use solver=Anderson",
    ),
    "a map that swings": (lambda: dil.fixed_point(lambda y: 1 - y, torch.zeros(3)), "does not contract"),
    "NaN in x": (
        lambda: argmin(args=(torch.where(X > 1, torch.nan, X),)),
        r"for 1 of 4 samples.*args\[0\] holds NaN or infinity \(sample",
    ),
    "a kink, and too few steps": (
        lambda: dil.argmin(lambda y: ((y - X) ** 2).sum() + y.abs().sum(), Y0 + 1.0, solver=dil.GradientDescent(max_steps=200)),
        "jumps at the answer: smooth what makes it",
    ),
    "a minimum at the kink of a norm": (
        lambda: dil.argmin(lasso_of_groups, Y0, (0.3 * X,)),
        "for 4 of 4 samples.*smooth what makes it",
    ),
    "a number of y in a root": (
        lambda: dil.root(lambda y: y - 0.5 * y.detach().sum() - X, Y0),
        "derivative of residual is not its slope",
    ),
    "numpy in dynamics": (
        lambda: dil.control.MPC(lambda x, u: torch.as_tensor(0.9 * x.detach().cpu().numpy()).to(u) + u, cost_of_control, 5, 3)(
            X
        ),
        "derivative of cost or dynamics is not its slope",
    ),
    "NaN in y0": (lambda: argmin(y0=Y0 * torch.nan), "y0 holds NaN"),
    "a start where the score is not finite": (
        lambda: argmin(lambda y, x: (y - x - torch.log(y)).sum(-1)),
        "score or its derivative is not finite at y0",
    ),
    "a tolerance beyond float32": (
        lambda: argmin(y0=Y0.float(), args=(X.float(),), solver=dil.Newton(rtol=1e-12)),
        "loosen rtol, use float64",
    ),
    "an answer that is none": (
        lambda: dil.attach(lambda y: y**2 - 2, torch.tensor(1.4, dtype=F64)),
        "does not solve the problem",
    ),
    "y0 that requires grad": (
        lambda: argmin(y0=leaf(Y0)),
        "y0 requires grad, but y does not depend on where the solver starts",
    ),
    "x detached": (lambda: argmin(changing(torch.detach), args=(leaf(),)), r"no gradient: score was given.*detach\(\)"),
    "x detached in a layer": (
        lambda: dil.RootLayer(lambda y, x: y**3 + y - x.data, init=(3,))(leaf()),
        "no gradient: residual was given",
    ),
}


@pytest.mark.parametrize("name", WARNS)
def test_warns(name):
    call, words = WARNS[name]
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    assert len(caught) == 1 and caught[0].filename == __file__
    assert re.search(words, str(caught[0].message)), str(caught[0].message)


def test_causes_are_found_whatever_the_default_device():
    tensors = Y0.cpu(), X.cpu()
    before = torch.get_default_device()
    torch.set_default_device("meta")
    try:
        with pytest.warns(dil.ConvergenceWarning, match="falls without end"):
            dil.argmin(lambda y, x: -((y - x) ** 2).sum(-1), tensors[0], (tensors[1],))
    finally:
        torch.set_default_device(before)


@pytest.mark.parametrize("policy", ["ignore", "zero", "nan"])
def test_nothing_is_looked_for_where_nobody_would_hear(policy):
    calls = []
    solution = dil.argmin(lambda y: calls.append(1) or -(y**2).sum(), Y0[0] + 1, on_failure=policy)
    assert solution.stats.diagnosis == "" and solution.stats.products == len(calls) - 1


def hasty(fn, y0):
    """A solver that gives up after half a step."""
    return torch.utils._pytree.tree_map(lambda t: t + 0.01 * (1 + t.abs()), y0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_no_cause_is_made_up(dtype):
    """Sound functions, solved badly: whatever the status, the function is not to blame."""
    for problem in problems(dtype):
        for solver in (hasty, dil.Newton(max_steps=1), dil.Newton(rtol=1e-30)):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                solution = problem.solve(problem.params, solver=solver)
            assert solution.stats.diagnosis == "", (problem.name, solver)


# --- what is right ----------------------------------------------------------------------------------------------------------


def test_the_mean_over_the_batch_is_one_problem_with_the_same_answer():
    x = leaf()
    y = argmin(lambda y, x: score(y, x).mean(), args=(x,)).value
    y.sum().backward()
    assert torch.allclose(y, argmin().value, atol=1e-9) and torch.allclose(x.grad, slope(y), atol=1e-8)


def test_a_start_that_requires_grad_is_not_changed_and_gets_no_gradient():
    start, x = nn.Parameter(Y0.clone()), leaf()
    argmin(y0=start, args=(x,)).value.sum().backward()
    assert start.grad is None and torch.equal(start, Y0) and x.grad is not None


def test_a_start_is_never_changed_even_by_a_function_that_is_refused():
    start = Y0.clone()
    with pytest.raises(RuntimeError, match="in place"):
        argmin(changes_y, start)
    assert torch.equal(start, Y0)


def test_integers_are_fine_as_data():
    labels = torch.tensor([[1, 2], [3, 4]])
    y = dil.ArgminLayer(lambda y, x: ((y - x) ** 2).sum(-1), init=(2,))(labels)
    assert y.dtype == torch.get_default_dtype() and torch.allclose(y, labels.to(y.dtype))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_grad_the_answer_is_the_same_and_has_none(mode):
    layer = dil.ArgminLayer(score, init=(3,))
    with mode():
        y = layer(leaf())
    assert not y.requires_grad and torch.equal(y, layer(X))
    with pytest.raises(RuntimeError, match="does not require grad"):  # torch's own words, as for any layer
        y.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_model_in_half_precision(dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), dil.ArgminLayer(Energy(), init=(3,)))
    exact = copy.deepcopy(model)(X.float())
    y = model.to(dtype)(X.to(dtype))
    y.float().sum().backward()
    assert y.dtype == dtype and (y.float() - exact).abs().max() < 0.05
    assert all(bool(p.grad.isfinite().all()) for name, p in model.named_parameters() if "unused" not in name)


def test_a_kink_that_is_not_at_the_answer_is_no_matter():
    x = leaf()
    y = argmin(lambda y, x: ((y - x) ** 2 + 0.5 * torch.relu(y) ** 2).sum(-1), args=(x,)).value
    y.sum().backward()
    assert torch.allclose(x.grad, torch.where(X > 0, 2 / 3, 1.0).to(X))


def test_a_compiled_score():
    x = leaf()
    y = argmin(torch.compile(score, backend="eager"), args=(x,)).value
    y.sum().backward()
    assert torch.allclose(x.grad, slope(y))


def test_functions_made_in_a_loop_keep_their_own_values():
    shifts = [torch.tensor(k, dtype=F64, requires_grad=True) for k in (1.0, 2.0, 3.0)]
    scores = [lambda y, a=a: score(y, a) for a in shifts]
    for a, function in zip(shifts, scores, strict=True):
        y = dil.argmin(function, torch.zeros(1, dtype=F64)).value
        y.backward()
        assert float(a.grad) == pytest.approx(float(slope(y.detach())), rel=1e-9)


@pytest.mark.parametrize("kind", ["argmin", "root", "ode"])
def test_parameters_changed_before_the_backward_pass(kind):
    """As torch does for its own layers: an error, and no wrong gradient."""
    weight, x = nn.Parameter(torch.eye(3, dtype=F64) + 0.1), X
    calls = {
        "argmin": lambda: dil.ArgminLayer(lambda y, x: score(y @ weight, x), init=(3,))(x),
        "root": lambda: dil.RootLayer(lambda y, x: y**3 + y @ weight - x, init=(3,))(x),
        "ode": lambda: dil.odeint(lambda t, y: torch.sin(y @ weight), x, T, batch_dims=1),
    }
    loss = calls[kind]().square().sum()
    weight.grad = torch.ones_like(weight)
    torch.optim.SGD([weight], lr=0.1).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_an_answer_changed_in_place():
    """Right if nobody needs the old value; else torch's error, and no wrong gradient."""
    y = argmin(args=(leaf(),)).value
    loss = (y**2).sum()
    y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_backward_twice():
    loss = argmin(args=(leaf(),)).value.square().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    with pytest.raises(RuntimeError, match="retain_graph=True"):  # torch's own words, as for any layer
        loss.backward()


def test_dropout_of_the_input_in_eval_mode():
    torch.manual_seed(0)
    layer = dil.ArgminLayer(Energy(F64, nn.Dropout(0.5)), init=(3,)).eval()
    layer(X).sum().backward()
    assert bool(layer.report.forward.converged.all()) and bool(layer.report.backward.converged.all())


def test_conjugate_gradients_where_the_jacobian_is_not_symmetric():
    A = torch.tensor([[3.0, 1.0, 0.0], [-1.0, 2.0, 0.5], [0.0, 1.0, 4.0]], dtype=F64)
    x = leaf()
    solution = dil.root(lambda y, x: y @ A - x, Y0, (x,), batch_dims=1, linear_solver=dil.CG())
    solution.value.sum().backward()
    assert torch.allclose(x.grad, torch.linalg.inv(A).sum(1).expand(4, 3))
    assert solution.report.backward.stats.method == "CG on the normal equations"


def test_an_empty_batch():
    x = leaf(X[:0])
    y = dil.ArgminLayer(score, init=(3,))(x)
    y.sum().backward()
    assert y.shape == x.grad.shape == (0, 3)


def test_layers_are_copied_saved_and_moved_like_any_module():
    torch.manual_seed(0)
    layer = dil.ArgminLayer(Energy(), init=(3,))
    y = layer(X.float())
    y.sum().backward()
    same = [copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), dil.ArgminLayer(Energy(), init=(3,))]
    same[2].load_state_dict(layer.state_dict())
    assert set(layer.state_dict()) == {"function.net.0.weight", "function.net.0.bias", "function.unused"}
    assert all(torch.equal(one(X.float()), y) and one.report is not layer.report for one in same)
    assert layer.to(F64)(X).dtype == F64 and torch.allclose(layer(X), y.double(), atol=1e-5)


def test_data_parallel_without_a_gpu():
    layer = dil.ArgminLayer(score, init=(3,))
    assert torch.equal(nn.DataParallel(layer)(X), layer(X))


def test_an_unused_parameter_under_ddp(tmp_path):
    """As for any module: torch says that find_unused_parameters is needed, and with it all is right."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        torch.manual_seed(0)
        alone = dil.ArgminLayer(Energy(F64), init=(3,))
        model = DistributedDataParallel(copy.deepcopy(alone), find_unused_parameters=True)
        strict = DistributedDataParallel(copy.deepcopy(alone))
        for module in (alone, model, model, strict):
            module.zero_grad()
            module(X).square().sum().backward()
        with pytest.raises(RuntimeError, match="find_unused_parameters=True"):
            strict(X)
        for mine, theirs in zip(alone.parameters(), model.module.parameters(), strict=True):
            assert (mine.grad is None) == (theirs.grad is None)
            assert mine.grad is None or torch.allclose(mine.grad, theirs.grad)
    finally:
        dist.destroy_process_group()


def test_a_loss_on_a_detached_value_is_torchs_own_error():
    with pytest.raises(RuntimeError, match="does not require grad"):
        argmin(args=(leaf(),)).value.detach().sum().backward()


def test_a_gradient_that_is_cut_off_on_one_of_two_ways_is_found_by_the_check():
    """The value is that of a root, so no solve can fail; the derivative is not that of the function."""
    check = dil.check_gradient(lambda a: dil.root(lambda y, a: y - a + 0.1 * y.detach() * y, Y0[0], (a,)), leaf(X[0].abs()))
    assert not check.ok and check.blame == "function" and "detach()" in check.advice


def test_errors_inside_the_function_are_the_users_own_with_a_note_of_what_it_was_given():
    with pytest.raises(RuntimeError, match="The size of tensor a") as caught:
        argmin(y0=torch.zeros(5, 3, dtype=F64))
    assert caught.value.__notes__ == [
        f"This was the first call of score, with y and then args of: (5, 3) float64 {X.device}, (4, 3) float64 {X.device}."
    ]
    assert "This was the first call of score" in "".join(traceback.format_exception(caught.value))
    layer = dil.ArgminLayer(Energy(), init=(3,))
    with pytest.raises(RuntimeError, match="must have the same dtype") as caught:
        layer(X)
    assert "float64" in caught.value.__notes__[0]


def test_a_solution_is_printed_with_its_report_and_is_an_ordinary_object():
    solution = solved()
    assert str(solution) == f"Solution: value\n{solution.value}\n{solution.report}"
    assert solution == solution and solution != solved() and bool(solution) and {solution: 1}[solution] == 1
    other = pickle.loads(pickle.dumps(copy.deepcopy(solution)))
    assert torch.equal(other.value, solution.value)
    assert not hasattr(solution, "no_such_name")
    with pytest.raises(AttributeError, match="'Solution' object has no attribute 'no_such_name'"):
        _ = solution.no_such_name
