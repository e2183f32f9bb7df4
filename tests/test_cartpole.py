"""Cart-pole: the system against its Lagrangian, the planning gradient against finite differences, and the experiment."""

import io
import math
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import torchdil as dil
from experiments import cartpole, cartpole_figures, cartpole_learning, cartpole_page, page, runner, systems

# Relative, of accelerations: both sides are exact but for rounding.
ROUNDING = 1e-12
# Relative, of the energy after a second in steps of 1 ms: RK4's error is of fourth order.
ENERGY = 1e-9
# Relative, of a gradient by central differences with steps of 1e-5.
DIFFERENCES = 1e-6
SECONDS = 8
LARGEST_GIF = 1_500_000
SMALLEST_LETTERS = 9

DOCS = Path(__file__).parent.parent / "docs"
SMOKE = cartpole.Config.preset("smoke")


@pytest.fixture(scope="module")
def records():
    began = time.process_time()
    found = runner.execute(runner.Task("cartpole", SMOKE, (0,)))
    assert time.process_time() - began < SECONDS
    return found


@pytest.fixture(scope="module")
def two_variants(records):
    """As from two integrators and two seeds; only the very first run has trajectories, and RK4 only the largest budget."""
    (first,) = records
    bare = [
        {key: value for key, value in row.items() if key not in ("trajectories", "data")} for row in first["metrics"]["rows"]
    ]
    second = [row | {"mean": [2 * cost for cost in row["mean"]]} for row in bare]
    twice = [first, first | {"seed": 1, "metrics": {"rows": second}}]
    rows = [row for row in bare if _largest(row)]
    others = [record | {"config": record["config"] | {"integrator": "rk4"}, "metrics": {"rows": rows}} for record in twice]
    return twice + others


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)


def draw(generator, *shape):
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def lagrangian(q, velocity, system):
    """Kinetic minus potential energy, the rod's as an integral over its length: two points of Gauss are exact."""
    _, angle = q
    speed, spin = velocity
    total = 0.5 * system.cart_mass * speed**2
    for node in (-1 / math.sqrt(3), 1 / math.sqrt(3)):
        at, mass = 0.5 * system.length * (1 + node), 0.5 * system.pole_mass
        across, up = speed + at * torch.cos(angle) * spin, at * torch.sin(angle) * spin
        total = total + 0.5 * mass * (across**2 + up**2) + mass * system.gravity * at * torch.cos(angle)
    return total


def test_accelerations_are_those_of_the_lagrangian(generator):
    system = systems.CartPole()

    def acceleration(state, u):
        """Euler and Lagrange: d/dt ∂L/∂q̇ = ∂L/∂q + forces."""
        q, velocity = state[[0, 2]], state[[1, 3]]
        forces = torch.stack([system.force * u[0] - system.friction * velocity[0], 0 * u[0]])

        def momentum(q, velocity):
            return torch.func.grad(lagrangian, argnums=1)(q, velocity, system)

        mass = torch.func.jacrev(momentum, argnums=1)(q, velocity)
        drift = torch.func.jacrev(momentum, argnums=0)(q, velocity) @ velocity
        return torch.linalg.solve(mass, torch.func.grad(lagrangian)(q, velocity, system) + forces - drift)

    state, u = draw(generator, 20, 4), draw(generator, 20, 1)
    derivative = system.derivative(state, u)
    assert torch.equal(derivative[:, [0, 2]], state[:, [1, 3]])
    torch.testing.assert_close(derivative[:, [1, 3]], torch.vmap(acceleration)(state, u), rtol=ROUNDING, atol=ROUNDING)


def test_accelerations_from_rest_are_those_by_hand():
    # D = 4 · 1 - 3 · 0.5 = 2.5: ẍ = 4 · 10 / 2.5, θ̈ = -6 · 10 / (0.6 · 2.5).
    derivative = systems.CartPole().derivative(torch.zeros(4), torch.ones(1))
    torch.testing.assert_close(derivative, torch.tensor([0.0, 16.0, 0.0, -40.0]))


def test_energy_is_kept_without_friction_and_force(generator):
    system = systems.CartPole("rk4", dt=1e-3, friction=0.0)
    state = draw(generator, 10, 4)
    before, u = system.energy(state), torch.zeros(10, 1, dtype=torch.float64)
    for _ in range(1000):
        state = system.step(state, u)
    torch.testing.assert_close(system.energy(state), before, rtol=ENERGY, atol=ENERGY)


