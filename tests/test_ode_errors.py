"""Bad input to `odeint` and `NeuralODE`: one sentence that names the argument; and functions that break on the way."""

import re
import warnings

import pytest
import torch
from torch import nn

import torchdil as dil
from torchdil.ode import BackwardEuler, GaussLegendre, RadauIIA

SOLVED = 1e-9

Y = torch.ones(3, 2, dtype=torch.float64)
T = torch.linspace(0, 1, 5, dtype=torch.float64)


def decay(t, y):
    return -y


def odeint(func=decay, y0=Y, t=T, **settings):
    return lambda: dil.odeint(func, y0, t, **settings)


def node(field=decay, *args, **settings):
    return lambda: dil.NeuralODE(field, *args, **settings)


def times(*values, dtype=torch.float64):
    return torch.tensor(values, dtype=dtype)


PAIR = (torch.ones(3, 2), torch.ones(4, 2))

# id: (call, error, the words that the message must begin with, a word that it must hold)
CASES = {
    # t
    "t goes back": (odeint(t=times(0, 1, 0.5)), ValueError, "t must", "increasing"),
    "t stands still": (odeint(t=times(0, 0.5, 0.5, 1)), ValueError, "t must", "strictly"),
    "t of one time": (odeint(t=times(0.0)), ValueError, "t must", "two"),
    "t of no time": (odeint(t=times()), ValueError, "t must", "two"),
    "t without axes": (odeint(t=torch.tensor(1.0)), ValueError, "t must", "1-D"),
    "t with two axes": (odeint(t=T.unsqueeze(1)), ValueError, "t must", "1-D"),
    "t of integers": (odeint(t=torch.arange(3)), TypeError, "t must", "int64"),
    "t complex": (odeint(t=T.to(torch.complex128)), TypeError, "t must", "complex128"),
    "t with NaN": (odeint(t=times(0, torch.nan, 1)), ValueError, "t must", "finite"),
    "t begins with NaN": (odeint(t=times(torch.nan, 1, 2)), ValueError, "t must", "finite"),
    "t infinite": (odeint(t=times(0, 1, torch.inf)), ValueError, "t must", "finite"),
    "t a list": (odeint(t=[0.0, 1.0]), TypeError, "t must", "list"),
    "t None": (odeint(t=None), TypeError, "t must", "NoneType"),
    "t a number": (odeint(t=1.0), TypeError, "t must", "float"),
    "t elsewhere": (odeint(t=T.to("meta")), ValueError, "t must", "meta"),
    # y0
    "y0 of integers": (odeint(y0=torch.ones(3, dtype=torch.long)), TypeError, "y0 must", "int64"),
    "y0 complex": (odeint(y0=torch.ones(3, dtype=torch.complex128)), TypeError, "y0 must", "complex128"),
    "y0 a list of numbers": (odeint(y0=[1.0, 2.0]), TypeError, "y0 must", "float"),
    "y0 None": (odeint(y0=None), TypeError, "y0 must", "NoneType"),
    "y0 empty": (odeint(y0=torch.ones(0)), ValueError, "y0 must", "at least one number"),
    "y0 of two dtypes": (odeint(y0=(Y, Y.float())), TypeError, "y0 must", "float32"),
    "y0 of two batches": (odeint(lambda t, y: y, PAIR, batch_dims=1), ValueError, "y0 must", r"\(4, 2\)"),
    "y0 on meta": (odeint(y0=Y.to("meta")), ValueError, "t must", "meta"),
    "y0 with NaN": (odeint(y0=Y * torch.nan, on_failure="raise"), dil.ConvergenceError, "The forward solve", "non_finite"),
    "too many batch axes": (odeint(batch_dims=3), ValueError, "y0 must", "batch_dims=3"),
    "batch_dims negative": (odeint(batch_dims=-1), ValueError, "batch_dims must", "-1"),
    "batch_dims no integer": (odeint(batch_dims=1.0), ValueError, "batch_dims must", "1.0"),
    # func
    "func is no function": (odeint(func=3), TypeError, "func must", "int"),
    "func without arguments": (odeint(func=lambda: 0), TypeError, "func must", r"func\(t, y\)"),
    "func of y alone": (odeint(func=lambda y: -y), TypeError, "func must", r"func\(t, y\)"),
    "func of three": (odeint(func=lambda t, y, u: -y), TypeError, "func must", r"func\(t, y\)"),
    "func returns None": (odeint(func=lambda t, y: None), TypeError, "func must", "NoneType"),
    "func returns a number": (odeint(func=lambda t, y: 1.0), TypeError, "func must", "float"),
    "func returns another shape": (odeint(func=lambda t, y: y[0]), ValueError, "func must", r"\(3, 2\)"),
    "func returns more": (odeint(func=lambda t, y: y.expand(4, 3, 2)), ValueError, "func must", r"\(4, 3, 2\)"),
    "func returns another dtype": (odeint(func=lambda t, y: y.float()), TypeError, "func must", "float32"),
    "func returns a tuple": (odeint(func=lambda t, y: (y, y)), TypeError, "func must", "tuple"),
    "func returns a tensor for a tuple": (odeint(lambda t, y: y[0], (Y, Y)), TypeError, "func must", "Tensor"),
    "func returns other keys": (odeint(lambda t, y: {"b": y["a"]}, {"a": Y}), TypeError, "func must", "'b'"),
    "func on another device": (odeint(func=lambda t, y: y.to("meta")), ValueError, "func must", "meta"),
    # method, gradient, solvers
    "unknown method": (odeint(method="dopri5"), ValueError, "method must", "'dopri5'"),
    "method a class": (odeint(method=BackwardEuler), TypeError, "method must", r"BackwardEuler\(\)"),
    "method None": (odeint(method=None), TypeError, "method must", "None"),
    "method a number": (odeint(method=4), TypeError, "method must", "4"),
    "no such order of Gauss": (lambda: GaussLegendre(5), ValueError, "order must", "4, 6"),
    "no such order of Radau": (lambda: RadauIIA(4), ValueError, "order must", "3, 5"),
    "unknown gradient": (odeint(gradient="autograd"), ValueError, "gradient must", "'autograd'"),
    "gradient None": (odeint(gradient=None), ValueError, "gradient must", "None"),
    "solver a class": (odeint(solver=dil.Newton), TypeError, "solver must", "Newton"),
    "solver a string": (odeint(solver="newton"), TypeError, "solver must", "'newton'"),
    "linear solver a class": (odeint(linear_solver=dil.CG), TypeError, "linear_solver must", "CG"),
    "linear solver a string": (odeint(linear_solver="cg"), TypeError, "linear_solver must", "'cg'"),
    "linear solver a solver": (odeint(linear_solver=dil.Newton()), TypeError, "linear_solver must", "Newton"),
    "unknown policy": (odeint(on_failure="stop"), ValueError, "on_failure must", "'stop'"),
    "rtol negative": (odeint(rtol=-1e-3), ValueError, "rtol must", "-0.001"),
    "atol negative": (odeint(atol=-1e-3), ValueError, "atol must", "-0.001"),
    "rtol a string": (odeint(rtol="small"), (TypeError, ValueError), "rtol must", "'small'"),
    # options
    "options a list": (odeint(options=[("substeps", 2)]), TypeError, "options must", "list"),
    "unknown option": (odeint(options={"stepsize": 0.1}), ValueError, "options may hold", "'stepsize'"),
    "step_size zero": (odeint(options={"step_size": 0.0}), ValueError, "step_size must", "0.0"),
    "step_size NaN": (odeint(options={"step_size": torch.nan}), ValueError, "step_size must", "nan"),
    "step_size of the wrong sign": (odeint(options={"step_size": -0.1}), ValueError, "step_size must", "sign"),
    "step_size forwards": (odeint(t=T.flip(0), options={"step_size": 0.1}), ValueError, "step_size must", "sign"),
    "step_size a string": (odeint(options={"step_size": "0.1"}), ValueError, "step_size must", "'0.1'"),
    "substeps zero": (odeint(options={"substeps": 0}), ValueError, "substeps must", "0"),
    "substeps no integer": (odeint(options={"substeps": 1.5}), ValueError, "substeps must", "1.5"),
    "both": (odeint(options={"substeps": 2, "step_size": 0.1}), ValueError, "options may hold", "not both"),
    # half precision
    "bfloat16": (odeint(y0=Y.bfloat16(), t=T.bfloat16()), TypeError, "y0 must", "bfloat16"),
    "float16": (odeint(y0=Y.half(), t=T.half()), TypeError, "y0 must", "float16"),
    # the module: when it is made
    "field is no function": (node(3), TypeError, "field must", r"field\(t, y\)"),
    "node of an unknown method": (node(decay, "dopri5"), ValueError, "method must", "'dopri5'"),
    "node of a class": (node(decay, BackwardEuler), TypeError, "method must", r"BackwardEuler\(\)"),
    "node of an unknown gradient": (node(gradient="autograd"), ValueError, "gradient must", "'autograd'"),
    "node of an unknown option": (node(options={"stepsize": 1}), ValueError, "options may hold", "'stepsize'"),
    "node of an unknown policy": (node(on_failure="stop"), ValueError, "on_failure must", "'stop'"),
}


