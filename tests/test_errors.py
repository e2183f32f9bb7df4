"""Bad input: one sentence that names the argument and says what was expected."""

import functools
import re

import pytest
import torch
from torch import nn

import torchdil as dil

Y = torch.ones(2, dtype=torch.float64)
PAIR = (torch.ones(2, 3, dtype=torch.float64), torch.ones(3, 3, dtype=torch.float64))


def score(y, *args):
    return ((y - 2) ** 2).sum()


def residual(y, *args):
    return y - 2


def parameter(*shape):
    return torch.ones(*shape, dtype=torch.float64, requires_grad=True)


def argmin(score=score, y0=Y, args=(), **settings):
    return lambda: dil.argmin(score, y0, args, **settings)


def root(residual=residual, y0=Y, args=(), **settings):
    return lambda: dil.root(residual, y0, args, **settings)


def fixed_point(g, y0=Y, **settings):
    return lambda: dil.fixed_point(g, y0, **settings)


def attach(residual=residual, y_star=2 * Y, args=(), **settings):
    return lambda: dil.attach(residual, y_star, args, **settings)


def descend(fn, y0):
    """A solver that leaves its mark in .grad."""
    y = y0.clone().requires_grad_()
    fn(y).backward()
    return (y - 0.5 * y.grad).detach()


THETA = parameter(2)
WITH_GRAD = parameter(2)
WITH_GRAD.grad = torch.zeros_like(WITH_GRAD)

