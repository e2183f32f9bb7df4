"""Fast forms of functions that come back, and Newton on all steps at once: neither may change an answer."""

import copy
import gc
import math
import threading
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode

import torchdil as dil
from torchdil import compiled
from torchdil.compiled import Compiled, memory
from torchdil.ode import SimplifiedNewton, solve
from torchdil.ode.whole import WholeTrajectory
from torchdil.solution import Status

ROUNDING = 1e-12  # the same operations in another order
SAME = 1e-8  # two solves to the default tolerance, 1e-10 of the trajectory
OFTEN = 12  # calls after which there is a fast form


class Net(nn.Module):
    def __init__(self, size: int = 2, hidden: int = 6):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(size, hidden), nn.Tanh(), nn.Linear(hidden, size))
        self.speed, self.reverse = 1.0, False
        self.double()

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        slope = self.speed * self.body(y)
        return -slope if self.reverse else slope


def make_net(seed: int = 0, **settings) -> Net:
    torch.manual_seed(seed)
    return Net(**settings)


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def grid(steps: int = 10, end: float = 1.0) -> Tensor:
    return torch.linspace(0, end, steps + 1, dtype=torch.float64)


def answers(func, y0: Tensor, t: Tensor, **settings) -> list[Tensor]:
    """y and the gradients of a loss, all detached."""
    y0 = y0.clone().requires_grad_()
    y = dil.odeint(func, y0, t, **{"batch_dims": 1, "on_failure": "raise", **settings})
    leaves = [y0, *(func.parameters() if isinstance(func, nn.Module) else ())]
    return [y.detach(), *torch.autograd.grad((y * y.detach().cos()).sum(), leaves)]


def close(actual, expected, tolerance: float) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def fast_forms(func) -> list:
    """The kinds of calls that have a fast form."""
    return [kind for kind in memory(func).values() if getattr(kind, "fast", None) is not None]


# Newton's own iteration; blocks of every eighth step; so large that one step after the other is faster.
SIZES = {"small": (4, 2, 10), "medium": (16, 6, 20), "large": (8, 40, 9)}


def problem(size: str) -> tuple[Net, Tensor, Tensor]:
    samples, d, steps = SIZES[size]
    return make_net(size=d), draw(1, samples, d), grid(steps)


# --- Fast forms ---


@pytest.mark.parametrize("size", SIZES)
def test_a_function_that_comes_back_gets_a_fast_form_with_the_same_numbers(size):
    net, y0, t = problem(size)
    settings = {"solver": WholeTrajectory()}
    first = answers(net, y0, t, **settings)
    for _ in range(OFTEN):
        last = answers(net, y0, t, **settings)
    assert len(fast_forms(net)) >= 2  # the way there and the way back
    close(last, first, ROUNDING)
    other, later = draw(2, *y0.shape), t * 1.3 + 0.2
    close(answers(net, other, later, **settings), answers(copy.deepcopy(net), other, later, **settings), ROUNDING)


def test_calls_are_counted_for_each_kind():
    calls = []

    def function(x: Tensor) -> tuple[Tensor]:
        calls.append(len(x))
        return (x + 1,)

    owner = make_net()
    for _ in range(10):
        Compiled(owner, "plus", function)(torch.zeros(3))
    assert not fast_forms(owner)
    for length in (4, 3, 3, 3):
        assert Compiled(owner, "plus", function)(torch.zeros(length))[0].equal(torch.ones(length))
    assert len(fast_forms(owner)) == 1
    assert calls == [3] * 10 + [4, 3]  # once more for the trace
    Compiled(owner, "other", function)(torch.zeros(3))
    assert len(calls) == 13
    Compiled(owner, "other", function).forget()
    assert not memory(owner)


@pytest.mark.parametrize("size", ["small", "large"])
def test_what_an_optimizer_writes_is_seen(size):
    net, y0, t = problem(size)
    for _ in range(OFTEN):
        answers(net, y0, t)
    forms = fast_forms(net)
    assert forms
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(1.5)
    close(answers(net, y0, t), answers(copy.deepcopy(net), y0, t), SAME)
    assert fast_forms(net) == forms


