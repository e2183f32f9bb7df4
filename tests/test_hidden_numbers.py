"""Numbers that a function reads in a roundabout way are part of what its trace is kept under."""

import abc
import array
import contextvars
import ctypes
import dataclasses
import datetime
import decimal
import enum
import functools
import mmap
import multiprocessing
import operator
import queue
import re
import sys
import threading
import types
import weakref
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

import torchdil as dil
from torchdil import traced
from torchdil.signature import signature

RIDGE = 0.1
settings = types.ModuleType("torchdil_test_settings")
settings.RIDGE, settings.inner = 0.1, types.ModuleType("torchdil_test_settings.inner")
settings.inner.RIDGE = 0.1
sys.modules[settings.__name__], sys.modules[settings.inner.__name__] = settings, settings.inner


class Holder:
    ridge, none = 0.1, 0.0
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


class Described:
    ridge, pair = Descriptor(), [0.1]


class Kind(enum.IntEnum):
    first = 1

    def ridge(self):
        return RIDGE


class Pair(NamedTuple):
    scale: float

    @property
    def ridge(self):
        return self.scale * RIDGE


class Table(dict):
    def __missing__(self, key):
        return RIDGE


class Values(np.ndarray):
    pass


class Weights(torch.Tensor):
    def ridge(self):
        return RIDGE


class Meta(type):
    @property
    def ridge(cls):
        return RIDGE


class OfMeta(metaclass=Meta):
    pass


class Made:
    """Whatever makes it."""

    def __init__(self):
        self.ridge = RIDGE


class MadeByBase(Made):
    pass


class MadeByNew:
    def __new__(cls):
        made = super().__new__(cls)
        made.ridge = RIDGE
        return made


@dataclasses.dataclass
class MadeAfter:
    def __post_init__(self):
        self.ridge = RIDGE


@dataclasses.dataclass
class MadeByFactory:
    ridge: float = dataclasses.field(default_factory=lambda: RIDGE)


class MadeModule(nn.Module):
    def __init__(self):
        super().__init__()
        self.ridge = RIDGE


class CalledModule(nn.Module):
    def forward(self):
        return RIDGE


class Unnamed:
    """What is called without its name."""

    __hash__ = None

    def __eq__(self, other):
        return other == RIDGE

    def __setitem__(self, key, value):
        self.kept = RIDGE

    def __setattr__(self, name, value):
        object.__setattr__(self, name, RIDGE)

    def _set(self, value):
        object.__setattr__(self, "kept", RIDGE)

    def _delete(self):
        object.__setattr__(self, "kept", RIDGE)

    place = property(None, _set, _delete)


def set_item(held):
    held[0] = 0.0


def after(change, held):
    change(held)
    return vars(held).pop("kept")


class Signs:
    def __invert__(self):
        return RIDGE

    def __or__(self, other):
        return RIDGE * other


class Dispatches:
    kind = "ridge"

    def _of_ridge(self):
        return RIDGE


def with_attribute(owner):
    owner.ridge = 0.1
    return owner


class Score(nn.Module):
    """What the ways have in common; `ridge` reads the number."""

    def __init__(self, held=None):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, dtype=torch.float64))
        self.held = held

    def forward(self, y):
        return ((y - self.weight) ** 2).sum() + self.ridge() * (y**2).sum()


class Asked:
    """By names that nobody else mentions."""

    slack = 0.1

    def slackness(self):
        return SLACKNESS

    def slackened(self, by):
        return SLACKNESS * by


ASKED, SLACKNESS = Asked(), 0.1
OUTER = types.SimpleNamespace(held=ASKED)


def to_asked(value):
    Asked.slack = globals()["SLACKNESS"] = value


def to_global(value):
    globals()["RIDGE"] = value


def to_settings(value):
    settings.RIDGE = settings.inner.RIDGE = value


def imports():
    from torchdil_test_settings import RIDGE

    return RIDGE


def to_holder(value):
    Holder.ridge = Holder.table["ridge"] = value