# id: (call, error, the words that the message must begin with, a word that it must hold)
CASES = {
    # the function
    "score is no function": (argmin(score=3), TypeError, "score must", "int"),
    "residual is no function": (root(residual=None), TypeError, "residual must", "NoneType"),
    "layer of no function": (lambda: dil.ArgminLayer(None), TypeError, "The function of a layer must", "NoneType"),
    "score of y's shape": (argmin(lambda y: y**2, torch.ones(3, 2)), ValueError, "score must", r"\(3, 2\)"),
    "score of another batch": (argmin(lambda y: (y[:2] ** 2).sum(1), torch.ones(3, 2)), ValueError, "score must", r"\(2,\)"),
    "score of one number": (argmin(lambda y: (y**2).sum().view(1)), ValueError, "score must", r"\(1,\)"),
    "score returns int": (argmin(lambda y: 3), TypeError, "score must", "int"),
    "score returns float": (argmin(lambda y: 3.0), TypeError, "score must", "float"),
    "score returns None": (argmin(lambda y: None), TypeError, "score must", "NoneType"),
    "score returns integers": (argmin(lambda y: (y > 0).sum()), TypeError, "score must", "int64"),
    "score returns complex": (argmin(lambda y: (y**2).sum() * 1j), TypeError, "score must", "complex"),
    "score is constant": (argmin(lambda y: Y.sum()), ValueError, "score must depend on y", "gradient"),
    "score depends on parameters only": (argmin(lambda y: (THETA**2).sum()), ValueError, "score must depend on y", "y"),
    "score detaches y": (argmin(lambda y: (y.detach() ** 2).sum()), ValueError, "score must depend on y", "y"),
    "residual is constant": (root(lambda y: Y * 3), ValueError, "residual must depend on y", "y"),
    "residual depends on parameters only": (root(lambda y: THETA * 3), ValueError, "residual must depend on y", "y"),
    "residual detaches y": (root(lambda y: y.detach() * THETA), ValueError, "residual must depend on y", "y"),
    "attached residual is constant": (attach(lambda y: 0 * THETA), ValueError, "residual must depend on y", "y"),
    "residual of another shape": (root(lambda y: y[:1]), ValueError, "residual must", r"\(2,\).*\(1,\)"),
    "residual of another structure": (root(lambda y: (y,)), TypeError, "residual must", "tuple"),
    "residual drops the structure": (root(lambda y: y[0], (Y, Y)), TypeError, "residual must", "Tensor"),
    "residual returns numpy": (root(lambda y: y.numpy()), TypeError, "residual must", "ndarray"),
    "residual returns None": (root(lambda y: None), TypeError, "residual must", "NoneType"),
    "residual of another dtype": (root(lambda y: y.float() - 2), TypeError, "residual must", "float32"),
    "residual returns integers": (root(lambda y: y.long() - 2), TypeError, "residual must", "int64"),
    "residual returns complex": (root(lambda y: y * 1j), TypeError, "residual must", "complex"),
    "residual on another device": (root(lambda y: y.to("meta")), ValueError, "residual must", "meta"),
    "g of another shape": (fixed_point(lambda y: y[:1]), ValueError, "g must", r"\(2,\).*\(1,\)"),
    "g of another dtype": (fixed_point(lambda y: y.float() / 2), TypeError, "g must", "float32"),
    "attached residual of another shape": (attach(lambda y: y[:1]), ValueError, "residual must", r"\(1,\)"),
    # y0
    "y0 integer": (argmin(y0=torch.ones(2, dtype=torch.long)), TypeError, "y0 must", "int64"),
    "y0 complex": (argmin(y0=torch.ones(2, dtype=torch.complex128)), TypeError, "y0 must", "complex"),
    "y0 None": (argmin(y0=None), TypeError, "y0 must", "NoneType"),
    "y0 a number": (root(y0=3.0), TypeError, "y0 must", "float"),
    "y0 numpy": (root(y0=Y.numpy()), TypeError, "y0 must", "ndarray"),
    "y0 an empty tuple": (argmin(y0=()), TypeError, "y0 must", "at least one"),
    "y0 an empty dict": (root(y0={}), TypeError, "y0 must", "at least one"),
    "y0 of mixed dtypes": (argmin(y0=(Y, Y.float())), TypeError, "y0 must", "float64, torch.float32"),
    "y0 on two devices": (argmin(y0=(Y, Y.to("meta"))), ValueError, "y0 must", f"{Y.device}, meta"),
    "y_star None": (attach(y_star=None), TypeError, "y_star must", "NoneType"),
    "y_star integer": (attach(y_star=torch.ones(2, dtype=torch.int32)), TypeError, "y_star must", "int32"),
    "batch_dims too large": (root(batch_dims=2), ValueError, "y0 must have at least batch_dims=2", "axes"),
    "batch_dims too large in attach": (attach(batch_dims=2), ValueError, "y_star must have at least batch_dims=2", "axes"),
    "batch_dims negative": (root(batch_dims=-1), ValueError, "batch_dims must", "-1"),
    "batch_dims no integer": (root(batch_dims=1.0), (TypeError, ValueError), "batch_dims must", "1.0"),
    "batch axes disagree": (root(lambda y: y, PAIR, batch_dims=1), ValueError, "y0 must", r"\(2, 3\), \(3, 3\)"),
    "score's batch axes disagree": (argmin(lambda y: y[0].sum(1), PAIR), ValueError, "score must", r"\(2, 3\), \(3, 3\)"),
    # args
    "args a tensor": (argmin(args=Y), TypeError, "args must", r"args=\(x,\)"),
    "args a dict": (root(args={"x": Y}), TypeError, "args must", "dict"),
    "args None": (attach(args=None), TypeError, "args must", "NoneType"),
    "args on another device": (argmin(args=(Y.to("meta"),)), ValueError, "args must", f"{Y.device}.*meta"),
    "nested args on another device": (root(args=({"x": [Y.to("meta")]},)), ValueError, "args must", f"{Y.device}.*meta"),
    # solver
    "solver returns another shape": (argmin(solver=lambda f, y: y[:1]), ValueError, "solver must", r"\(2,\).*\(1,\)"),
    "solver returns another dtype": (root(solver=lambda f, y: y.float()), ValueError, "solver must", "float64.*float32"),
    "solver returns another device": (root(solver=lambda f, y: y.to("meta")), ValueError, "solver must", f"{Y.device}.*meta"),
    "solver returns another structure": (argmin(solver=lambda f, y: (y, 3)), TypeError, "solver must", "tuple"),
    "solver returns numpy": (argmin(solver=lambda f, y: y.numpy()), TypeError, "solver must", "ndarray"),
    "solver returns None": (argmin(solver=lambda f, y: None), TypeError, "solver must", "NoneType"),
    "solver returns NaN": (argmin(solver=lambda f, y: y * torch.nan), ValueError, "solver must", "NaN"),
    "solver returns infinity": (root(solver=lambda f, y: y / 0), ValueError, "solver must", "infinity"),
    "solver fills .grad": (argmin(lambda y: ((y - THETA) ** 2).sum(), solver=descend), RuntimeError, "solver changed", "grad"),
    "solver adds to .grad": (argmin(lambda y: ((y - WITH_GRAD) ** 2).sum(), solver=descend), RuntimeError, "solver", "grad"),
    "solver a class": (argmin(solver=dil.Newton), TypeError, "solver must", r"Newton\(\)"),
    "solver a string": (argmin(solver="newton"), TypeError, "solver must", "'newton'"),
    "solver a linear solver": (argmin(solver=dil.CG()), TypeError, "solver must", "CG"),
    "gradient descent on a root": (root(solver=dil.GradientDescent()), ValueError, "solver=GradientDescent", "root"),
    "gradient descent on a fixed point": (
        fixed_point(torch.cos, solver=dil.GradientDescent()),
        ValueError,
        "solver=GradientDescent",
        "fixed_point",
    ),
    "negative rtol of a solver": (lambda: dil.Newton(rtol=-1e-3), ValueError, "rtol must", "-0.001"),
    "rtol of a solver is no number": (lambda: dil.Newton(rtol=float("nan")), ValueError, "rtol must", "nan"),
    "negative atol of a solver": (lambda: dil.Picard(atol=-1.0), ValueError, "atol must", "-1.0"),
    "no steps for a solver": (lambda: dil.GradientDescent(max_steps=0), ValueError, "max_steps must", "0"),
    "linear solver of Newton a class": (lambda: dil.Newton(linear_solver=dil.CG), TypeError, "linear_solver must", "CG"),
    "linear solver of Newton a string": (lambda: dil.Newton(linear_solver="cg"), TypeError, "linear_solver must", "'cg'"),
    # linear_solver
    "linear_solver a class": (argmin(linear_solver=dil.CG), TypeError, "linear_solver must", r"CG\(\)"),
    "linear_solver a string": (root(linear_solver="cg"), TypeError, "linear_solver must", "'cg'"),
    "linear_solver a forward solver": (root(linear_solver=dil.Newton()), TypeError, "linear_solver must", "Newton"),
    "linear_solver of attach a class": (attach(linear_solver=dil.Dense), TypeError, "linear_solver must", "Dense"),
    "MINRES on a root": (
        lambda: dil.root(lambda y: y - THETA, Y, linear_solver=dil.MINRES()).value.sum().backward(),
        ValueError,
        "linear_solver=MINRES",
        "symmetric",
    ),
    "negative rtol": (lambda: dil.CG(rtol=-1), ValueError, "rtol must", "-1"),
    "negative atol": (lambda: dil.GMRES(atol=-1), ValueError, "atol must", "-1"),
    "negative damping": (lambda: dil.Dense(damping=-1), ValueError, "damping must", "-1"),
    "no steps": (lambda: dil.BiCGStab(max_steps=0), ValueError, "max_steps must", "0"),
    "unknown product": (lambda: dil.CG(product="fast"), ValueError, "product must", "'fast'"),
    "preconditioner a string": (lambda: dil.CG(preconditioner="jacobi"), TypeError, "preconditioner must", "'jacobi'"),
    "preconditioner a number": (lambda: dil.CG(preconditioner=3), TypeError, "preconditioner must", "3"),
    "preconditioner a class": (lambda: dil.CG(preconditioner=dil.Jacobi), TypeError, "preconditioner must", "Jacobi"),
    "restart of zero": (lambda: dil.GMRES(restart=0), ValueError, "restart must", "0"),
    "warm start of a class": (lambda: dil.WarmStart(dil.CG), TypeError, "solver must", "CG"),
    # the rest
    "unknown policy": (argmin(on_failure="explode"), ValueError, "on_failure must", "'explode'"),
    "unknown policy of a layer": (lambda: dil.RootLayer(residual, on_failure=None), ValueError, "on_failure must", "None"),
    "layer without a start": (lambda: dil.RootLayer(residual)(Y), ValueError, "A start is missing", "init"),
}