def test_tensors_made_from_parameters_follow_them():
    class Scaled(Net):
        def forward(self, t: Tensor, y: Tensor) -> Tensor:
            weight = self.body[2].weight
            return torch.tanh(y @ self.body[0].weight.T) @ (weight / weight.norm()).T

    torch.manual_seed(0)
    net, y0, t = Scaled(), draw(1, 4, 2), grid()
    for _ in range(OFTEN):
        dil.odeint(net, y0, t, batch_dims=1)
    forms = fast_forms(net)
    assert forms
    with torch.no_grad():
        net.body[2].weight.add_(1.0)
    close(dil.odeint(net, y0, t, batch_dims=1), dil.odeint(copy.deepcopy(net), y0, t, batch_dims=1), SAME)
    assert fast_forms(net) == forms


def replaced(net: Net) -> None:
    net.body[2].weight = nn.Parameter(1.7 * net.body[2].weight.detach())


def replaced_data(net: Net) -> None:
    net.body[2].weight.data = 1.7 * net.body[2].weight.detach()


def faster(net: Net) -> None:
    net.speed = 1.2


def reversed_(net: Net) -> None:
    net.reverse = True


def another_body(net: Net) -> None:
    net.body = make_net(7, hidden=4).body


CHANGES = [replaced, replaced_data, faster, reversed_, another_body]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_is_out_of_date_is_found_out_and_dropped(change):
    net, y0, t = problem("small")
    for _ in range(OFTEN):
        answers(net, y0, t)
    forms = fast_forms(net)
    assert forms
    change(net)
    expected = answers(copy.deepcopy(net), y0, t)
    for _ in range(2):
        close(answers(net, y0, t), expected, SAME)
        assert not any(form in forms for form in fast_forms(net))


class Logistic(nn.Module):
    """Whose steps have two roots, one of which a solution of the reversed equation leads to."""

    def __init__(self, rate):
        super().__init__()
        self.rate = rate

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        return self.rate * y * (1 - y)


@pytest.mark.parametrize("make", [float, lambda rate: nn.Parameter(torch.tensor(rate).double())], ids=["number", "parameter"])
@pytest.mark.parametrize("method", ["backward_euler", "trapezoid", "sdirk2", "radauIIA5", "gl4"])
def test_an_answer_out_of_date_leads_to_no_other_root(method, make):
    func, y0, t = Logistic(make(5.0)), torch.full((1, 1), 0.5, dtype=torch.float64), grid(3, 3.0)
    settings = {"method": method, "batch_dims": 1, "on_failure": "raise"}
    for _ in range(OFTEN):
        dil.odeint(func, y0, t, **settings)
    assert fast_forms(func)
    func.rate = make(-5.0)
    found = dil.odeint(func, y0, t, **settings)
    close(found, dil.odeint(Logistic(make(-5.0)), y0, t, **settings), SAME)
    assert bool((found.abs().diff(dim=0) < 0).all())


@pytest.mark.parametrize("size", ["medium", "large"])
def test_a_replaced_parameter_is_found_out_where_solves_are_rough(size):
    net, y0, t = problem(size)
    for _ in range(OFTEN):
        answers(net, y0, t)
    assert fast_forms(net)
    replaced(net)
    close(answers(net, y0, t), answers(copy.deepcopy(net), y0, t), SAME)


@pytest.mark.parametrize("change", [replaced, faster], ids=lambda change: change.__name__)
def test_a_backward_pass_out_of_date_is_found_out_by_itself(change):
    """The steps are taken one by one, by the function itself; only the way back is traced."""
    net, y0, t = problem("small")
    for _ in range(OFTEN):
        answers(net, y0, t, solver=SimplifiedNewton())
    assert fast_forms(net)
    change(net)
    expected = answers(copy.deepcopy(net), y0, t, solver=SimplifiedNewton())
    for _ in range(2):
        close(answers(net, y0, t, solver=SimplifiedNewton()), expected, SAME)