@pytest.mark.parametrize("integrator, order, steps", [("euler", 1, 128), ("rk4", 4, 16)])
def test_integrators_have_their_orders(integrator, order, steps, generator):
    start, u = draw(generator, 4, 4), draw(generator, 4, 1).clamp(-1, 1)

    def after(integrator, steps):
        state, system = start, systems.CartPole(integrator, dt=0.4 / steps)
        for _ in range(steps):
            state = system.step(state, u)
        return state

    exact, coarse, fine = after("rk4", 512), after(integrator, steps), after(integrator, 2 * steps)
    observed = torch.log2((coarse - exact).norm() / (fine - exact).norm())
    assert abs(float(observed) - order) < 0.2


@pytest.mark.parametrize("integrator", ["euler", "rk4"])
def test_observed_steps_are_steps_of_the_state_for_any_batch(integrator, generator):
    system = systems.CartPole(integrator)
    state, u = draw(generator, 2, 3, 4), draw(generator, 2, 3, 1)
    observation = system.observe(state)
    after = system.step_observed(observation, u)
    torch.testing.assert_close(after, system.observe(system.step(state, u)), rtol=ROUNDING, atol=ROUNDING)
    torch.testing.assert_close(system.observe(system.state(observation)), observation, rtol=ROUNDING, atol=ROUNDING)
    torch.testing.assert_close(system.step(state, u)[1, 2], system.step(state[1, 2], u[1, 2]), rtol=ROUNDING, atol=ROUNDING)


def test_unknown_names_are_refused_in_a_sentence():
    with pytest.raises(ValueError, match="integrator must be 'euler' or 'rk4', got 'heun'"):
        systems.CartPole("heun")
    with pytest.raises(ValueError, match="reading must be one of 'change', 'literal', 'next state', got 'raw'"):
        cartpole_learning.Dynamics(SMOKE, "raw", *transitions())


@pytest.mark.parametrize("c", [1.0, 0.1, -0.6])
def test_mass_spring_damper_has_eigenvalues_of_size_one(c):
    A, B, Q, R, x0 = systems.mass_spring_damper(c)
    torch.testing.assert_close(A.trace(), torch.tensor(-c, dtype=torch.float64))
    torch.testing.assert_close(torch.linalg.eigvals(A).abs(), torch.ones(2, dtype=torch.float64))
    assert (B.tolist(), Q.tolist(), R.tolist(), x0.tolist()) == ([[0], [-1]], [[1, 0], [0, 1]], [[2]], [0, 3])
    assert {t.dtype for t in (A, B, Q, R, x0)} == {torch.float64}


def test_cost_of_a_trajectory_by_hand():
    hanging = torch.tensor([2.0, 5.0, -3.0, 0.0, 1.0]).expand(41, 5)  # (2² + 0² + 2²) / 3 at each time
    upright = torch.tensor([0.0, 7.0, 9.0, 0.0, -1.0]).expand(41, 5)
    late = torch.cat([hanging[:31], upright[:10]])
    too_late = torch.cat([hanging[:32], upright[:9]])
    trajectories = torch.stack([hanging, upright, late, too_late])
    expected = torch.tensor([41 * 8 / 3, 0.0, 31 * 8 / 3, 32 * 8 / 3])
    torch.testing.assert_close(cartpole.total_cost(trajectories), expected)
    assert cartpole.success(trajectories).tolist() == [False, True, True, False]


def transitions(integrator="euler"):
    generator = torch.Generator().manual_seed(1)
    system = systems.CartPole(integrator)
    states = cartpole_learning.initial_states(system, 0.5, 40, generator)
    u = 2 * torch.rand(40, 1, generator=generator) - 1
    return states, u, system.step_observed(states, u)


@pytest.mark.parametrize("reading", cartpole_learning.READINGS)
def test_readings_say_what_a_network_without_weights_predicts(reading):
    states, u, after = transitions()
    model = cartpole_learning.Dynamics(SMOKE, reading, states, u, after)
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    expected = {"change": states + (after - states).mean(dim=0), "literal": states, "next state": torch.zeros_like(states)}
    torch.testing.assert_close(model(states, u), expected[reading])
    # Always predicting the mean change is wrong by a standard deviation.
    rms = math.sqrt(39 / 40) if reading == "change" else (after - expected[reading]).square().mean().sqrt().item()
    assert model.error(states, u, after).item() == pytest.approx(rms, rel=1e-5)