@pytest.mark.parametrize("name", CASES)
def test_bad_input(name):
    call, error, start, word = CASES[name]
    with pytest.raises(error) as caught:
        call()
    text = str(caught.value)
    assert text.startswith(start)
    assert re.search(word, text)
    assert "\n" not in text and text.endswith(".") and ". " not in text, "one sentence"


LAYERS = {
    "ArgminLayer": functools.partial(dil.ArgminLayer, score),
    "RootLayer": functools.partial(dil.RootLayer, residual),
    "FixedPointLayer": functools.partial(dil.FixedPointLayer, residual),
    "NeuralODE": functools.partial(dil.NeuralODE, residual),
    "MPC": functools.partial(dil.control.MPC, residual, score, 3, 2),
}


@pytest.mark.parametrize("name", LAYERS)
def test_the_solvers_of_a_layer_are_checked_when_it_is_made(name):
    """With the words of the functions."""
    for solver in (dil.Newton, "newton", dil.CG(), 3):
        with pytest.raises(TypeError, match=r"^solver must be a torchdil solver such as Newton\(\) or a callable") as caught:
            LAYERS[name](solver=solver)
        assert str(caught.value).endswith(f"got {solver!r}.")
    for solver in (dil.CG, "cg", dil.Newton()):
        with pytest.raises(TypeError, match=r"^linear_solver must be a torchdil linear solver such as CG\(\), got ") as caught:
            LAYERS[name](linear_solver=solver)
        assert str(caught.value).endswith(f"got {solver!r}.")
    LAYERS[name](solver=lambda fn, y0: y0, linear_solver=dil.CG())