def test_second_derivatives_are_those_without_a_fast_form():
    net, y0, t = problem("small")

    def second(net: Net) -> tuple[Tensor, ...]:
        start = y0.clone().requires_grad_()
        (first,) = torch.autograd.grad((dil.odeint(net, start, t, batch_dims=1) ** 3).sum(), start, create_graph=True)
        return torch.autograd.grad((first**2).sum(), [start, *net.parameters()])

    expected = second(net)
    for _ in range(OFTEN):
        found = second(net)
    assert fast_forms(net)
    close(found, expected, SAME)


def test_a_fast_form_made_in_inference_mode_serves_training():
    net, y0, t = problem("small")
    with torch.inference_mode():
        for _ in range(OFTEN):
            dil.odeint(net, y0, t, batch_dims=1)
    assert fast_forms(net)
    close(answers(net, y0, t), answers(copy.deepcopy(net), y0, t), SAME)


def test_parameters_swapped_for_one_call_are_used():
    net, y0, t = problem("small")
    before = dil.odeint(net, y0, t, batch_dims=1).detach()
    for _ in range(OFTEN):
        dil.odeint(net, y0, t, batch_dims=1)
    assert fast_forms(net)
    other, node = make_net(9), dil.NeuralODE(net)
    swapped = torch.func.functional_call(node, {f"field.{name}": p for name, p in other.named_parameters()}, (y0, t))
    close(swapped, dil.odeint(other, y0, t, batch_dims=1), SAME)
    close(dil.odeint(net, y0, t, batch_dims=1).detach(), before, SAME)


def test_a_replaced_tensor_of_a_closure_is_found_out():
    held = {"k": torch.tensor(1.0, dtype=torch.float64)}

    def decay(t: Tensor, y: Tensor) -> Tensor:
        return -held["k"] * y

    y0, t = torch.ones(1, 1, dtype=torch.float64), grid(8)
    for _ in range(OFTEN):
        dil.odeint(decay, y0, t, batch_dims=1)
    assert fast_forms(decay)
    for k in (3.0, -1.0):
        held["k"] = torch.tensor(k, dtype=torch.float64)
        expected = (1 + k / 8) ** -torch.arange(9, dtype=torch.float64)
        close(dil.odeint(decay, y0, t, batch_dims=1).flatten(), expected, SAME)


@pytest.mark.parametrize("use", ["item", "branch"])
def test_a_parameter_that_was_read_as_a_number_is_found_out(use):
    class Read(nn.Module):
        def __init__(self):
            super().__init__()
            self.k = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))

        def forward(self, t: Tensor, y: Tensor) -> Tensor:
            if use == "item":
                return -self.k.item() * y
            return -self.k * y if self.k > 0 else 2 * self.k * y

    net, y0, t = Read(), torch.ones(1, 1, dtype=torch.float64), grid(8)
    for k, rate in ((1.0, 1.0), (-1.0, 1.0 if use == "item" else 2.0)):
        with torch.no_grad():
            net.k.fill_(k)
        rate = rate if use == "branch" else k
        for _ in range(OFTEN):
            y = dil.odeint(net, y0, t, batch_dims=1)
            close(y.detach().flatten(), (1 + rate / 8) ** -torch.arange(9, dtype=torch.float64), SAME)


def test_training_and_evaluation_are_two_functions():
    class Dropped(Net):
        def forward(self, t: Tensor, y: Tensor) -> Tensor:
            return super().forward(t, y) if self.training else 0.5 * super().forward(t, y)

    torch.manual_seed(0)
    net, y0, t = Dropped(), draw(1, 3, 2), grid()
    expected = {mode: dil.odeint(copy.deepcopy(net).train(mode), y0, t, batch_dims=1).detach() for mode in (True, False)}
    for _ in range(OFTEN):
        for mode in (True, False):
            close(dil.odeint(net.train(mode), y0, t, batch_dims=1).detach(), expected[mode], SAME)
    assert len(fast_forms(net)) == 2


