"""Traps that an ODE solver can fall into without a word: each was one once."""

import math
import warnings

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import torchdil as dil
from torchdil.compiled import memory
from torchdil.ode import SimplifiedNewton, odeint, solve

ADAPTIVE = ["radauIIA5", "kvaerno5", "trbdf2"]


def real(values):
    return torch.tensor(values, dtype=torch.float64)


def line(*args):
    return torch.linspace(*args, dtype=torch.float64)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["failed first", "failed last"])
@pytest.mark.parametrize("method", ADAPTIVE)
def test_a_failed_sample_on_a_common_grid_spoils_no_output(method, order):
    grows = real([[1.0], [0.0]])[list(order)]

    def f(t, y):  # uses t and closes over a tensor of the samples: one grid for all
        return (grows * y * y - (1 - grows) * y) * (1 + 0 * t)

    t = line(0, 2, 9)
    found = solve(f, real([[2.0], [1.0]])[list(order)], t, method=method, rtol=1e-6, batch_dims=1, on_failure="ignore")
    healthy = order.index(1)
    assert found.status[healthy] == dil.Status.converged and found.status[1 - healthy] != dil.Status.converged
    assert (found.value[:, healthy, 0] - torch.exp(-t)).abs().max() < 1e-4
    assert torch.isfinite(found.value).all()


def test_a_failed_sample_of_adaptive_steps_gives_no_gradient_if_it_is_to_be_zero():
    a, y0 = real(1.0).requires_grad_(), real([[2.0]]).requires_grad_()
    y = odeint(
        lambda t, y: a * y * y, y0, real([0.0, 0.1, 0.33, 1.0]), method="radauIIA5", rtol=1e-6, batch_dims=1, on_failure="zero"
    )
    assert [float(g.abs().max()) for g in torch.autograd.grad(y[1:].sum(), (y0, a))] == [0.0, 0.0]


@pytest.mark.parametrize("jump", [0.5, 0.7, 0.93])
def test_a_jump_of_the_right_hand_side_is_stepped_over_within_the_tolerance(jump):
    y = odeint(
        lambda t, y: torch.where(t < jump, 1.0, -3.0) - y,
        real([0.0]),
        real([0.0, 2.0]),
        method="radauIIA5",
        rtol=1e-6,
        atol=1e-6,
    )
    exact = -3 + (4 - math.exp(-jump)) * math.exp(-(2 - jump))
    assert abs(y[-1].item() - exact) < 2e-5


@pytest.mark.parametrize(
    "settings", [{"gradient": "adjoint"}, {"options": {"checkpoint": 2}}, {"options": {"checkpoint": True}}]
)
def test_parameters_that_are_used_between_outputs_only_get_their_gradients(settings):
    rates = [real(1.0 + n).requires_grad_() for n in range(3)]

    def f(t, y):
        return -rates[min(int(3 * t), 2)] * y

    def gradients(**more):
        options = {"substeps": 30} | more.pop("options", {})
        y = odeint(f, real([1.0]), real([0.0, 1.0]), method="trapezoid", options=options, **more)
        return torch.stack(torch.autograd.grad(y[-1].sum(), rates))

    rtol = 1e-2 if "gradient" in settings else 1e-8
    assert torch.allclose(gradients(**settings), gradients(), rtol=rtol)


def test_a_scripted_function_inside_is_told_the_time():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        net = torch.jit.script(_switched)
    y0, t = torch.ones(2, 1, dtype=torch.float64), line(0, 1, 11)
    assert torch.allclose(odeint(lambda t, y: net(t, y), y0, t, batch_dims=1), odeint(_switched, y0, t, batch_dims=1))