@pytest.mark.parametrize("integrator", ["euler", "rk4"])
def test_gradient_of_the_planning_loss_is_that_of_finite_differences(integrator, generator):
    system = systems.CartPole(integrator)
    # Near upright, where controls are free, and anywhere, where most are at their bounds.
    upright = torch.tensor([0.0, 0.0, math.pi, 0.0], dtype=torch.float64)
    x = system.observe(torch.cat([upright + 0.1 * draw(generator, 4, 4), draw(generator, 4, 4)]))
    expert = system.step_observed(x, 2 * torch.rand(8, 1, generator=generator, dtype=torch.float64) - 1)
    cost = cartpole_learning.Distance(cartpole_learning.UPRIGHT).double()
    mpc = cartpole_learning.planner(SMOKE, system.step_observed, cost, generator, polished=True)
    # Under explicit Euler the last control cannot reach the cost: only what is flat is damped.
    mpc.linear_solver = dil.Dense(damping=1e-12 if integrator == "euler" else 0.0)
    mpc.solver = replace(mpc.solver, rtol=None, particles=200, polish=dil.Newton())

    def loss(u):
        return (system.step_observed(x, u[:, 0]) - expert).square().sum()

    plan = mpc(x)
    (gradient,) = torch.autograd.grad(loss(plan), [cost.target])
    mpc.solver = dil.Newton()
    differences = torch.zeros(3, dtype=torch.float64)
    for k in range(3):
        for sign in (1, -1):
            with torch.no_grad():
                cost.target[k] += sign * 1e-5
                differences[k] += sign * loss(mpc(x, plan.detach())) / 2e-5
                cost.target[k] -= sign * 1e-5
    held = plan[:, 0].abs() == 1
    assert bool(held.any()) and bool((~held).any()) and float(gradient.norm()) > 0.01
    torch.testing.assert_close(gradient, differences, rtol=DIFFERENCES, atol=DIFFERENCES)


def test_bc_and_mpc_take_as_many_steps_of_the_model(monkeypatch):
    taken = []
    step = cartpole_learning.ModelTraining.step
    monkeypatch.setattr(cartpole_learning.ModelTraining, "step", lambda self: taken.append(1) or step(self))
    generator = torch.Generator().manual_seed(0)
    expert = torch.stack([transitions()[0], transitions()[2]], dim=1)
    for train in (cartpole_learning.train_bc, cartpole_learning.train_mpc):
        taken.clear()
        train(replace(SMOKE, target_steps=7), systems.CartPole(), "change", expert, 30, generator)
        assert len(taken) == 30


def test_model_is_learned(generator):
    states, u, after = transitions()
    training = cartpole_learning.ModelTraining(
        SMOKE, systems.CartPole(), "change", states, 1000, torch.Generator().manual_seed(0)
    )
    before = training.model.error(states, u, after).item()
    for _ in range(1000):
        training.step()
    assert training.model.error(states, u, after).item() < 0.05 * before


def test_variants_have_their_own_runs_and_fewer_budgets():
    found = cartpole.variants(cartpole.Config.preset("paper"))
    chosen = {(config.integrator, config.reading): config.runs for config in found}
    assert chosen == {("euler", "change"): 10, ("rk4", "change"): 10, ("euler", "literal"): 10, ("euler", "next state"): 2}
    numbers = [len(cartpole.trainings(config)) for config in found]
    assert numbers == [7, 3, 2, 2]  # polished in training where the model is good enough for it
    assert cartpole.variants(SMOKE) == [SMOKE]


def test_smoke_run_has_every_method_and_is_finite(records):
    rows = records[0]["metrics"]["rows"]
    methods = [(row["method"], row["budget"]) for row in rows]
    learned = [(method, budget) for method in cartpole_learning.METHODS for budget in SMOKE.budgets]
    last = [(method, SMOKE.budgets[-1]) for method in (cartpole_learning.EXACT, *cartpole_learning.POLISHED.values())]
    others = [("expert", None), ("true system, polished, horizon 4", None)]
    assert sorted(methods, key=str) == sorted([*others, *learned, *last], key=str)
    for row in rows:
        numbers = torch.tensor([row["mean"], row["median"], row["worst"]])
        assert bool(numbers.isfinite().all()) and bool((numbers[0] <= numbers[2]).all())


def test_stationarity_is_that_of_the_plans_and_polish_brings_it():
    system, cost = systems.CartPole("rk4"), cartpole_learning.Distance(cartpole_learning.UPRIGHT).requires_grad_(False)
    config = replace(SMOKE, polish_steps=50)
    x = cartpole_learning.initial_states(system, 0.5, 20, torch.Generator().manual_seed(0))

    def plans(polished):
        return cartpole_learning.planner(config, system.step_observed, cost, torch.Generator().manual_seed(1), polished)

    found = cartpole.stationarity(config, plans(polished=False), x)
    u, state = plans(polished=False)(x).requires_grad_(), x
    total = cost(x)
    for control in u.unbind(1):
        state = system.step_observed(state, control)
        total = total + cost(state)
    (gradient,) = torch.autograd.grad(total.sum(), u)
    assert found["gradient"] == pytest.approx(gradient.flatten(1).norm(dim=1).median().item(), rel=1e-3)
    assert found["held"] == 0
    polished = cartpole.stationarity(config, plans(polished=True), x)
    assert polished["gradient"] < 0.01 * found["gradient"] and polished["held"] > 0
    assert polished["negative"] < found["negative"]