@pytest.mark.parametrize(("call", "error", "beginning", "word"), CASES.values(), ids=CASES)
def test_bad_input_gets_one_sentence(call, error, beginning, word):
    with pytest.raises(error, match=f"^{beginning}.*{word}") as caught:
        call()
    assert "\n" not in str(caught.value) and str(caught.value).endswith((".", "()."))


def test_good_input_passes():
    """What the cases above change one thing of."""
    assert odeint()().shape == (5, 3, 2)
    assert odeint(batch_dims=2)().shape == (5, 3, 2)
    assert odeint(t=T.flip(0), options={"step_size": -0.1})().shape == (5, 3, 2)
    assert odeint(lambda t, y: {"a": -y["a"]}, {"a": Y})()["a"].shape == (5, 3, 2)
    assert node()()(Y, T).shape == (5, 3, 2)


def test_errors_inside_func_are_the_users_own():
    """They pass as they are, from the line that raised them."""

    class OwnError(Exception):
        pass

    def func(t, y):
        raise OwnError("here")

    with pytest.raises(OwnError, match=r"^here$"):
        dil.odeint(func, Y, T)

    def typo(t, y):
        return y.no_such_thing()

    with pytest.raises(AttributeError, match="no_such_thing"):
        dil.odeint(typo, Y, T)

    def wrong_type(t, y):
        return len(3)

    with pytest.raises(TypeError, match="has no len"):
        dil.odeint(wrong_type, Y, T)