def test_what_is_remembered_dies_with_the_function():
    net, y0, t = problem("small")
    for _ in range(OFTEN):
        answers(net, y0, t)
    assert fast_forms(net)
    others = len(compiled._memories)
    watched = [weakref.ref(net), *(weakref.ref(p) for p in net.parameters())]
    storage = weakref.ref(net.body[0].weight.untyped_storage())
    fast = weakref.ref(fast_forms(net)[0])
    del net
    gc.collect()
    assert [ref() for ref in watched] == [None] * len(watched)
    assert fast() is None and storage() is None
    assert len(compiled._memories) == others - 1


def test_a_graph_is_not_kept_by_torch():
    """As each function is that was made by `torch.jit.trace`, with 0.3 MB or more."""
    kept = torch.jit._state._python_cu.get_functions
    before, x = len(kept()), torch.ones(3, dtype=torch.float64, device="cpu")
    graph = compiled.scripted(lambda x, y: (x.tanh() + y,), (x,), (2 * x,))
    torch.testing.assert_close(graph(x, x)[0], x.tanh() + x)
    assert "aten::tanh" in str(graph.graph) and len(kept()) == before


def test_a_closure_and_what_it_holds_are_not_kept_alive():
    held = draw(3, 2, 2)
    watched = weakref.ref(held)

    def turn(t: Tensor, y: Tensor, held: Tensor = held) -> Tensor:
        return torch.tanh(y @ held.T)

    for _ in range(OFTEN):
        dil.odeint(turn, draw(1, 3, 2), grid(), batch_dims=1)
    assert fast_forms(turn)
    del turn, held
    gc.collect()
    assert watched() is None


# --- Functions that cannot be made fast ---


class Cube(torch.autograd.Function):
    """y³ by numpy."""

    @staticmethod
    def forward(ctx, y):
        ctx.save_for_backward(y)
        return torch.as_tensor(y.detach().numpy() ** 3, device=y.device)

    @staticmethod
    def backward(ctx, grad):
        return 3 * ctx.saved_tensors[0] ** 2 * grad


def by_numpy(t: Tensor, y: Tensor) -> Tensor:
    return -Cube.apply(y)


def by_item(t: Tensor, y: Tensor) -> Tensor:
    return -(y**3) * math.exp(0 * t.item())


def by_branch(t: Tensor, y: Tensor) -> Tensor:
    return -(y**3) if y.sum() > -100 else y


def not_traceable(t: Tensor, y: Tensor) -> Tensor:
    if get_proxy_mode() is not None:
        raise RuntimeError("no traces, please.")
    return -(y**3)


@pytest.mark.parametrize("func", [by_numpy, by_item, by_branch, not_traceable], ids=lambda func: func.__name__)
def test_a_function_that_cannot_be_traced_works(func):
    y0, t = draw(1, 3, 2), grid(5)

    def plain(t: Tensor, y: Tensor) -> Tensor:
        return -(y**3)

    expected = answers(plain, y0, t)
    for _ in range(OFTEN + 1):
        close(answers(func, y0, t), expected, SAME)
    assert not fast_forms(func)


class Slotted:
    """No weak references to it."""

    __slots__ = ()

    def __call__(self, t: Tensor, y: Tensor) -> Tensor:
        return -(y**3)


class Compared(Slotted):
    """Equal to everything, so without a hash."""

    def __eq__(self, other: object) -> bool:
        return True


class Owner:
    def slope(self, t: Tensor, y: Tensor) -> Tensor:
        return -(y**3)


@pytest.mark.parametrize("func", [Slotted(), Compared(), Owner().slope], ids=["slots", "unhashable", "bound method"])
def test_a_callable_that_cannot_be_remembered_works(func):
    y0, t = draw(1, 3, 2), grid(5)
    expected = answers(lambda t, y: -(y**3), y0, t)
    for _ in range(OFTEN):
        close(answers(func, y0, t), expected, SAME)