def test_runs_are_the_same_again_and_differ_by_seed(records):
    (again,) = runner.execute(runner.Task("cartpole", SMOKE, (0,)))
    assert again["metrics"] == records[0]["metrics"]
    one = replace(SMOKE, budgets=(10,), target_steps=1, states=1, steps=2, trajectories=2)
    first, second = (cartpole.run(one, seed)["rows"] for seed in (0, 1))
    assert [row["method"] for row in first] == [row["method"] for row in second]
    assert all(a["mean"] != b["mean"] for a, b in zip(first, second, strict=True))
    assert "data" in first[0] and not any(key in row for row in second for key in ("data", "trajectories"))


def test_runs_are_collected_by_variant(two_variants):
    found = cartpole_figures.collected(two_variants[::-1])
    assert set(found["settings"]) == {"rk4, change", "euler, change"}
    for row, alone in zip(found["settings"]["euler, change"], two_variants[0]["metrics"]["rows"], strict=True):
        assert row["mean"] == [alone["mean"], [2 * cost for cost in alone["mean"]]]
        assert ("trajectories" in row) == (row["method"] in cartpole.SHOWN and _largest(row))
    for row in found["settings"]["rk4, change"]:
        assert len(row["mean"]) == 2 and _largest(row) and "trajectories" not in row


def _largest(row):
    return row["budget"] in (None, SMOKE.budgets[-1])


def test_cells_of_the_table_are_judged_by_their_means():
    def verdict(*means):
        row = {"mean": [[mean] for mean in means], "median": [[1.0]] * len(means), "success": [[0.5]] * len(means)}
        return cartpole_page._cell("", row, 0, "10.0 ± 0.5")

    assert [verdict(mean).verdict for mean in (8.9, 9.1, 10.9, 11.1)] == [
        "better",
        "reproduced",
        "reproduced",
        "not reproduced",
    ]
    run_away = verdict(9.0, 10.0, 110.0)
    assert (run_away.ours, run_away.runs, run_away.verdict) == ("43.0 ± 33.5", 3, "not reproduced")
    assert "the median run costs 10.0, the median state 1.0" in run_away.why
    ours, theirs = {"mean": [[1.0], [3.0]]}, {"mean": [[2.0], [2.5]]}
    assert cartpole_page._below("", ours, theirs, 0)[2:] == ("2.0 and 2.2", 2, "reproduced", "in 1 of 2 runs")
    assert cartpole_page._below("", theirs, ours, 0).verdict == "not reproduced"


def test_section_is_made_of_whatever_runs_there_are(two_variants):
    pytest.importorskip("matplotlib")
    for some, pictures, tables in ((two_variants, 3, 2), (two_variants[3:], 0, 1)):
        section = cartpole_page.section(some)
        assert (section.body.count("<figure>"), section.body.count("<table>")) == (pictures, tables)
        assert "<script" not in section.body and 'src="http' not in section.body
        assert len(cartpole_page.verdicts(some)) == 6 + 4 * tables


def test_page_is_written_from_the_records(records, tmp_path):
    pytest.importorskip("matplotlib")
    cartpole_page.write(records, tmp_path)
    text = (tmp_path / "cartpole.md").read_text()
    for row in cartpole_page.rows(cartpole_figures.collected(records), "euler, change"):
        assert row["variance 0.08"] in text
    assert 1000 < (tmp_path / "cartpole.gif").stat().st_size < LARGEST_GIF
    assert {path.name for path in tmp_path.glob("*.svg")} == {"cartpole-trajectories.svg", "cartpole-budget-euler.svg"}
    assert all(name in text for name in ("cartpole.gif", "cartpole-trajectories.svg", "cartpole-budget-euler.svg"))


def test_page_is_that_of_the_results():
    pytest.importorskip("matplotlib")
    committed = runner.finished(runner.selected("cartpole", runner.Options("paper", runner.COMMITTED)))
    assert cartpole_page.text(committed) == (DOCS / "cartpole.md").read_text()


def test_letters_of_the_figures_are_readable(records):
    pytest.importorskip("matplotlib")
    from matplotlib.text import Text

    for fig in cartpole_page.figures(records).values():
        fig.savefig(io.BytesIO())
        sizes = [text.get_fontsize() for text in fig.findobj(Text) if text.get_text().strip()]
        assert min(sizes) >= SMALLEST_LETTERS
        assert "<svg" in page.vector_graphic(fig)


def test_standard_error_is_that_of_the_runs():
    row = {"mean": [[1.0, 5.0], [2.0, 5.0], [6.0, 5.0]]}
    mean, error = cartpole_figures.spread(row, 0)
    assert (mean, error) == (3.0, pytest.approx(math.sqrt(7) / math.sqrt(3)))
    assert cartpole_figures.spread(row, 1) == (5.0, 0.0)
