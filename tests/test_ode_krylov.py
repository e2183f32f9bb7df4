"""States too large for blocks: steps of GMRES that are compiled as a whole, against direct solves and differences."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import torchdil as dil
from torchdil import compiled
from torchdil.linear import GMRES
from torchdil.ode import SimplifiedNewton, krylov
from torchdil.ode.krylov import Block

SAME = 1e-7  # relative, where both solve to 1e-10
SIDE = 7  # of the grid: 49 unknowns


class Reaction(nn.Module):
    """∂y/∂t = d Δy + r y (1 - y²) + cos(t) / 10 on a periodic square."""

    def __init__(self, diffusion=0.1):
        super().__init__()
        self.d = nn.Parameter(torch.tensor(diffusion, dtype=torch.float64))
        self.r = nn.Parameter(torch.ones(SIDE, dtype=torch.float64))
        self.number = 1.0

    def forward(self, t, y):
        near = sum(torch.roll(y, shift, axis) for shift in (1, -1) for axis in (-1, -2)) - 4 * y
        return self.number * self.d * near + self.r * y * (1 - y**2) + t.cos() / 10


@pytest.fixture(autouse=True)
def compiled_soon(monkeypatch):
    monkeypatch.setattr(krylov, "_PATIENCE", 2)
    monkeypatch.setattr(krylov, "_AT_FIRST", 1)


def start(samples=2):
    generator = torch.Generator("cpu").manual_seed(0)
    y0 = torch.rand(samples, SIDE, SIDE, generator=generator, dtype=torch.float64, device="cpu")
    return y0.to(torch.get_default_device()).requires_grad_()


def solved(func, y0, times, linear_solver=None, jacobian="krylov", **settings):
    """The states and the gradients by y0 and the parameters."""
    found = dil.ode.solve(
        func, y0, times, batch_dims=1, solver=SimplifiedNewton(jacobian=jacobian), linear_solver=linear_solver, **settings
    )
    assert found.converged.all()
    gradient = torch.autograd.grad(found.value.pow(2).mean(dim=(1, 2, 3)).cumsum(0).sum(), [y0, *func.parameters()])
    assert (found.report.backward.status == dil.Status.converged).all()
    return found.value.detach(), *gradient


def close(found, expected, tolerance=SAME):
    for a, b in zip(found, expected, strict=True):
        assert (a - b).norm() <= tolerance * b.norm()


def kinds(func):
    """What was compiled for the function, by its key."""
    return {
        key: kind for key, kind in compiled.memory(func).items() if isinstance(kind, compiled._Kind) and "block" in str(key)
    }


@pytest.mark.parametrize(
    ("method", "power"), [("backward_euler", 1.0), ("backward_euler", 1.6), ("trbdf2", 1.6), ("radau3", 1.6), ("gl4", 1.0)]
)
def test_compiled_steps_are_the_direct_solve(method, power):
    func, y0 = Reaction(), start()
    times = 3 * torch.linspace(0, 1, 16, dtype=torch.float64) ** power
    expected = solved(func, y0, times, dil.Dense(), "full", method=method)
    for _ in range(3):
        close(solved(func, y0, times, GMRES(), method=method), expected)
    both = {key[0][0][1] for key, kind in kinds(func).items() if kind.fast is not None}
    assert both == {False, True}  # J forwards, Jᵀ backwards


def test_adaptive_steps_are_those_of_full_jacobians():
    func, y0, times = Reaction(), start(), torch.linspace(0, 3, 4, dtype=torch.float64)
    settings = {"method": "radau5", "rtol": 1e-7, "atol": 1e-9}
    expected = solved(func, y0, times, dil.Dense(), "full", **settings)
    for _ in range(2):
        close(solved(func, y0, times, GMRES(), **settings), expected, 1e-5)


def test_parameters_that_are_trained_or_replaced_are_seen():
    func, y0, times = Reaction(), start(), torch.linspace(0, 3, 16, dtype=torch.float64)

    def in_place():
        with torch.no_grad():
            func.d += 0.2

    def another():
        func.d = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))

    def number():
        func.number = 0.3

    solved(func, y0, times, GMRES())
    for change in (in_place, another, number):
        solved(func, y0, times, GMRES())  # until all is compiled
        change()
        fresh = Reaction()
        fresh.load_state_dict(func.state_dict())
        fresh.number = func.number
        close(solved(func, y0, times, GMRES()), solved(fresh, y0, times, dil.Dense(), "full"))


def test_what_was_compiled_for_another_function_is_given_up():
    func, y0, times = Reaction(), start(), torch.linspace(0, 3, 16, dtype=torch.float64)
    for _ in range(2):
        solved(func, y0, times, GMRES())
    before = list(kinds(func).values())  # kept, or others might have their places in memory
    func.number = 3.0
    solved(func, y0, times, GMRES())
    assert {id(kind) for kind in before}.isdisjoint(id(kind) for kind in kinds(func).values())


def test_a_loose_tolerance_does_not_hide_another_function():
    func, y0, times = Reaction(), start(), torch.linspace(0, 3, 16, dtype=torch.float64)
    for number in (1.0, 1.0, 1.0, 3.0):
        func.number = number
        found = dil.ode.solve(func, y0, times, batch_dims=1, linear_solver=GMRES(rtol=1e-2), solver=SimplifiedNewton())
        torch.autograd.grad(found.value.pow(2).sum(), func.d)
        stats = found.report.backward.stats
        assert (stats.residual <= 1.5 * stats.tolerance).all()


class Counting(Reaction):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, t, y):
        self.calls += 1
        return super().forward(t, y)


class Offloading(Reaction):
    def forward(self, t, y):
        with torch.autograd.graph.save_on_cpu():
            return super().forward(t, y)


class Checkpointing(Reaction):
    def forward(self, t, y):
        return checkpoint(super().forward, t, y, use_reentrant=False)


class Solving(Reaction):
    """With three samples `vmap` takes samples for right-hand sides."""

    def forward(self, t, y):
        matrix = torch.eye(SIDE * SIDE, dtype=torch.float64) + 0.1
        return super().forward(t, y) - torch.linalg.solve(matrix, y.flatten(1).unsqueeze(-1)).view_as(y)


@pytest.mark.parametrize("kind", [Counting, Offloading, Checkpointing, Solving])
@pytest.mark.parametrize("jacobian", ["krylov", "full", None])
def test_functions_that_torch_func_cannot_differentiate(kind, jacobian):
    func, y0, times = kind(), start(3), torch.linspace(0, 3, 6, dtype=torch.float64)
    solver = None if jacobian is None else SimplifiedNewton(jacobian=jacobian)
    linear_solver = GMRES() if jacobian == "krylov" else None
    for _ in range(3):
        y = dil.odeint(func, y0, times, batch_dims=1, solver=solver, linear_solver=linear_solver)
        (gradient,) = torch.autograd.grad(y.pow(2).sum(), func.d)
    with torch.no_grad():
        differences = []
        for step in (1e-5, -1e-5):
            func.d += step
            differences.append(dil.odeint(func, y0, times, batch_dims=1).pow(2).sum() / 2e-5)
            func.d -= step
    torch.testing.assert_close(gradient, differences[0] - differences[1], rtol=1e-5, atol=0)


def test_a_function_made_anew_for_each_call_is_not_compiled(monkeypatch):
    monkeypatch.setattr(krylov, "_AT_FIRST", 10**6)
    monkeypatch.setattr(compiled, "_fast_form", None)
    func, y0, times = Reaction(), start(), torch.linspace(0, 3, 6, dtype=torch.float64)
    for _ in range(4):
        y = dil.odeint(lambda t, y: func(t, y), y0, times, solver=SimplifiedNewton(jacobian="krylov"), linear_solver=GMRES())
        torch.autograd.grad(y.pow(2).sum(), func.d)


def test_what_cannot_be_compiled_is_tried_once(monkeypatch):
    tried = []
    monkeypatch.setattr(compiled, "_fast_form", lambda *given: tried.append(given))
    func, y0, times = Reaction(), start(), torch.linspace(0, 3, 6, dtype=torch.float64)
    expected = solved(func, y0, times, dil.Dense(), "full")
    tried.clear()
    for _ in range(4):
        close(solved(func, y0, times, GMRES()), expected)
    assert len(tried) == 2  # J and Jᵀ


def test_a_solve_that_needs_more_steps_is_made_again():
    y0 = torch.zeros(1, 6, dtype=torch.float64)
    block = Block(nn.Module(), "test", lambda y, A: y @ A.mT, GMRES(), GMRES())
    spread, narrow = (torch.diag(torch.linspace(1, top, 6, dtype=torch.float64)) for top in (50.0, 1.0))
    rhs = torch.ones(1, 6, dtype=torch.float64)
    steps = []
    for A in (narrow, narrow, narrow, narrow, spread, spread, narrow):
        result = block.solve(y0, (A,), rhs, block.expected())
        close([result.value], [rhs / A.diagonal()])
        steps.append(int(result.stats.steps))
    assert steps == [1, 1, 1, 1, 6, 6, 1]


def test_more_steps_than_needed_are_no_reason_to_compile_anew():
    needed = krylov._Needed(object())
    taken = []
    for steps in (5, 7, 6, *([4] * 110), *([2] * 110)):
        needed.add(steps)
        taken.append(needed.steps)
    assert taken[:3] == [5, 7, 7]
    assert taken[110] == 4 and taken[-1] == 4  # 7 is too many for 4, 4 is not for 2


def test_no_samples():
    func, times = Reaction(), torch.linspace(0, 3, 5, dtype=torch.float64)
    solved(func, start(), times, GMRES())
    value, *gradients = solved(func, start(0), times, GMRES())
    assert value.shape == (5, 0, SIDE, SIDE) and all((g == 0).all() for g in gradients)


@pytest.mark.parametrize("how", ["preconditioner", "product"])
def test_settings_of_the_linear_solver_are_kept(how):
    func, y0, times = Reaction(), start(), torch.linspace(0, 3, 8, dtype=torch.float64)
    calls = []

    def precondition(r):
        calls.append(r)
        return r

    solver = GMRES(preconditioner=precondition) if how == "preconditioner" else GMRES(product="backward")
    expected = solved(func, y0, times, dil.Dense(), "full")
    for _ in range(3):
        close(solved(func, y0, times, solver), expected)
    assert not any(key[0][0][1] for key in kinds(func))  # Jᵀ
    assert bool(calls) == (how == "preconditioner")


def test_two_backward_passes_through_a_point_are_the_same_to_the_bit():
    func, y0, times = Reaction(), start(), torch.linspace(0, 3, 16, dtype=torch.float64)
    for _ in range(4):
        y = dil.odeint(func, y0, times, batch_dims=1, linear_solver=GMRES())
        first, other, again = (torch.autograd.grad(y[k:].sum(), func.d, retain_graph=True)[0] for k in (1, 15, 1))
        assert torch.equal(first, again) and not torch.equal(first, other)


def test_deterministic_algorithms_depend_on_no_calls_before():
    func, y0, times = Reaction(), start(), torch.linspace(0, 3, 16, dtype=torch.float64)
    torch.use_deterministic_algorithms(True)
    try:
        answers = [solved(func, y0, times, GMRES()) for _ in range(4)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert not kinds(func)
    assert all(torch.equal(a, b) for answer in answers[1:] for a, b in zip(answers[0], answer, strict=True))


def test_second_derivatives():
    func, y0, times = Reaction(), start(1), torch.linspace(0, 1, 6, dtype=torch.float64)

    def loss(d):
        y = dil.odeint(lambda t, y: func(t, y) + d * y, y0.detach(), times, batch_dims=1, linear_solver=GMRES())
        return y[-1].pow(2).sum()

    d = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(loss, (d,), atol=1e-4)


def test_newton_on_all_steps_of_a_large_state_forms_no_blocks(monkeypatch):
    from torchdil.ode import bidiagonal

    monkeypatch.setattr(bidiagonal, "blocks", None)
    monkeypatch.setattr("torchdil.ode.trajectory._DENSE_BELOW", 10)
    monkeypatch.setattr("torchdil.ode.whole._GPU_SIZE", 10)
    func, y0, times = Reaction(), start(), torch.linspace(0, 3, 16, dtype=torch.float64)
    # An answer that is too rough for its solver's own tolerance, which Newton on all steps then improves.
    monkeypatch.setattr("torchdil.ode.march._SHARE", 1e6)
    found = dil.ode.solve(func, y0, times, batch_dims=1)
    assert found.converged.all()
    monkeypatch.undo()
    close([found.value], [dil.odeint(func, y0, times, batch_dims=1)])