def test_errors_on_the_way_are_the_users_own():
    class OwnError(Exception):
        pass

    def func(t, y):
        if float(t) > 0.5:
            raise OwnError("late")
        return -y

    with pytest.raises(OwnError, match=r"^late$"):
        dil.odeint(func, Y, T)


def test_wrong_shape_on_the_way():
    with pytest.raises((ValueError, RuntimeError), match=r"shape|size"):
        dil.odeint(lambda t, y: -y if float(t) < 0.5 else -y[:2], Y, T)


# --- NaN --------------------------------------------------------------------------------------------------------------------


def broken(when):
    """y' = -y for the first and last of three samples; NaN for the second, from the time `when` on."""
    mask = torch.tensor([[0.0], [1.0], [0.0]], dtype=torch.float64)

    def func(t, y):
        return -y + torch.where((mask > 0) & (t >= when), torch.nan, 0.0)

    return func


def poisoned(t, y):
    """The same without t."""
    return -y + torch.tensor([[0.0], [torch.nan], [0.0]], dtype=torch.float64)


FUNCTIONS = {"at the start": broken(0.0), "later": broken(0.6), "without t": poisoned}
each_function = pytest.mark.parametrize("func", FUNCTIONS.values(), ids=FUNCTIONS)
METHODS = ["backward_euler", "trapezoid", "gl4", "rk4"]


@each_function
@pytest.mark.parametrize("method", METHODS)
def test_nan_is_reported_for_its_sample(func, method):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        solution = dil.ode.solve(func, Y, T, method=method, batch_dims=1, on_failure="ignore")
    assert solution.status.tolist() == [dil.Status.converged, dil.Status.non_finite, dil.Status.converged]
    good = dil.odeint(decay, Y, T, method=method, batch_dims=1)
    torch.testing.assert_close(solution.value[:, [0, 2]], good[:, [0, 2]], rtol=SOLVED, atol=SOLVED)


LOST = r"failed for 1 of 3 samples(; worst: non_finite|: y or func is not finite by t = )"


