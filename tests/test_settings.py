"""Numbers that a user sets: what cannot work is refused where it is given, in one sentence and the same words everywhere."""

import math

import numpy as np
import pytest
import torch

import torchdil as dil
from torchdil import control, ode
from torchdil.linear.precondition import Jacobi, Nystrom, SecantMemory
from torchdil.settings import check_count, check_number

FORWARD = [
    dil.Anderson,
    dil.Broyden,
    dil.CEM,
    dil.GradientDescent,
    dil.LBFGS,
    dil.MPPI,
    dil.Newton,
    dil.Picard,
    dil.RandomShooting,
    dil.SciPy,
    control.DDP,
]
LINEAR = [dil.CG, dil.NormalCG, dil.MINRES, dil.GMRES, dil.BiCGStab, dil.Dense, dil.Neumann, dil.JacobianFree, dil.Auto]
LINEAR += [control.Stein, control.Riccati]


def adam(**fields):
    return dil.TorchOptim(torch.optim.Adam, **fields)


def options(**fields):
    return ode.solve(lambda t, y: -y, torch.ones(1), torch.tensor([0.0, 1.0]), options=fields)


COUNTS = [(make, "max_steps") for make in (*FORWARD, *LINEAR, adam, ode.SimplifiedNewton, ode.WholeTrajectory, options)]
COUNTS += [(make, "history") for make in (dil.Anderson, dil.Broyden, dil.LBFGS, SecantMemory)]
COUNTS += [(make, "particles") for make in (dil.CEM, dil.MPPI, dil.RandomShooting)]
COUNTS += [(Jacobi, "samples"), (Nystrom, "rank"), (dil.GMRES, "restart"), (dil.Auto, "dense_below"), (options, "substeps")]
NUMBERS = [(make, name) for make in (*FORWARD, *LINEAR, adam, ode.WholeTrajectory) for name in ("rtol", "atol")]
NUMBERS += [(make, "damping") for make in LINEAR]
NUMBERS += [(make, "scale") for make in (dil.CEM, dil.MPPI, dil.RandomShooting)]
NUMBERS += [(make, "relaxation") for make in (dil.Anderson, dil.Picard)]
NUMBERS += [(dil.GradientDescent, "step_size"), (dil.GradientDescent, "momentum")]
NUMBERS += [(dil.CEM, "elites"), (dil.MPPI, "temperature"), (ode.SimplifiedNewton, "rtol")]


@pytest.mark.parametrize(("make", "name"), COUNTS)
def test_a_count_is_an_integer(make, name):
    for value in (2.5, "3", True, math.nan, math.inf, -1, [1], torch.tensor(3)):
        with pytest.raises(ValueError, match=rf"^{name} must be an integer >= \d( or None)?, got ") as caught:
            make(**{name: value})
        assert str(caught.value).endswith(f"got {value!r}.")


@pytest.mark.parametrize(("make", "name"), NUMBERS)
def test_a_number_is_one(make, name):
    for value in ("3", True, math.nan, -1, -math.inf, [1], 1j, torch.tensor(0.5)):
        with pytest.raises(
            ValueError, match=rf"^{name} must be a (finite )?number >=? 0( and <=? 1)?( or None)?, got "
        ) as caught:
            make(**{name: value})
        assert str(caught.value).endswith(f"got {value!r}.")


@pytest.mark.parametrize(("make", "name"), COUNTS)
def test_a_good_count_is_taken(make, name):
    for value in (3, np.int64(3)):
        made = make(**{name: value})
        assert make is options or getattr(made, name) == 3


@pytest.mark.parametrize(("make", "name"), NUMBERS)
def test_a_good_number_is_taken(make, name):
    for value in (0.5, np.float64(0.5), np.float32(0.5)):
        assert getattr(make(**{name: value}), name) == 0.5


def test_the_limits():
    check_count("n", 0, 0)
    check_count("n", None, optional=True)
    check_number("x", 0, least=0, most=1)
    check_number("x", 1, least=0, most=1)
    check_number("x", math.inf, above=0)
    for limits, value, expected in (
        ({"least": 0, "below": 1}, 1, "a number >= 0 and < 1"),
        ({"above": 0, "most": 1}, 0, "a number > 0 and <= 1"),
        ({"above": 0, "below": math.inf}, math.inf, "a finite number > 0"),
        ({"above": 0, "optional": True}, 0, "a number > 0 or None"),
        ({"above": 0}, None, "a number > 0"),
    ):
        with pytest.raises(ValueError, match=f"^x must be {expected}, got {value}.$"):
            check_number("x", value, **limits)