HOLDER = Holder()  # weak references do not keep it
# What is held, how the number is read there, and what changes it.
WAYS = {
    "a global read by a submodule": (Term, lambda self: self.held.energy(), to_global),
    "a global read by a module in a list": (lambda: nn.ModuleList([Term()]), lambda self: self.held[0].energy(), to_global),
    "a global read by an object in a list": (lambda: [Plain()], lambda self: self.held[0].energy(), to_global),
    "a global read by a property of an object": (Plain, lambda self: self.held.ridge, to_global),
    "a global read by an operator": (Plain, lambda self: self.held @ 1.0, to_global),
    "a global read by a static method": (Plain, lambda self: self.held.fixed(), to_global),
    "what makes an object": (lambda: None, lambda self: Made().ridge, to_global),
    "what makes one of a class that is held": (lambda: Made, lambda self: self.held().ridge, to_global),
    "what makes one in a base": (lambda: None, lambda self: MadeByBase().ridge, to_global),
    "__new__": (lambda: None, lambda self: MadeByNew().ridge, to_global),
    "__post_init__": (lambda: None, lambda self: MadeAfter().ridge, to_global),
    "a default factory": (lambda: None, lambda self: MadeByFactory().ridge, to_global),
    "what makes a module": (lambda: None, lambda self: MadeModule().ridge, to_global),
    "a module that is made": (lambda: None, lambda self: CalledModule()(), to_global),
    "==": (Unnamed, lambda self: 0.4 if self.held == 0.4 else 0.1, to_global),
    "an item that is set": (Unnamed, lambda self: after(set_item, self.held), to_global),
    "an attribute that is set": (Unnamed, lambda self: after(lambda held: setattr(held, "kept", 0), self.held), to_global),
    "a property that is set": (Unnamed, lambda self: after(lambda held: setattr(held, "place", 0), self.held), to_global),
    "a property that is deleted": (Unnamed, lambda self: after(lambda held: delattr(held, "place"), self.held), to_global),
    "a getter": (lambda: operator.attrgetter("slack"), lambda self: self.held(ASKED), to_asked),
    "a getter of an attribute of one": (lambda: operator.attrgetter("held.slack"), lambda self: self.held(OUTER), to_asked),
    "a caller of a method": (lambda: operator.methodcaller("slackness"), lambda self: self.held(ASKED), to_asked),
    "one with arguments": (lambda: operator.methodcaller("slackened", 1.0), lambda self: self.held(ASKED), to_asked),
    "one with keywords": (lambda: operator.methodcaller("slackened", by=1.0), lambda self: self.held(ASKED), to_asked),
    "a sign": (Signs, lambda self: ~self.held, to_global),
    "another operator": (Signs, lambda self: self.held | 1.0, to_global),
    "a method of a number": (lambda: Kind.first, lambda self: self.held.ridge(), to_global),
    "a property of a named tuple": (lambda: Pair(1.0), lambda self: self.held.ridge, to_global),
    "what a dictionary says of missing keys": (Table, lambda self: self.held["ridge"], to_global),
    "a method of a tensor": (lambda: torch.ones(1).as_subclass(Weights), lambda self: self.held.ridge(), to_global),
    "a property of a metaclass": (lambda: OfMeta, lambda self: self.held.ridge, to_global),
    "a method whose name is composed": (Dispatches, lambda self: getattr(self.held, f"_of_{self.held.kind}")(), to_global),
    "a module of settings": (lambda: settings, lambda self: self.held.RIDGE, to_settings),
    "a module inside a module": (lambda: settings, lambda self: self.held.inner.RIDGE, to_settings),
    "an import in the function": (lambda: None, lambda self: imports(), to_settings),
    "the class of self": (Holder, lambda self: type(self.held).ridge, to_holder),
    "the class by __class__": (Holder, lambda self: self.held.__class__.ridge, to_holder),
    "the class of an object": (Holder, lambda self: self.held.ridge, to_holder),
    "a base of a class": (lambda: None, lambda self: Inherits.ridge, to_holder),
    "getattr": (Holder, lambda self: getattr(self.held, "ridge"), to_holder),  # noqa: B009
    "names in a tuple": (Holder, lambda self: sum(getattr(self.held, name) for name in ("ridge", "none")), to_holder),
    "a dictionary of a class": (lambda: None, lambda self: Holder.table["ridge"], to_holder),
    "a method of a dictionary": (lambda: Holder.table.get, lambda self: self.held("ridge"), to_holder),
    "a list of its class": (Described, lambda self: type(self.held).pair[0], lambda v: Described.pair.__setitem__(0, v)),
    "a descriptor": (Described, lambda self: self.held.ridge, lambda v: setattr(vars(Described)["ridge"], "held", v)),
    "a weak reference": (lambda: weakref.ref(HOLDER), lambda self: self.held().ridge, to_holder),
    "a proxy": (lambda: weakref.proxy(HOLDER), lambda self: self.held.ridge, to_holder),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_number_that_changes_changes_the_key(way):
    hold, read, put = WAYS[way]
    put(0.1)
    score = Score(hold())
    score.__class__ = type("Way", (Score,), {"ridge": read, "__module__": __name__})
    before = signature(score)
    assert before is not None and signature(score)[1] == before[1]
    put(0.4)
    assert signature(score)[1] != before[1] and score.ridge() == 0.4
    put(0.1)
    assert signature(score)[1] == before[1]


OWNERS = {
    "a tensor": lambda: torch.ones(1),
    "an array": lambda: np.ones(1).view(Values),
    "a dictionary": Table,
    "a list": type("List", (list,), {"__module__": __name__}),
}


@pytest.mark.parametrize("kind", OWNERS)
def test_an_attribute_of_something_that_is_more_than_an_object(kind):
    score = Score(with_attribute(OWNERS[kind]()))
    score.__class__ = type("OfOwner", (Score,), {"ridge": lambda self: self.held.ridge, "__module__": __name__})
    before = signature(score)[1]
    score.held.ridge = 0.4
    assert signature(score)[1] != before


def test_values_without_attributes():
    """The place of one that is gone may be that of the next."""
    keys = [signature(lambda y, held=held: (y, held))[1] for held in map(decimal.Decimal, ("0.1", "0.2", "0.1"))]
    assert keys[0] == keys[2] != keys[1]
    keys = [signature(lambda y, held=held: y[held])[1] for held in (slice(1), slice(2), slice(1))]
    assert keys[0] == keys[2] != keys[1]


class Lazy:
    """A place for anything, that will not say what it is."""

    __slots__ = ("values",)

    def __getattr__(self, name):
        raise KeyError(name)


def by_relative_import(y, x):
    try:
        from .torchdil_test_settings import RIDGE
    except ImportError:
        RIDGE = 2.0
    return RIDGE * ((y - x) ** 2).sum(-1)


class WithGetter:
    _ridge = 2.0
    ridge = property(operator.attrgetter("_ridge"))


WITH_GETTER = WithGetter()


def keeps(owner):
    return lambda y, x: (y - x).pow(2).sum(-1) + 0 * len([owner])


STRANGE = {
    "a relative import": lambda: by_relative_import,
    "a getter that is no function": lambda: lambda y, x, owner=WITH_GETTER: owner.ridge * ((y - x) ** 2).sum(-1),
    "slots": lambda: keeps(Lazy()),
    "a dead proxy": lambda: keeps(weakref.proxy(Holder())),
    "a lazy module": lambda: keeps(nn.LazyLinear(2)),
}


@pytest.mark.parametrize("kind", STRANGE)
def test_what_cannot_be_looked_at_is_no_reason_to_fail(kind):
    score = STRANGE[kind]()
    for _ in range(traced._PATIENCE + 3):
        x = torch.ones(4, 3, dtype=torch.float64, requires_grad=True)
        y = dil.argmin(score, torch.zeros(4, 3, dtype=torch.float64), (x,)).value
        (found,) = torch.autograd.grad(y.sum(), x)
        torch.testing.assert_close(found, torch.ones_like(found))


def test_a_module_that_is_not_imported_is_no_reason_not_to_trace():
    def score(y):
        if y.is_cuda:
            import torchdil_test_of_no_module  # noqa: F401
        return y

    assert signature(score) is not None


class Counter(ctypes.Structure):
    _fields_ = [("value", ctypes.c_double)]


library = torch.library.Library("torchdil_test", "DEF")
library.define("same(Tensor x) -> Tensor")
library.impl("same", torch.clone, "CompositeExplicitAutograd")
torch.library.register_autograd("torchdil_test::same", lambda ctx, g: RIDGE * g, lib=library)


@torch.library.custom_op("torchdil_test_custom::same", mutates_args=())
def same(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


same.register_autograd(lambda ctx, g: RIDGE * g)


def reads_gradient(weight):
    return lambda y: y * weight.grad


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
    "values of a dictionary": {"ridge": 0.1}.values(),
    "an array of objects": np.array([0.1, None], dtype=object),
    "memory": mmap.mmap(-1, 8),
    "an event between processes": multiprocessing.Event(),
    "a queue": queue.SimpleQueue(),
    "a cell": types.CellType(0.1),
    "an operation whose derivative is in Python": torch.ops.torchdil_test.same,
    "one form of it": torch.ops.torchdil_test.same.default,
}


@pytest.mark.parametrize("kind", OPAQUE)
def test_what_does_not_show_its_numbers_is_not_traced(kind):
    held = OPAQUE[kind]
    assert signature(lambda y: (y, held)) is None


def test_what_is_read_of_a_tensor_besides_its_numbers_is_not_traced():
    assert signature(reads_gradient(torch.ones(2, requires_grad=True))) is None
    assert signature(lambda y: torch.ops.torchdil_test.same(y)) is None


class Transparent(nn.Module, abc.ABC):
    """What is held by models, and no reason not to trace them."""

    def __init__(self):
        super().__init__()
        self.locks = threading.Lock(), threading.RLock(), threading.Event()
        self.of_python = (
            object(),
            re.compile("a"),
            ...,
            operator.itemgetter(0),
            list[int],
            datetime.time(1),
            datetime.UTC,
        )
        self.of_torch = torch.Generator(), torch.strided, torch.finfo(torch.float32), torch.Tensor.tanh, torch.contiguous_format
        self.operations = torch.ops.aten.add, torch.ops.aten.add.Tensor, torch.jit.script(nn.functional.tanhshrink)
        self.of_numpy = np.sin, np.sum, np.dtype(float), np.random.default_rng()
        self.grad = nn.Linear(2, 2)

    @functools.cached_property
    def worked_out(self):
        return len(self.of_python)

    def forward(self, y):
        (slope,) = torch.autograd.grad(getattr(self, f"gra{'d'}")(y).sum(), y, create_graph=True)
        return torch.ops.aten.sin(slope) * self.worked_out


def test_what_cannot_change_is_no_reason_not_to_trace():
    model = Transparent()
    before = signature(model)
    assert before is not None and signature(model)[1] == before[1]
    assert signature(lambda y: torch.func.grad(lambda z: z.sum())(y)) is not None


def test_what_a_custom_operation_reads_is_in_the_key():
    def score(y):
        return same(y).sum()

    before = signature(score)
    assert before is not None and signature(score)[1] == before[1]
    to_global(0.4)
    after = signature(score)[1]
    to_global(0.1)
    assert after != before[1] == signature(score)[1]


def test_a_function_that_reads_all_globals_is_not_traced():
    assert signature(lambda y: y * globals()["RIDGE"]) is None
    assert signature(lambda y: y * eval("RIDGE")) is None


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


SEEN = []


class Loads(nn.Module):
    """Its constructor reads what has nothing to do with what it computes."""

    def __init__(self):
        super().__init__()
        self.count = len(SEEN) + RIDGE * 0
        self.weight = nn.Parameter(torch.ones(2))

    def offset(self):
        return 0.0

    def forward(self, y):
        return self.weight * y + self.offset()


class LoadsMore(Loads):
    def offset(self):
        return super().offset() + 1.0

    def forward(self, y):
        return super().forward(y)


@pytest.mark.parametrize("kind", [Loads, LoadsMore])
@pytest.mark.parametrize("form", [lambda model: model, lambda model: model.forward], ids=["model", "method"])
def test_how_an_object_was_made_does_not_matter(kind, form, monkeypatch):
    model = kind()
    before = signature(form(model))
    assert before is not None
    monkeypatch.setitem(globals(), "SEEN", [1.0])
    assert signature(form(model))[1] == before[1]


@pytest.mark.parametrize("way", ["a global read by a submodule", "a module of settings", "the class of an object"])
def test_gradients_follow_in_float32(way):
    """Where F is compared in few digits: a ridge that only the flat directions feel."""
    hold, read, put = WAYS[way]
    U, V = (
        torch.linalg.qr(torch.randn(6, 6, generator=torch.Generator().manual_seed(k), dtype=torch.float64))[0] for k in (0, 1)
    )
    A = U @ torch.diag(torch.tensor([100.0, 30, 10, 3, 0.5, 0.5], dtype=torch.float64)) @ V.T
    b, c = (torch.randn(4, 6, generator=torch.Generator().manual_seed(k)) for k in (2, 3))

    class Fit(Score):
        def forward(self, y, b):
            return 0.5 * ((y @ A.float().T - b) ** 2).sum(-1) + 0.5 * self.ridge() * (y**2).sum(-1)

    fit = Fit(hold())
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