@each_function
def test_nan_warns(func):
    with pytest.warns(
        dil.ConvergenceWarning,
        match="^The forward solve .* " + LOST,
    ):
        dil.odeint(func, Y, T, batch_dims=1)


@each_function
def test_nan_raises(func):
    with pytest.raises(dil.ConvergenceError, match=LOST) as caught:
        dil.odeint(func, Y, T, batch_dims=1, on_failure="raise")
    assert caught.value.report.forward.status.tolist() == [0, dil.Status.non_finite, 0]


@each_function
@pytest.mark.parametrize("policy", ["zero", "nan"])
def test_gradient_of_a_lost_sample_is_as_the_policy_says(func, policy):
    y0 = Y.clone().requires_grad_()
    y = dil.odeint(func, y0, T, batch_dims=1, on_failure=policy)
    (found,) = torch.autograd.grad(y[-1].nansum(), y0)
    expected = torch.full((3, 2), 1.25**-4, dtype=torch.float64)
    expected[1] = 0.0 if policy == "zero" else torch.nan
    torch.testing.assert_close(found, expected, rtol=SOLVED, atol=SOLVED, equal_nan=True)


@pytest.mark.parametrize("policy", ["zero", "nan", "ignore"])
def test_nan_of_one_system(policy):
    solution = dil.ode.solve(broken(0.6), Y, T, on_failure=policy)
    assert solution.status.shape == () and solution.status.item() == dil.Status.non_finite


def test_an_explosion_is_no_answer():
    """y' = y², y(0) = 1 has no solution beyond t = 1: nothing that looks like one is returned in silence."""
    with pytest.warns(dil.ConvergenceWarning):
        solution = dil.ode.solve(lambda t, y: y**2, Y[:1], 3 * T, batch_dims=1)
    assert not bool(solution.converged.any())


# --- the module -------------------------------------------------------------------------------------------------------------


def test_node_called_with_something_else():
    layer = dil.NeuralODE(decay)
    with pytest.raises(TypeError, match=r"^t must be a tensor"):
        layer(Y, [0.0, 1.0])
    with pytest.raises(ValueError, match=r"^y0 must have at least batch_dims=1"):
        layer(torch.tensor(1.0), T.float())


def test_node_in_half_precision():
    class Field(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(2, 2)

        def forward(self, t, y):
            return self.body(y)

    for dtype in (torch.bfloat16, torch.float16):
        layer = dil.NeuralODE(Field()).to(dtype)
        with pytest.raises(TypeError, match=rf"^y0 must .*{re.escape(str(dtype))}"):
            layer(Y.to(dtype), T.to(dtype))
        # A module in one precision and a state in another.
        with pytest.raises((RuntimeError, TypeError), match=r"dtype|func must"):
            layer(Y, T)


BLOW_UP = {
    "kvaerno5": {"method": "kvaerno5"},
    "radauIIA5": {"method": "radauIIA5", "rtol": 1e-5},
    "rk4": {"method": "rk4", "options": {"substeps": 20}},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("settings", BLOW_UP.values(), ids=list(BLOW_UP))
def test_a_state_that_runs_away_is_told_with_its_time(settings, dtype):
    y0, t = torch.tensor([[0.1], [5.0], [0.2]], dtype=dtype), torch.linspace(0, 2, 5, dtype=dtype)
    with pytest.warns(dil.ConvergenceWarning) as caught:
        dil.ode.solve(lambda t, y: y**2, y0, t, batch_dims=1, **settings)  # infinite at t = 0.2
    message = str(caught[0].message)
    assert "y may be infinite there" in message and "(sample 1)" in message and "start closer" not in message
    assert 0.19 < float(re.search(r"t = ([0-9.]*[0-9])", message)[1]) <= (0.5 if settings["method"] == "rk4" else 0.21)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_adaptive_steps_that_fail_are_not_advised_to_adapt(dtype):
    y0, t = torch.ones(3, dtype=dtype), torch.tensor([0.0, 10.0], dtype=dtype)
    with pytest.warns(dil.ConvergenceWarning) as caught:
        dil.odeint(lambda t, y: torch.sin(50 * t) - y, y0, t, method="kvaerno5", rtol=1e-6, options={"max_steps": 5})
    message = str(caught[0].message)
    assert "adaptive method" not in message and "float64" in message and "loosen rtol" in message
    assert "max_steps in options" in message
