"""What a key of a function depends on where the function is part of something larger, a model for example."""

import copy
import dataclasses
import functools
import types

import numpy as np
import pytest
import torch
from torch import nn

import torchdil as dil
from torchdil import traced
from torchdil.signature import signature


class Model(nn.Module):
    """A layer is part of it, and the layer's function is a method of it."""

    offset = 0.25

    def __init__(self, linear_solver=None):
        super().__init__()
        self.linear = nn.Linear(3, 3, dtype=torch.float64)
        self.layer = dil.FixedPointLayer(self.step, init=(3,), linear_solver=linear_solver)
        self.scale, self.losses, self.calls = 0.5, [], 0

    @property
    def shift(self):
        return self.offset * self.scale

    def activation(self, y):
        return torch.tanh(y)

    def step(self, y, x):
        return self.scale * self.activation(self.linear(y) + x) + self.shift

    def forward(self, x):
        return self.layer(x)


def helper(model, y):
    return y * model.scale


CHANGES = {
    "number": lambda model: setattr(model, "scale", 0.4),
    "number of the class": lambda model: setattr(model, "offset", 0.1),
    "method": lambda model: setattr(model, "activation", torch.sin),
    "module": lambda model: setattr(model, "linear", nn.Linear(3, 3, bias=False, dtype=torch.float64)),
    "precision": lambda model: model.linear.float(),
    "frozen": lambda model: model.linear.weight.requires_grad_(False),
}
NO_CHANGES = {
    "a list": lambda model: model.losses.append(0.5),
    "a count": lambda model: setattr(model, "calls", model.calls + 1),
    "a call": lambda model: model(torch.ones(2, 3, dtype=torch.float64)),
    "other values": lambda model: model.linear.weight.data.mul_(0.5),
    "something large": lambda model: setattr(model, "trainer", [object() for _ in range(5000)]),
}
FORMS = {
    "method": lambda model: model.step,
    "partial": lambda model: functools.partial(model.step),
    "lambda": lambda model: lambda y, x: model.step(y, x),
    "inside": lambda model: lambda y, x: sum(model.step(y, x) for _ in range(2)),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("change", CHANGES)
def test_what_a_method_reads_is_in_the_key(form, change):
    model = Model()
    function = FORMS[form](model)
    tensors, before = signature(function)
    assert {id(t) for t in tensors} >= {id(t) for t in model.linear.parameters()}
    CHANGES[change](model)
    assert signature(FORMS[form](model))[1] != before
    assert signature(FORMS[form](Model()))[1] == before


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("change", NO_CHANGES)
def test_what_it_does_not_read_is_not(form, change):
    model = Model()
    before = signature(FORMS[form](model))[1]
    NO_CHANGES[change](model)
    assert signature(FORMS[form](model))[1] == before


WHOLE = {
    "passed on": lambda model: lambda y: helper(model, y),
    "called": lambda model: lambda y: model(y),
    "by getattr": lambda model: lambda y: getattr(model, "scale") * y,  # noqa: B009
    "by a method of torch": lambda model: lambda y: y * next(model.parameters()).sum(),
    "written to": lambda model: lambda y: setattr(model, "seen", y),
}


@pytest.mark.parametrize("form", WHOLE)
def test_an_object_that_is_used_otherwise_is_in_the_key_as_a_whole(form):
    model = Model()
    function = WHOLE[form](model)
    before = signature(function)[1]
    model.losses.append(0.5)
    assert signature(function)[1] != before


class Inherited(Model):
    def step(self, y, x):
        return 2 * super().step(y, x)


class InheritedProperty(Model):
    @property
    def shift(self):
        return 2 * super().shift


class Unnamed(Model):
    def step(self, y, x):
        return locals()["self"].scale * y


class Parameters(Model):
    def __getattr__(self, name):
        found = super().__getattr__(name)
        return found if name != "linear" else lambda y: self.__dict__["scale"] * found(y)

    def step(self, y, x):
        return self.linear(y)


class Kept(property):
    """Evaluated once."""

    def __get__(self, owner, kind=None):
        return owner.__dict__.setdefault("scale", self.fget(owner))


class KeptProperty(Model):
    factor = Kept(lambda self: 1.0)

    def step(self, y, x):
        return self.factor * y


class Slots:
    __slots__ = ("scale",)

    def __init__(self):
        self.scale = 0.5

    def step(self, y, x):
        return self.scale * y


@dataclasses.dataclass(slots=True)
class Settings:
    scale: float = 0.5


class Passed:
    """By a function inside."""

    def __init__(self):
        self.scale = 0.5

    def step(self, y, x):
        def inside(z):
            hidden = [self + 1 for self in range(2)]
            return helper(whole(), z) * len(hidden)

        def whole():
            return self

        return inside(y)


def by_settings(settings):
    return lambda y, x: settings.scale * y


SCALED = {
    "super": (Inherited, lambda model: model.step),
    "super in a lambda": (Inherited, lambda model: lambda y, x: model.step(y, x)),
    "super in a property": (InheritedProperty, lambda model: model.step),
    "locals": (Unnamed, lambda model: model.step),
    "__getattr__ of its own": (Parameters, lambda model: model.step),
    "a kind of property": (KeptProperty, lambda model: model.step),
    "slots": (Slots, lambda thing: thing.step),
    "slots of settings": (Settings, by_settings),
    "passed on inside": (Passed, lambda thing: thing.step),
    "attributes of attributes": (Passed, lambda thing: by_settings(types.SimpleNamespace(scale=thing))),
}


@pytest.mark.parametrize("case", SCALED)
def test_however_a_number_is_read_it_is_in_the_key(case):
    kind, function = SCALED[case]
    thing = kind()
    read = function(thing)
    _, before = signature(read)
    assert signature(read)[1] == before
    thing.scale = 0.4
    assert signature(read)[1] != before


def test_parameters_are_found_behind_super():
    model = Inherited()
    assert {id(t) for t in signature(model.step)[0]} >= {id(t) for t in model.linear.parameters()}


scale = 0.5
settings = types.SimpleNamespace(scale=0.5)


def test_globals_and_variables_of_one_name_are_two(monkeypatch):
    def make(scale):
        def outer(y):
            def inside():
                global scale
                return scale * y

            return inside() + scale

        return outer

    def hidden(y):
        def inside(settings):
            def innermost():
                global settings
                return helper(settings, y)

            return innermost() + settings.scale

        return inside(Settings())

    keys = [signature(make(2.0))[1], signature(make(3.0))[1], signature(hidden)[1]]
    monkeypatch.setitem(globals(), "scale", 0.4)
    monkeypatch.setattr(settings, "scale", 0.4)
    others = [signature(make(2.0))[1], signature(make(3.0))[1], signature(hidden)[1]]
    assert len({*keys, *others}) == 6


def test_numbers_of_modules_and_of_numpy():
    conf = types.ModuleType("conf")
    conf.alpha = 0.5
    function = lambda y: conf.alpha * y  # noqa: E731
    before = signature(function)[1]
    conf.alpha = 0.4
    assert signature(function)[1] != before
    keys = {signature(by_settings(Settings(np.float32(value))))[1] for value in (0.1, 0.2, 0.3, 0.1)}
    assert len(keys) == 3


class Counted(Model):
    calls_of_all = 0
    weights = [0.5]  # noqa: RUF012

    @staticmethod
    def twice(y):
        return scale * y

    def step(self, y, x):
        return self.weights[0] * self.twice(y)


def test_of_a_class_too_only_what_is_read_counts(monkeypatch):
    model = Counted()
    before = signature(model.step)[1]
    monkeypatch.setattr(Counted, "calls_of_all", 1)
    assert signature(model.step)[1] == before
    monkeypatch.setattr(Counted, "weights", [0.4])
    assert signature(model.step)[1] != before
    monkeypatch.undo()
    assert signature(model.step)[1] == before
    monkeypatch.setitem(globals(), "scale", 0.4)
    assert signature(model.step)[1] != before


class Doubled:
    """An attribute that is not what is in `__dict__`."""

    def __get__(self, owner, kind=None):
        return 2 * owner.__dict__["held"]

    def __set__(self, owner, value):
        owner.__dict__["held"] = value


class Strange:
    value = Doubled()

    def __init__(self):
        self.value = 1.0
        self.__dict__["value"] = 0.0

    def __getattr__(self, name):
        return self.__dict__["held"]


@pytest.mark.parametrize("function", [lambda o: lambda y: y * o.value, lambda o: lambda y: y * o.missing])
def test_attributes_that_are_worked_out(function):
    strange = Strange()
    before = signature(function(strange))[1]
    strange.value = 3.0
    assert signature(function(strange))[1] != before


def test_a_function_without_a_module():
    names = {"scale": 2.0}
    exec("def double(y):\n    return scale * y", names)
    assert names["double"].__module__ is None
    key = signature(names["double"])[1]
    names["scale"] = 3.0
    assert signature(names["double"])[1] != key


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = 0.5

    def forward(self, y):
        return self.scale * y


@functools.wraps(nn.functional.tanhshrink)
def named_as_of_torch(y):
    return settings.scale * y


class Decorated(Model):
    @torch.no_grad()
    def step(self, y, x):
        return super().step(y, x)

    @torch.autocast("cpu", enabled=False)
    def forward(self, x):
        return self.step(x, x)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), Scaled())


