"""Numbers that a function reads in a roundabout way are part of what its trace is kept under."""

import array
import contextvars
import ctypes
import sys
import types
import weakref

import numpy as np
import pytest
import torch
from torch import nn

import torchdil as dil
from torchdil import traced
from torchdil.captures import signature

RIDGE = 0.1
settings = types.ModuleType("torchdil_test_settings")
settings.RIDGE, settings.inner = 0.1, types.ModuleType("torchdil_test_settings.inner")
settings.inner.RIDGE = 0.1
sys.modules[settings.__name__], sys.modules[settings.inner.__name__] = settings, settings.inner


class Holder:
    ridge = 0.1
    table = {"ridge": 0.1}  # noqa: RUF012


class Inherits(Holder):
    pass


class Term(nn.Module):
    def energy(self):
        return RIDGE


class Plain:
    def energy(self):
        return RIDGE

    @property
    def ridge(self):
        return RIDGE

    def __matmul__(self, other):
        return RIDGE * other

    @staticmethod
    def fixed():
        return RIDGE


class Descriptor:
    def __init__(self):
        self.held = 0.1

    def __get__(self, owner, kind=None):
        return self.held


class Score(nn.Module):
    """What the ways have in common; `ridge` reads the number, `put` changes it."""

    described = Descriptor()
    pair = [0.1]  # noqa: RUF012

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, dtype=torch.float64))
        self.weight.ridge = 0.1
        self.term, self.terms, self.plain = Term(), nn.ModuleList([Term()]), [Plain()]
        self.module, self.held = settings, Holder()
        self.reference = weakref.ref(self.held)

    def forward(self, y):
        return ((y - self.weight) ** 2).sum() + self.ridge() * (y**2).sum()


def to_global(value):
    globals()["RIDGE"] = value


def to_settings(value):
    settings.RIDGE = settings.inner.RIDGE = value


def imports():
    from torchdil_test_settings import RIDGE

    return RIDGE


WAYS = {
    "a global read by a submodule": (lambda self: self.term.energy(), to_global),
    "a global read by a module in a list": (lambda self: next(term.energy() for term in self.terms), to_global),
    "a global read by an object in a list": (lambda self: self.plain[0].energy(), to_global),
    "a global read by a property of an object": (lambda self: self.plain[0].ridge, to_global),
    "a global read by an operator": (lambda self: self.plain[0] @ 1.0, to_global),
    "a global read by a static method": (lambda self: self.plain[0].fixed(), to_global),
    "a module of settings": (lambda self: self.module.RIDGE, to_settings),
    "a module inside a module": (lambda self: settings.inner.RIDGE, to_settings),
    "an import in the function": (lambda self: imports(), to_settings),
    "the class of self": (lambda self: type(self.held).ridge, lambda value: setattr(Holder, "ridge", value)),
    "the class by __class__": (lambda self: self.held.__class__.ridge, lambda value: setattr(Holder, "ridge", value)),
    "the class of an object": (lambda self: self.held.ridge, lambda value: setattr(Holder, "ridge", value)),
    "a base of a class": (lambda self: Inherits.ridge, lambda value: setattr(Holder, "ridge", value)),
    "getattr": (lambda self: getattr(self.held, "ridge"), lambda value: setattr(Holder, "ridge", value)),  # noqa: B009
    "a dictionary of a class": (lambda self: Holder.table["ridge"], lambda value: Holder.table.update(ridge=value)),
    "a list of its class": (lambda self: type(self).pair[0], lambda value: Score.pair.__setitem__(0, value)),
    "a descriptor": (lambda self: self.described, lambda value: setattr(vars(Score)["described"], "held", value)),
    "a weak reference": (lambda self: self.reference().ridge, lambda value: setattr(Holder, "ridge", value)),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_number_that_changes_changes_the_key(way):
    read, put = WAYS[way]
    score = Score()
    score.__class__ = type("Way", (Score,), {"ridge": read, "__module__": __name__})
    put(0.1)
    before = signature(score)
    assert before is not None and signature(score)[1] == before[1]
    put(0.4)
    assert signature(score)[1] != before[1] and score.ridge() == 0.4
    put(0.1)
    assert signature(score)[1] == before[1]


def test_an_attribute_of_a_tensor():
    score = Score()
    score.__class__ = type("OfTensor", (Score,), {"ridge": lambda self: self.weight.ridge, "__module__": __name__})
    before = signature(score)[1]
    score.weight.ridge = 0.4
    assert signature(score)[1] != before


class Counter(ctypes.Structure):
    _fields_ = [("value", ctypes.c_double)]


variable = contextvars.ContextVar("variable", default=0.1)
OPAQUE = {
    "a large array": np.full(2000, 0.1),
    "a proxy of a dictionary": types.MappingProxyType({"ridge": 0.1}),
    "a context variable": variable,
    "bytes that change": bytearray(b"1"),
    "an array of Python": array.array("d", [0.1]),
    "a number of C": ctypes.c_double(0.1),
    "a structure of C": Counter(0.1),
    "a generator": (number for number in (0.1,)),
}


@pytest.mark.parametrize("kind", OPAQUE)
def test_what_does_not_show_its_numbers_is_not_traced(kind):
    held = OPAQUE[kind]
    assert signature(lambda y: (y, held)) is None


class Adds(nn.Module):
    """Layers of recurrent networks hold weak references to their weights."""

    def __init__(self):
        super().__init__()
        self.cell = nn.GRU(2, 2, dtype=torch.float64)
        self.count = 0

    def forward(self, y):
        return self.cell(y)[0]


def test_what_does_not_matter_does_not_change_the_key():
    model = Adds()
    before = signature(model.forward)
    assert before is not None
    model.count += 1
    settings.unrelated = object()
    assert signature(model.forward)[1] == before[1]


@pytest.mark.parametrize("way", ["a global read by a submodule", "a module of settings", "the class of an object"])
def test_gradients_follow_in_float32(way):
    """Where F is compared in few digits: a ridge that only the flat directions feel."""
    read, put = WAYS[way]
    U, V = (
        torch.linalg.qr(torch.randn(6, 6, generator=torch.Generator().manual_seed(k), dtype=torch.float64))[0] for k in (0, 1)
    )
    A = U @ torch.diag(torch.tensor([100.0, 30, 10, 3, 0.5, 0.5], dtype=torch.float64)) @ V.T
    b, c = (torch.randn(4, 6, generator=torch.Generator().manual_seed(k)) for k in (2, 3))

    class Fit(Score):
        def forward(self, y, b):
            return 0.5 * ((y @ A.float().T - b) ** 2).sum(-1) + 0.5 * self.ridge() * (y**2).sum(-1)

    fit = Fit()
    Fit.ridge = read
    layer = dil.ArgminLayer(fit, init=(6,))
    traced.forget_all()
    for call in range(50):
        ridge = 0.4 if call >= 20 and call % 2 else 0.1
        put(ridge)
        x = (b @ A.float().T).requires_grad_()
        (found,) = torch.autograd.grad((layer(x) * c).sum(), x)
        exact = torch.linalg.solve(A.T @ A + ridge * torch.eye(6, dtype=torch.float64), c.double().T).T @ A.T
        assert (found.double() - exact).norm() <= 0.01 * exact.norm(), call
    put(0.1)
    assert sum(memory.trace is not None for memory in traced._memories.values()) == 2