def test_two_threads_may_use_one_module():
    net, t = make_net(), grid()
    starts = [draw(seed, 4, 2) for seed in range(2)]
    expected = [answers(copy.deepcopy(net), y0, t) for y0 in starts]
    wrong: list[BaseException] = []
    begin = threading.Barrier(2)

    def work(i: int) -> None:
        try:
            begin.wait()
            for _ in range(2 * OFTEN):
                close(answers(net, starts[i], t), expected[i], SAME)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong[0]
    assert fast_forms(net)


def test_functions_that_are_traced_at_the_same_time_do_not_disturb_each_other():
    call, getattribute = nn.Module.__call__, nn.Module.__getattr__
    y0, t = draw(1, 4, 2), grid()
    nets = [make_net(seed) for seed in range(3)]
    expected = [dil.odeint(copy.deepcopy(net), y0, t, batch_dims=1) for net in nets]
    for net in nets:
        for _ in range(10):
            dil.odeint(net, y0, t, batch_dims=1)
        assert not fast_forms(net)
    found: list[Tensor] = [y0] * 3
    begin = threading.Barrier(3)

    def work(i: int) -> None:
        begin.wait()
        for _ in range(2):
            found[i] = dil.odeint(nets[i], y0, t, batch_dims=1)

    try:
        threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        close(found, expected, SAME)
        assert all(fast_forms(net) for net in nets)
        # torch.fx patches them while it traces.
        assert nn.Module.__call__ is call and nn.Module.__getattr__ is getattribute
    finally:
        nn.Module.__call__, nn.Module.__getattr__ = call, getattribute


# --- All steps at once ---


METHODS = ["backward_euler", "trapezoid", "trbdf2", "gl4", "radau5"]


@pytest.mark.parametrize("uneven", [False, True], ids=["even", "uneven"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("size", SIZES)
def test_all_steps_at_once_are_the_steps_one_by_one(size, method, uneven):
    net, y0, t = problem(size)
    if uneven:
        t = t**1.5 + 0.1 * t
    settings = {"method": method, "batch_dims": 1, "options": {"substeps": 1}}
    at_once = solve(net, y0, t, solver=WholeTrajectory(), **settings)
    one_by_one = solve(net, y0, t, solver=SimplifiedNewton(), **settings)
    assert at_once.converged.all() and one_by_one.converged.all()
    assert at_once.stats.method == "whole trajectory"
    assert one_by_one.stats.method.startswith("step by step")
    close(at_once.value.detach(), one_by_one.value.detach(), SAME)


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5, 8, 9, 17])
def test_any_number_of_steps_can_be_taken_at_once(steps):
    net, y0, t = make_net(size=6), draw(1, 60, 6), grid(steps)
    at_once = solve(net, y0, t, batch_dims=1, solver=WholeTrajectory())
    assert at_once.converged.all() and at_once.stats.method == "whole trajectory"
    close(at_once.value, solve(net, y0, t, batch_dims=1, solver=SimplifiedNewton()).value, SAME)


def van_der_pol(t: Tensor, y: Tensor) -> Tensor:
    a, b = y.unbind(-1)
    return torch.stack((b, 10 * (1 - a * a) * b - a), dim=-1)


def lorenz(t: Tensor, y: Tensor) -> Tensor:
    a, b, c = y.unbind(-1)
    return torch.stack((10 * (b - a), a * (28 - c) - b, a * b - 8 / 3 * c), dim=-1)


HARD = {
    "Van der Pol": (van_der_pol, [[2.0, 0.0], [-1.0, 1.0]], grid(400, 10.0), WholeTrajectory()),
    "Lorenz": (lorenz, [[1.0, 1.0, 1.0], [5.0, 5.0, 20.0]], grid(300, 3.0), WholeTrajectory(max_steps=4)),
    "too few": (van_der_pol, [[2.0, 0.0], [-1.0, 1.0]], grid(20, 0.5), WholeTrajectory(max_steps=2)),
}


