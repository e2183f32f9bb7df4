"""What changes ∂F/∂θ while F, or J, stays what it was: gradients of traced layers must follow it."""

import copy
import dataclasses
import functools
import sys
import threading
import types
import warnings

import pytest
import torch
from torch import nn

import torchdil as dil
from torchdil import traced
from torchdil.shapes_only import ValueReadError, shapes_only
from torchdil.signature import signature

RTOL = 1e-9  # relative, of a gradient in float64
BEFORE, AFTER = 25, 15  # calls before and after the change
STOP = False


def draw(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def exact(F, y, leaves, v):
    """vᵀ ∂y/∂t for each leaf, by the theorem, dense."""
    with torch.no_grad():
        J = torch.autograd.functional.jacobian(F, y.detach())
    return torch.autograd.grad(F(y.detach()), leaves, -torch.linalg.solve(J.mT, v), allow_unused=True, materialize_grads=True)


def off(F, leaves, call, **options):
    """How far the gradient of a layer is from the exact one, relative, and the solution."""
    y0 = torch.zeros(3, dtype=torch.float64)
    solution = dil.root(F, y0, linear_solver=dil.GMRES(rtol=1e-11), solver=dil.Newton(rtol=1e-12), **options)
    v = draw(1000 + call, 3)
    found = torch.autograd.grad((solution.value * v).sum(), leaves, allow_unused=True, materialize_grads=True)
    pairs = zip(found, exact(F, solution.value, leaves, v), strict=True)
    return max(float((a - b).norm() / (b.norm() + 1e-300)) for a, b in pairs)


def curve(y):
    return y + 0.1 * torch.tanh(y)


# Factors of θ that are of another dtype than y.
SEEN, VALID = torch.tensor([True, True, False]), torch.tensor([True, False, True])
BYTES, COUNTS, SINGLE = torch.tensor([200, 17, 250], dtype=torch.uint8), torch.tensor([3, 7, 11]), torch.tensor([0.1, 0.2, 0.3])
FACTORS = {
    "masks added": lambda y, t: curve(y) + t * SEEN.to(y.device) + t * VALID.to(y.device),
    "bytes multiplied": lambda y, t: curve(y) + t * BYTES.to(y.device) * BYTES.to(y.device),
    "divided by integers": lambda y, t: curve(y) - t / COUNTS.to(y.device),
    "float32 multiplied": lambda y, t: curve(y) - t * SINGLE.to(y.device) * SINGLE.to(y.device),
    "products of masks": lambda y, t: curve(y) * (1 + SEEN.to(y.device)) + (y * SEEN.to(y.device) + y * VALID.to(y.device)) - t,
}


@pytest.mark.parametrize("name", FACTORS)
def test_factors_of_other_dtypes(name):
    theta = draw(0, 3).requires_grad_()
    F = FACTORS[name]
    for call in range(traced._PATIENCE + 6):
        assert off(lambda y: F(y, theta), (theta,), call) <= RTOL
    assert any(memory.trace is not None for memory in traced._memories.values())


class Model(nn.Module):
    """F(y) = y + tanh(y) / 10 - net(x) - target, where the gradient may or may not go through the target."""

    stops = False

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(3, 3, dtype=torch.float64)

    def stopped(self):
        return False

    def forward(self, y, x):
        target = self.net(x.flip(0))
        return curve(y) - self.net(x) - (target.detach() if self.stopped() else target)


class ByGlobal(Model):
    def stopped(self):
        return STOP

    def change(self):
        globals()["STOP"] = True


class ByClass(Model):
    def stopped(self):
        return self.stops

    def change(self):
        type(self).stops = True


class BySuper(ByGlobal):
    def stopped(self):
        return super().stopped()


class ByBuffer(Model):
    def __init__(self):
        super().__init__()
        self.register_buffer("frozen", torch.tensor(False))

    def stopped(self):
        return self.frozen

    def change(self):
        self.frozen.fill_(True)


@dataclasses.dataclass
class Slots:
    __slots__ = ("stop",)
    stop: bool


class BySlots(Model):
    def __init__(self):
        super().__init__()
        self.settings = Slots(False)

    def stopped(self):
        return self.settings.stop

    def change(self):
        self.settings.stop = True


class BySet(Model):
    def __init__(self):
        super().__init__()
        self.flags = set()

    def stopped(self):
        return "stop" in self.flags

    def change(self):
        self.flags.add("stop")


class ByTolist(Model):
    def __init__(self):
        super().__init__()
        self.register_buffer("flags", torch.tensor([0, 0]))

    def stopped(self):
        return any(self.flags.tolist())

    def change(self):
        self.flags.fill_(1)


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.scale = scale
        return x.clone()

    @staticmethod
    def backward(ctx, v):
        return -ctx.scale * v, None


class ByStrength(Model):
    """The strength of a gradient's reversal."""

    def __init__(self):
        super().__init__()
        self.register_buffer("strength", torch.tensor(0.1))

    def forward(self, y, x):
        return curve(y) - Reverse.apply(self.net(x), self.strength.item())

    def change(self):
        self.strength.fill_(1.0)


class ByHook(Model):
    def change(self):
        self.net.register_full_backward_hook(lambda module, given, _: tuple(None if g is None else 10 * g for g in given))


HANDLES = []


def of_all_modules(model, register, hook):
    """A hook of all modules, which does something to this model's network only."""
    HANDLES.append(register(lambda module, *given: hook(*given) if module is model.net else None))


class ByForwardHookOfAll(Model):
    def change(self):
        register = nn.modules.module.register_module_forward_hook
        of_all_modules(self, register, lambda _, out: scaled_gradient(out, 0.3))


class ByBackwardHookOfAll(Model):
    def change(self):
        register = nn.modules.module.register_module_full_backward_hook
        of_all_modules(self, register, lambda given, _: tuple(None if g is None else 10 * g for g in given))


class Callable:
    """No module, but an object that is called."""

    def __init__(self):
        self.model = Model()

    def parameters(self):
        return self.model.parameters()

    def __call__(self, y, x):
        target = self.model.net(x.flip(0))
        return curve(y) - self.model.net(x) - (target.detach() if STOP else target)

    change = ByGlobal.change


options = types.ModuleType("options_of_a_program")


class ByModule(Model):
    def stopped(self):
        return options.FLAGS["stop"]

    def change(self):
        options.FLAGS["stop"] = True


class ByFunction(Model):
    def stopped(self):
        return asked()

    def change(self):
        asked.stop = True


def asked():
    return asked.stop


CHANGES = [ByGlobal, ByClass, BySuper, ByBuffer, BySlots, BySet, ByTolist, ByStrength, ByHook, Callable, ByModule, ByFunction]
CHANGES += [ByForwardHookOfAll, ByBackwardHookOfAll]


@pytest.fixture
def _as_before(monkeypatch):
    monkeypatch.setitem(globals(), "STOP", False)
    monkeypatch.setattr(Model, "stops", False)
    monkeypatch.setattr(ByClass, "stops", False)
    monkeypatch.setitem(sys.modules, options.__name__, options)
    options.FLAGS, asked.stop = {"stop": False}, False
    yield
    while HANDLES:
        HANDLES.pop().remove()


@pytest.mark.parametrize("kind", CHANGES)
def test_a_change_that_only_derivatives_show(kind, _as_before):
    model = kind()
    for call in range(BEFORE + AFTER):
        if call == BEFORE:
            model.change()
        x = draw(call, 3).requires_grad_()
        assert off(lambda y, x=x: model(y, x), (x, *model.parameters()), call) <= RTOL


@pytest.mark.parametrize("name", ["forward_pre", "forward", "full_backward_pre", "full_backward"])
def test_nothing_is_traced_while_there_are_hooks_of_all_modules(name):
    assert signature(Model()) is not None
    handle = getattr(nn.modules.module, f"register_module_{name}_hook")(lambda *_: None)
    assert signature(Model()) is None
    handle.remove()
    assert signature(Model()) is not None


def by_hook(h, seen):
    h.register_hook(seen.append)


def by_several(h, seen):
    torch.autograd.graph.register_multi_grad_hook((h,), lambda grads: seen.append(grads[0]))


def by_node(h, seen):
    h.grad_fn.register_prehook(lambda grads: seen.append(grads[0]))


def by_retained(h, seen):
    h.retain_grad()
    seen.append(h)


@pytest.mark.parametrize("watch", [by_hook, by_several, by_node, by_retained])
def test_what_is_watched_inside_a_function_is_its_gradient(watch):
    """Of y + tanh(y) / 10 = h it is 1 / (1 + (1 - tanh² y) / 10)."""
    net, seen = nn.Linear(3, 3, dtype=torch.float64), []

    def F(y, x):
        h = torch.tanh(net(x))
        if h.requires_grad:
            watch(h, seen)
        return curve(y) - h

    for call in range(BEFORE):
        seen.clear()
        y = dil.root(F, torch.zeros(3, dtype=torch.float64), (draw(call, 3),), linear_solver=dil.GMRES(rtol=1e-11)).value
        y.sum().backward()
        found = [h.grad for h in seen if h.grad is not None] if watch is by_retained else seen
        torch.testing.assert_close(*found, 1 / (1 + 0.1 * (1 - torch.tanh(y.detach()) ** 2)), rtol=1e-8, atol=0)


def test_what_nothing_shows_is_found_within_eighteen_solves(tmp_path):
    """A file, for example."""
    model, wrong = Model(), []
    model.stopped = (tmp_path / "stop").exists
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", "Attempting to run cuBLAS")  # torch, of threads of autograd
        for call in range(60):
            if call == BEFORE:
                (tmp_path / "stop").touch()
            x = draw(call, 3).requires_grad_()
            if off(lambda y, x=x: model(y, x), (x, *model.parameters()), call) > RTOL:
                wrong.append(call)
    assert 0 < len(wrong) <= 18 and wrong == list(range(BEFORE, BEFORE + len(wrong)))
    (warning,) = caught
    assert warning.category is dil.ConvergenceWarning
    assert "gradients since the last check, as a rule up to eighteen, may be wrong" in str(warning.message)


@pytest.mark.parametrize("unit", [1e-17, 1e-120])
def test_small_units(unit, tmp_path):
    """F is compared relative to its size, whatever that is."""
    size = tmp_path / "size"
    for call in range(BEFORE + AFTER):
        if call in (0, BEFORE):
            size.write_text("1.0" if call == 0 else "5.0")
        x = draw(call, 3).requires_grad_()
        assert off(lambda y, x=x: unit * (curve(y) - float(size.read_text()) * x), (x,), call) <= RTOL


MASKED = {
    "mean": lambda t, mask: t[mask].mean(),
    "sum": lambda t, mask: t[mask].sum(),
    "product": lambda t, mask: torch.masked_select(t, mask).prod(),
    "numbers": lambda t, mask: t[mask.nonzero().squeeze(-1)].square().mean(),
}


@pytest.mark.parametrize("name", MASKED)
def test_shapes_that_depend_on_values(name):
    theta = draw(0, 5).requires_grad_()
    for call in range(BEFORE + AFTER):
        mask = torch.zeros(5, dtype=torch.bool)
        mask[: 1 if call < BEFORE else 3] = True
        assert off(lambda y, mask=mask: curve(y) - MASKED[name](theta, mask), (theta,), call) <= RTOL


def scaled_gradient(x, factor):
    """x, with a gradient that is multiplied."""
    return factor * x + ((1 - factor) * x).detach()


ALPHA, FIRST, SECOND = torch.tensor(1.0, dtype=torch.float64), torch.tensor(1), torch.tensor(2)
VALUES_READ = {
    "tensor": lambda x: torch.tensor([ALPHA, ALPHA, ALPHA]),
    "tensor of tuples": lambda x: torch.tensor(((ALPHA,), (ALPHA,), (ALPHA,)))[:, 0],
    "tensor by keyword": lambda x: torch.tensor(data=[ALPHA]),
    "as_tensor": lambda x: torch.as_tensor([ALPHA]),
    "asarray": lambda x: torch.asarray([ALPHA]),
    "new_tensor": lambda x: x.new_tensor([ALPHA]),
    "new": lambda x: x.new([ALPHA]),
    "DoubleTensor": lambda x: torch.DoubleTensor([ALPHA]),
    "Tensor": lambda x: torch.Tensor([ALPHA]),
    "str": lambda x: float(str(ALPHA[None])[8:11]),
    "format": lambda x: float(f"{ALPHA[None]}"[8:11]),
    "deepcopy": lambda x: copy.deepcopy(ALPHA),
    "sparse": lambda x: torch.sparse_coo_tensor([[0, 1, 2]], [ALPHA, ALPHA, ALPHA]).to_dense(),
    "index": lambda x: x[None][:, [FIRST, SECOND, FIRST]][0],
    "setitem": lambda x: torch.zeros(1, 3, device=x.device).__setitem__((0, [FIRST, SECOND]), 1.0),
    "tensor_split": lambda x: x.tensor_split(torch.stack([FIRST, SECOND]))[0],
    "tensor_split of torch": lambda x: torch.tensor_split(x, FIRST)[0],
}
NO_VALUES_READ = {
    "tensor of numbers": lambda x: torch.tensor([1.0, 2.0, 3.0]),
    "tensor of a tensor": lambda x: torch.as_tensor(ALPHA),
    "index": lambda x: x[[1, 2]] + x[torch.stack([FIRST, SECOND])],
    "indices": lambda x: x[None][:, [1, 2]][torch.stack([FIRST - 1]), torch.stack([FIRST])],
    "tensor_split": lambda x: x.tensor_split([1, 2])[0],
    "stack": lambda x: torch.stack([ALPHA, ALPHA]),
}


@pytest.mark.parametrize("name", VALUES_READ)
def test_values_that_are_read_without_an_operation_are_seen(name):
    with pytest.raises(ValueReadError), shapes_only():
        VALUES_READ[name](draw(0, 3))


@pytest.mark.parametrize("name", NO_VALUES_READ)
def test_what_reads_no_values_is_left_alone(name):
    with shapes_only():
        NO_VALUES_READ[name](draw(0, 3))


@pytest.mark.parametrize("name", ["tensor", "new", "DoubleTensor", "index"])
def test_tensors_made_of_values(name, monkeypatch):
    for place in ("ALPHA", "FIRST", "SECOND"):
        monkeypatch.setitem(globals(), place, globals()[place].clone())
    made = VALUES_READ[name]
    for call in range(BEFORE + AFTER):
        if call == BEFORE:
            ALPHA.fill_(0.3)
            FIRST.fill_(0)
        x = draw(call, 3).requires_grad_()
        assert off(lambda y, x=x: curve(y) - scaled_gradient(x, made(x.detach())), (x,), call) <= RTOL


def test_a_function_that_hands_its_memory_on_is_not_traced():
    assert signature(lambda y: torch.from_dlpack(torch.utils.dlpack.to_dlpack(y))) is None


def test_places_by_numbers_are_traced():
    theta, places = draw(0, 5).requires_grad_(), torch.tensor([4, 0, 2])
    for call in range(traced._PATIENCE + 3):
        assert off(lambda y: curve(y) - theta[places], (theta,), call) <= RTOL
    assert any(memory.trace is not None for memory in traced._memories.values())


class Keeping(nn.Module):
    """A module that keeps what it has computed, to look at it later."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(3, 3, dtype=torch.float64)

    def forward(self, y, x):
        self.h = torch.tanh(self.net(x))
        return curve(y) - self.h


def test_a_module_that_keeps_what_it_computes_in_a_thread():
    """Where nodes of the graph cannot be told by their age, as on a GPU."""
    model, worst, errors = Keeping(), [], []
    place = torch.get_default_device()

    def train():
        torch.set_default_device(place)  # a thread begins without one
        try:
            for call in range(traced._PATIENCE + 6):
                x = draw(call, 3).requires_grad_()
                worst.append(off(lambda y, x=x: model(y, x), (x, *model.parameters()), call))
            x = draw(0, 3).requires_grad_()
            y = dil.root(model, torch.zeros(3, dtype=torch.float64), (x,), solver=dil.Newton(rtol=1e-13)).value
            (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            errors.extend(torch.autograd.grad(first.sum(), tuple(model.parameters())))
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert max(worst) <= RTOL and all(isinstance(error, torch.Tensor) for error in errors)


def test_keywords_of_a_partial_function():
    a, b = draw(0, 3).requires_grad_(), draw(1, 3).requires_grad_()

    def stated(y, up, down):
        return curve(y) - up + 2 * down

    for call in range(BEFORE + AFTER):
        given = {"up": a, "down": b} if call < BEFORE else {"down": a, "up": b}
        assert off(functools.partial(stated, **given), (a, b), call) <= RTOL