def _switched(t: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return -torch.where(t > 0.5, 5.0, 1.0) * y


@pytest.mark.parametrize("bad", [5.0, torch.nan, torch.inf])
@pytest.mark.parametrize("adjoint", ["stored", "reverse"])
def test_a_lost_sample_leaves_the_gradient_of_what_all_share_alone(adjoint, bad):
    def gradient(**settings):
        k = real(1.0).requires_grad_()
        y = odeint(
            lambda t, y: torch.where(y > 3, torch.nan, -k * y),
            real([[1.0], [bad], [2.0]]),
            line(0, 1, 5),
            method="gl4",
            batch_dims=1,
            on_failure="zero",
            **settings,
        )
        return torch.autograd.grad(y[:, [0, 2]].square().sum(), k)[0]

    found = gradient(gradient="adjoint", options={"adjoint": adjoint})
    assert torch.allclose(found, gradient(), rtol=1e-4)


@pytest.mark.parametrize("size", [2, 3, 4, 5])
@pytest.mark.parametrize(
    "settings",
    [{"method": "gl4"}, {"method": "kvaerno5"}, {"method": "radauIIA5", "options": {"substeps": 10}}],
    ids=lambda settings: settings["method"],
)
def test_an_operation_that_vmap_can_do_for_some_numbers_of_points_only(settings, size):
    """torch.linalg.solve of one matrix: for as many points as that axis is long."""
    matrix = 3 * torch.eye(2, dtype=torch.float64)

    def solved(t, y):
        return -torch.linalg.solve(matrix, y.unsqueeze(-1)).squeeze(-1)

    found = odeint(solved, torch.ones(2, size, 2, dtype=torch.float64), line(0, 3, 6), **settings)
    one = odeint(lambda t, y: -y / 3, torch.ones(1, dtype=torch.float64), line(0, 3, 6), **settings)
    assert torch.allclose(found, one.view(6, 1, 1, 1).expand_as(found), rtol=1e-4)


@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize("method", ["backward_euler", "gl4"])
def test_a_function_that_cannot_do_many_points_at_once_is_called_for_each(method, before):
    def few(t, y):
        if len(y) > 20:
            raise RuntimeError("too many")
        return -y

    y0 = torch.ones(2, 2, dtype=torch.float64)
    for _ in range(before):
        odeint(few, y0, line(0, 1, 3), batch_dims=1, method=method)
    found = odeint(few, y0, line(0, 1, 21), batch_dims=1, method=method)
    assert torch.allclose(found, odeint(lambda t, y: -y, y0, line(0, 1, 21), batch_dims=1, method=method))


def test_an_error_that_no_mode_is_to_blame_for_is_raised_and_changes_none():
    calls, most, y0 = [], [100], torch.ones(2, 2, dtype=torch.float64)

    def make():
        def counted(t, y):
            calls.append(None)
            if len(calls) > most[0]:
                raise ValueError("broken")
            return -y

        return counted

    for _ in range(2):  # the first function of this code is looked at more closely
        calls.clear()
        odeint(make(), y0, line(0, 1, 3), batch_dims=1)
    func, count = make(), len(calls)
    calls.clear()
    most[0] = count - 6  # in the solve, before its answer is looked at
    with pytest.raises(ValueError, match="broken"):
        odeint(func, y0, line(0, 1, 3), batch_dims=1)
    assert len(calls) > most[0] + 1  # once more, point by point
    most[0] = 1000
    odeint(func, y0, line(0, 1, 3), batch_dims=1)
    assert {verdict.mode for verdict in memory(func).values() if hasattr(verdict, "mode")} == {"rows"}


@pytest.mark.parametrize("large", [1e6, 1e10])
@pytest.mark.parametrize("solver", [None, SimplifiedNewton()], ids=["default", "step by step"])
def test_a_component_beside_a_large_one_is_solved_too(solver, large):
    def small(t, u):
        return -5 * u**3 + torch.sin(20 * t)

    def both(t, y):
        return torch.stack((torch.zeros_like(t), small(t, y[1])))

    t = line(0, 3, 61)
    alone = odeint(small, real(0.5), t)
    assert (odeint(both, real([large, 0.5]), t, solver=solver)[:, 1] - alone).abs().max() < 1e-4


@pytest.mark.parametrize("solver", [None, SimplifiedNewton()], ids=["default", "step by step"])
@pytest.mark.parametrize("method", ["backward_euler", "trapezoid", "gl4"])
@pytest.mark.parametrize(("large", "small"), [(1e5, 1e-5), (1e5, 1e-8)])
def test_a_component_in_other_units_that_grows_is_solved_too(large, small, method, solver):
    """Pressure in Pa and a fraction: what is nothing beside the other is all of its own equation."""

    def growth(large, small):
        y0 = real([large, 0.01 * small]).requires_grad_()

        def func(t, y):
            return torch.stack((-y[0], 10 * y[1] * (1 - y[1] / small)))

        y = odeint(func, y0, line(0, 1, 21), method=method, solver=solver)[:, 1] / small
        return y.detach(), torch.autograd.grad(y[-1] * small, y0)[0][1]

    found, expected = growth(large, small), growth(1.0, 1.0)
    for a, b in zip(found, expected, strict=True):
        assert (a / b - 1).abs().max() < 1e-5


@pytest.mark.parametrize(
    "solver",
    [
        None,
        dil.Picard(),
        dil.Newton(),
        dil.Anderson(),
        dil.Broyden(),
        *(SimplifiedNewton(jacobian=kind) for kind in ("full", "identity", "krylov")),
    ],
    ids=str,
)
def test_a_state_that_begins_at_zero_is_solved(solver):
    found = solve(lambda t, y: torch.cos(3 * y), real([0.0]), line(0, 0.5, 6), solver=solver, on_failure="raise")
    residual = found.value.diff(dim=0) - 0.1 * torch.cos(3 * found.value[1:])
    assert residual.abs().max() < 1e-10


def test_steps_shorter_than_the_digits_of_t():
    y = odeint(lambda t, y: -y, torch.ones(1), torch.tensor([1e6, 1e6 + 1]), options={"substeps": 100})
    assert abs(y[-1].item() - 1.01**-100) < 1e-5


def test_a_step_across_a_fold_is_found():
    def van_der_pol(t, y):
        return torch.stack((y[1], 5 * (1 - y[0] ** 2) * y[1] - y[0]))

    found = solve(van_der_pol, real([2.0, 0.0]), line(0, 20, 101), on_failure="raise")
    slopes = torch.stack([van_der_pol(None, y) for y in found.value[1:]])
    assert (found.value.diff(dim=0) - 0.2 * slopes).abs().max() < 1e-8


@pytest.mark.parametrize(
    "settings", [{}, {"method": "radauIIA5", "rtol": 1e-4}, {"gradient": "adjoint"}, {"options": {"checkpoint": 2}}]
)
def test_inside_checkpointing_of_torch(settings):
    net, x = torch.nn.Linear(2, 2).double(), torch.randn(3, 2, dtype=torch.float64)

    def f(t, y):
        return net(y)

    def gradient(run):
        return torch.autograd.grad(run(x).square().sum(), list(net.parameters()))

    def layer(x):
        return odeint(f, x, line(0, 1, 5), batch_dims=1, **settings)

    for _ in range(2):  # the first call looks at f
        inside = gradient(lambda x: checkpoint(layer, x, use_reentrant=False))
        assert all(torch.allclose(a, b) for a, b in zip(inside, gradient(layer), strict=True))


def test_the_first_step_has_the_sign_of_the_way():
    with pytest.raises(ValueError, match="first_step"):
        odeint(lambda t, y: -y, real([1.0]), real([0.0, 1.0]), method="kvaerno5", options={"first_step": -0.1})


def test_errors_of_the_first_steps_count_though_the_last_ones_are_huge():
    """y doubles in each step, up to 1e30; the first five steps are off by a hundredth."""
    calls = []

    def solver(fn, y):
        calls.append(None)
        return -2 * fn(torch.zeros_like(y)) * (1.01 if len(calls) <= 5 else 1.0)  # y_n = y_{n-1} + 0.5 y_n

    t = torch.linspace(0, 10, 101, dtype=torch.float64)
    solution = dil.ode.solve(lambda t, y: 5 * y, t.new_ones(1, 1), t, batch_dims=1, solver=solver, on_failure="ignore")
    assert solution.status.tolist() == [dil.Status.not_stationary]
    calls += [None] * 5
    solution = dil.ode.solve(lambda t, y: 5 * y, t.new_ones(1, 1), t, batch_dims=1, solver=solver, on_failure="ignore")
    assert solution.status.tolist() == [dil.Status.converged]


def test_a_residual_that_comes_down_from_an_explosion_is_not_about_to_be_small():
    """What the iterations on a fitted cubic field left, which were once called converged at states of 1e51."""
    told = iter([0.07, 1.8, 7e3, 4e14, 9e44, 1e16, 5e15, 4e15, 4e15])

    class Scripted:
        small, even, stride = False, True, 1

        def refresh(self, y, mask, stride):
            return y, y.new_full((3, 1), next(told)), y

    y = torch.ones(1, 4, dtype=torch.float64)
    result, failed = dil.ode.WholeTrajectory(max_steps=9)._iterate(Scripted(), y, y[:, 0], None)
    assert failed and result.status.tolist() == [dil.Status.stagnated]


def test_a_step_that_was_rescued_hands_on_the_slope_of_its_end():
    """A stage of the next step is taken over from this one, but not from where its first solve went astray."""
    y0 = torch.tensor([[4.2, 0.3], [0.5, 0.2]], dtype=torch.float64)
    t = torch.linspace(0, 1, 5, dtype=torch.float64)
    A = torch.tensor([[0.1, -0.4], [0.3, 0.2]], dtype=torch.float64)

    def func(t, y):
        return -(y**3) + torch.tanh(y @ A.mT)

    solution = dil.ode.solve(func, y0, t, method="trapezoid", batch_dims=1, solver=dil.ode.SimplifiedNewton())
    assert "then Newton" in solution.stats.method and bool(solution.converged.all())
    y = solution.value
    for before, after, h in zip(y[:-1], y[1:], t.diff(), strict=True):
        torch.testing.assert_close(after, before + 0.5 * h * (func(t, before) + func(t, after)), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"method": "kvaerno5"},
        {"method": "radauIIA5", "options": {"substeps": 2}},
        {"gradient": "adjoint"},
        {"gradient": "backprop"},
        {"options": {"checkpoint": 2}},
        {"solver": dil.Picard()},
    ],
    ids=str,
)
@pytest.mark.parametrize("batch_dims", [0, 1])
def test_the_order_of_keys_does_not_matter(batch_dims, settings):
    rates = real([1.0, 3.0]).requires_grad_()

    def solved(func):
        start = {"a": torch.ones(2, 1, dtype=torch.float64), "b": (torch.zeros(2, 1, dtype=torch.float64),)}
        y = odeint(func, start, line(0, 1, 6), batch_dims=batch_dims, **settings)
        return y, torch.autograd.grad(y["b"][0][-1].sum(), rates)[0]

    def same_order(t, y):
        return {"a": -rates[0] * y["a"], "b": (y["a"] - rates[1] * y["b"][0],)}

    (found, gradient), (expected, other) = solved(lambda t, y: dict(reversed(same_order(t, y).items()))), solved(same_order)
    assert list(found) == ["a", "b"] and torch.equal(found["a"], expected["a"]) and torch.equal(found["b"][0], expected["b"][0])
    assert torch.allclose(gradient, other, rtol=1e-10)


def test_under_torch_func_the_advice_is_of_odeint():
    k = real(1.0).requires_grad_()

    def end(y0):
        return odeint(lambda t, y: -k * y, y0, line(0, 1, 3))[-1].sum()

    with pytest.raises(RuntimeError, match=r"^func uses a tensor .* make func an nn.Module .* a part of y0 .*detach it\.$"):
        torch.func.grad(end)(real([1.0]))