@pytest.mark.parametrize("case", HARD)
def test_where_it_does_not_contract_the_steps_are_taken_one_by_one(case):
    func, y0, t, solver = HARD[case]
    y0 = torch.tensor(y0, dtype=torch.float64)
    found = solve(func, y0, t, batch_dims=1, solver=solver)
    rtol = None if y0.device.type == "cpu" else 1e-14  # the march is exact, which a relaxation oscillation shows
    expected = solve(func, y0, t, batch_dims=1, solver=SimplifiedNewton(rtol=rtol))
    assert found.converged.all() and expected.converged.all()
    marched = "whole trajectory, then step by step"  # on a GPU without a look at the numbers in between
    assert found.stats.method == (f"{marched}, SimplifiedNewton" if y0.device.type == "cpu" else marched)
    assert found.stats.method in str(found.report)
    assert (found.stats.steps > expected.stats.steps).any() or y0.device.type != "cpu"
    # A chaotic system multiplies what the tolerance leaves.
    close(found.value, expected.value, 1e-6 if case == "Lorenz" else SAME)


def test_only_the_samples_that_need_it_are_solved_again():
    y0 = torch.tensor([[0.0, 0.0], [2.0, 0.0]], dtype=torch.float64)  # at rest; on its way to the limit cycle
    t = grid(200, 9.0)
    rest = solve(van_der_pol, y0[:1], t, batch_dims=1)
    assert rest.stats.method == "whole trajectory"
    both = solve(van_der_pol, y0, t, batch_dims=1)
    assert both.converged.all()
    assert both.stats.method.startswith("whole trajectory, then")
    assert both.value[:, 0].equal(rest.value[:, 0])
    assert both.stats.steps[0] == rest.stats.steps[0] < both.stats.steps[1]


def test_a_sample_that_is_not_finite_leaves_the_others_alone():
    def root(t: Tensor, y: Tensor) -> Tensor:
        return y.sqrt() - y

    y0 = torch.tensor([[2.0], [-1.0], [0.5]], dtype=torch.float64)
    found = solve(root, y0, grid(), batch_dims=1, on_failure="ignore")
    assert found.status[1] != Status.converged and (found.status[::2] == Status.converged).all()
    alone = solve(root, y0[::2], grid(), batch_dims=1)
    close(found.value[:, ::2], alone.value, SAME)
    close(found.stats.tolerance[::2], alone.stats.tolerance, ROUNDING)  # judged by the same measure


def test_verbose_prints_a_table(capsys):
    net, y0, t = problem("small")
    found = solve(net, y0, t, batch_dims=1, solver=WholeTrajectory(verbose=True))
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "WholeTrajectory: ode, 4 samples"
    assert shown[1].split()[:2] == ["step", "running"]
    rows = [line.split() for line in shown[2:-1]]
    assert len(rows) == int(found.stats.steps.max())
    assert [row[0] for row in rows] == [str(k + 1) for k in range(len(rows))]
    assert rows[0][1] == "4" and float(rows[-1][2]) < float(rows[0][2])
    assert shown[-1].strip() == "ended: converged 4 of 4"


def test_a_backward_pass_on_a_gpu_does_not_wait_for_whoever_traces():
    """Who may be waiting for it, as all backward passes on a GPU run in one thread; on a CPU it waits."""
    held, done, seen = threading.Event(), threading.Event(), []

    def trace():
        with compiled.tracing:
            held.set()
            done.wait(20)

    def backward(grad):
        with compiled.unless_waited_for(True) as free:
            seen.append(free)
        return grad

    thread = threading.Thread(target=trace)
    thread.start()
    assert held.wait(20)
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(backward)
    y.sum().backward()
    done.set()
    thread.join()
    y = x * 2
    y.register_hook(backward)
    y.sum().backward()
    with compiled.unless_waited_for(False) as free:
        seen.append(free)
    assert seen == [False, True, True]