def test_the_same_in_a_layer():
    """Functions and starts are checked where the functions do: at the call, with the same words."""
    layer = dil.ArgminLayer(lambda y, x: (y - x) ** 2, init=(2,))
    with pytest.raises(ValueError, match=r"^score must return shape \(\) for one problem or \(B,\)"):
        layer(torch.ones(3, 2))
    with pytest.raises(TypeError, match=r"^y0 must have a real floating dtype"):
        dil.RootLayer(lambda y, x: y - x)(Y, y0=torch.ones(2, dtype=torch.long))


def test_errors_of_the_users_function_pass_through():
    class MineError(Exception):
        pass

    def broken(y):
        raise MineError("mine")

    for call in (argmin(broken), root(broken), fixed_point(broken), attach(broken)):
        with pytest.raises(MineError, match=r"^mine$"):
            call()

    def broken_solver(fn, y0):
        raise MineError("mine")

    with pytest.raises(MineError, match=r"^mine$"):
        dil.argmin(score, Y, solver=broken_solver)


def test_no_unknown_is_refused_and_no_problem_is_not():
    with pytest.raises(ValueError, match="y0 must hold at least one number per problem"):
        dil.argmin(lambda y: (y**2).sum(), torch.zeros(0))
    assert dil.argmin(lambda y: (y**2).sum(-1), torch.zeros(0, 3)).value.shape == (0, 3)


FROM_INFERENCE = {
    "y0": lambda x, start: dil.argmin(lambda y, x: ((y - 2 * x) ** 2).sum(-1), start, (x,)).value,
    "layer": lambda x, start: dil.RootLayer(lambda y, x: y - 2 * x)(x, start),
    "init": lambda x, start: dil.RootLayer(lambda y, x: y - 2 * x, init=torch.inference_mode()(lambda x: 0 * x))(x),
    "attach": lambda x, start: dil.attach(lambda y, x: y - 2 * x, start, (x,)),
}


@pytest.mark.parametrize("name", FROM_INFERENCE)
def test_a_start_from_inference_mode(name):
    """Its copies do not begin as version 0, as if they had been changed."""
    x = torch.ones(4, 3, dtype=torch.float64, requires_grad=True)
    with torch.inference_mode():
        start = 2 * x
    y = FROM_INFERENCE[name](x, start)
    (found,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(y, 2 * x)
    torch.testing.assert_close(found, torch.full_like(x, 2))
    with pytest.raises(RuntimeError, match="must not change y in place"):
        dil.root(lambda y, x: y.sub_(2 * x), start, (x,))


def test_good_input_is_not_refused():
    """What the checks above must let through."""
    scalar = torch.tensor(2.0, dtype=torch.float64)
    assert dil.root(lambda y, a: y - a, Y, (scalar,)).value.tolist() == [2.0, 2.0]
    assert dil.root(lambda y, a: y - a, Y, [2]).value.tolist() == [2.0, 2.0]  # a list of args, and a number among them
    assert dil.fixed_point(lambda y: 2 * Y, Y).value.tolist() == [2.0, 2.0]  # a map that is constant
    assert dil.argmin(score, Y, solver=lambda f, y: y.detach() + 1).value.tolist() == [2.0, 2.0]
    half = dil.argmin(lambda y: ((y - 2) ** 2).sum(), torch.ones(2, dtype=torch.float32))
    assert half.value.dtype == torch.float32
    named = dil.root(lambda y: {"a": [y["a"][0] - 2]}, {"a": [Y]})
    assert named.value["a"][0].tolist() == [2.0, 2.0]
    # One sample may fail where others do not.
    rows = dil.argmin(
        lambda y: ((y - 2) ** 2).sum(1),
        torch.ones(2, 1, dtype=torch.float64),
        solver=lambda f, y: y.detach() + torch.tensor([[1.0], [torch.nan]]).double(),
        on_failure="ignore",
    )
    assert rows.status.tolist() == [dil.Status.converged, dil.Status.non_finite]
    assert isinstance(dil.RootLayer(nn.Identity(), init=(2,)), nn.Module)