TRANSFORMS = {
    "vmap": torch.vmap,
    "grad": torch.func.grad,
    "jacrev": torch.func.jacrev,
    "jacfwd": torch.func.jacfwd,
    "hessian": torch.func.hessian,
    "no_grad": lambda net: torch.no_grad()(net.forward),
    "autocast": lambda net: torch.autocast("cpu", enabled=False)(net.forward),
    "checkpoint": lambda net: functools.partial(torch.utils.checkpoint.checkpoint, net, use_reentrant=False),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_what_torch_wraps_is_read(name):
    """Though it is a function of torch's that is called, and has the name of one."""
    net = network()
    transformed = TRANSFORMS[name](net)
    tensors, before = signature(transformed)
    assert {id(t) for t in tensors} >= {id(t) for t in net.parameters()}
    net[2].scale = 0.4
    assert signature(transformed)[1] != before


def test_what_torch_closes_over_does_not_reach_far():
    op = torch.ops.aten.add  # which holds functions of torch's with decorators
    assert signature(lambda y: op(y, y)) is not None


def test_what_wraps_a_function_of_torch_is_read(monkeypatch):
    before = signature(named_as_of_torch)[1]
    monkeypatch.setattr(settings, "scale", 0.4)
    assert signature(named_as_of_torch)[1] != before


@pytest.mark.parametrize("form", [lambda model: model, lambda model: model.step], ids=["model", "method"])
def test_methods_that_torch_decorates_are_read(form):
    model = Decorated()
    before = signature(form(model))[1]
    model.scale = 0.4
    assert signature(form(model))[1] != before


def test_methods_that_call_each_other():
    class Loop:
        def first(self, y):
            return self.second(y) if y.sum() > 0 else y

        def second(self, y):
            return self.first(y - 1)

    assert signature(Loop().first)[1] == signature(Loop().first)[1] is not None


@pytest.mark.parametrize("linear_solver", [dil.GMRES(rtol=1e-12), dil.Dense(), dil.NormalCG(rtol=1e-13)], ids=repr)
def test_a_model_with_a_layer_of_its_own_method_is_traced_once(linear_solver):
    """Though each call leaves another report, and the model keeps count; and gradients are those of a plain function."""
    traced.forget_all()
    torch.manual_seed(0)
    model = Model(linear_solver)
    for call in range(40):
        x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
        loss = (model(x) ** 2).sum()
        found = torch.autograd.grad(loss, [x, *model.linear.parameters()])
        model.losses.append(loss.item())
        model.calls += 1
        other = copy.deepcopy(model.linear).requires_grad_()
        plain = dil.FixedPointLayer(
            lambda y, x, other=other: 0.5 * torch.tanh(other(y) + x) + 0.125, init=(3,), linear_solver=dil.Dense()
        )
        if call % 8 == 0:
            expected = torch.autograd.grad((plain(x) ** 2).sum(), [x, *other.parameters()])
            torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)
        if call == 30:  # seen, though it was traced with another number
            model.scale, model.offset = 0.25, 0.5
            y = model(x)
            step = 0.25 * torch.tanh(model.linear(y) + x) + 0.125
            torch.testing.assert_close(y, step, rtol=1e-6, atol=1e-7)
            model.scale, model.offset = 0.5, 0.25
    assert len([memory for memory in traced._memories.values() if memory.trace is not None and memory.solves > 30]) == 1


@pytest.mark.filterwarnings("ignore:Sparse CS")
@pytest.mark.parametrize("layout", ["to_sparse", "to_sparse_csr", "to_sparse_csc"])
def test_layers_that_read_sparse_matrices(layout):
    """Which have no strides; such a layer is not traced."""
    A = torch.eye(3, dtype=torch.float64) + 0.1 * torch.ones(3, 3, dtype=torch.float64)
    sparse, x = getattr(A, layout)(), torch.ones(3, dtype=torch.float64, requires_grad=True)
    assert signature(lambda y: sparse @ y) is None
    y = dil.root(lambda y: sparse @ y - x, torch.zeros(3, dtype=torch.float64)).value
    (found,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(found, torch.linalg.solve(A.mT, torch.ones(3, dtype=torch.float64)))
