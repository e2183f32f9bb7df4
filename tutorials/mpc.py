# %% [markdown]
# # Differentiable MPC: learn a cost from demonstrations
#
# Model predictive control (MPC) plans: it looks a few steps ahead with a model
# of the system, finds the controls that cost least, applies the first of them,
# and looks again. What it does depends on its cost, and a cost is hard to write
# down: how much is a degree of deviation worth in torque? Watching somebody who
# does it well is easier. The plan is an argmin over controls, so it has a
# derivative by the weights of the cost, and we can fit these until the planner
# does what the expert did.

# %%
import matplotlib.pyplot as plt
import torch
from torch import nn

import torchdil as dil

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)

# %% [markdown]
# ## The system, and the expert
#
# A pendulum with a motor that is too weak to lift it in one go: it has to
# swing. The state is (angle, speed), and an angle of 0 is upright. The cost of
# a state and a control u is a weighted sum: of the height below the top, of the
# speed, and of the torque. All functions take batches, (B, 2) and (B, 1).


# %%
def pendulum(x, u, dt=0.1):
    angle, speed = x.unbind(-1)
    speed = speed + dt * (9.82 * torch.sin(angle) + 4.0 * u[:, 0])
    return torch.stack((angle + dt * speed, speed), dim=-1)


class Cost(nn.Module):
    def __init__(self, weights):
        super().__init__()
        self.log_weights = nn.Parameter(torch.tensor(weights).log())

    def forward(self, x, u):
        height, speed = self.log_weights.exp()
        return (
            height * (1 - torch.cos(x[:, 0]))
            + speed * x[:, 1] ** 2
            + 0.5 * u[:, 0] ** 2
        )


# %% [markdown]
# Only the ratios of weights matter: twice the cost has the same argmin. So the
# weight of the torque is fixed at 0.5, and two are left to be learned; as
# logarithms, so that they stay positive. `bounds` are those of the motor.
# Swinging up has several local minima, and which one a planner finds depends on
# where it starts; the demonstrations will be from near the top, where there is
# less to choose from.


# %%
def planner(weights):
    return dil.control.MPC(
        pendulum, Cost(weights), horizon=12, control_dim=1, bounds=(-1.0, 1.0)
    )


# %% [markdown]
# ## Demonstrations
#
# The expert is such a planner with weights that we pretend not to know. From
# each of 16 states it shows a plan of 12 controls, a little unsteadily. A third
# of the controls is at a bound, where they say nothing about the weights: such
# a control stays where it is when the weights move a little, and its derivative
# is zero. The others have to do.

# %%
expert, student = planner([2.0, 0.2]), planner([0.3, 2.0])
states = 0.4 * torch.randn(16, 2)
with torch.no_grad():
    plans = expert(states)
    demonstrated = (plans + 0.02 * torch.randn_like(plans)).clamp(-1, 1)
print(
    f"{(plans.abs() == 1).double().mean():.0%} of the controls are at a bound"
)

# %% [markdown]
# ## Learning the cost
#
# The loss compares plans. Its gradient goes through the planner by the implicit
# function theorem: one more linear-quadratic problem backward, solved by a
# Riccati recursion over the horizon. Being exact, it is good enough for L-BFGS.

# %%
optimizer = torch.optim.LBFGS(
    student.parameters(), max_iter=20, line_search_fn="strong_wolfe"
)
history = []


def loss():
    optimizer.zero_grad()
    value = (student(states) - demonstrated).square().mean()
    value.backward()
    history.append(value.item())
    return value


optimizer.step(loss)
true, found = (mpc.cost.log_weights.detach().exp() for mpc in (expert, student))
for name, was, now in zip(("height", "speed"), true, found, strict=True):
    print(f"weight of {name:6}  true {was:.3f}  found {now:.3f}")
first, last = history[0] ** 0.5, min(history) ** 0.5
print(
    f"off by {first:.3f} at first, {last:.3f} after {len(history)} evaluations"
)
assert torch.allclose(found, true, rtol=0.1) and last < 0.025

# %% [markdown]
# ## Does it do the task?
#
# The demonstrations were plans from near the top. A cost, unlike a table of
# states and controls, means something elsewhere, too: let all three planners
# start from below the horizontal, at rest, and plan anew at each step
# (`rollout`). The motor cannot lift the pendulum back: the way up leads through
# the lowest point and up the other side.

# %%
start = torch.tensor([1.6, 0.0])
untrained = planner([0.3, 2.0])
with torch.no_grad():
    runs = {
        name: mpc.rollout(pendulum, start, steps=25)
        for name, mpc in (
            ("expert", expert),
            ("before learning", untrained),
            ("after learning", student),
        )
    }
fig, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2))
for (name, run), style in zip(runs.items(), ("-", ":", "--"), strict=True):
    left.plot(run.states[:, 0], style, lw=2, label=name)
    right.plot(run.controls[:, 0], style, lw=2)
    total = expert.cost(run.states[:-1], run.controls).sum()
    print(f"{name:15} cost {total:6.2f}, last angle {run.states[-1, 0]:.2f}")
left.axhline(2 * torch.pi, color="0.6", lw=1)
left.set(title="Angle: 0 and 2π are upright, π hangs down", xlabel="step")
right.set(title="Torque, bounded by ±1", xlabel="step")
left.legend()
plt.show()
end = {name: run.states[-1, 0].cos().item() for name, run in runs.items()}
assert end["after learning"] > 0.98 and end["before learning"] < 0

# %% [markdown]
# ## The gradient report
#
# Of one more evaluation of the loss, and the check of the planner at four of
# the states.

# %%
loss()
print(student.report)
assert bool(student.report.backward.converged.all())

# %%
verdict = dil.check_gradient(student, states[:4])
print(verdict)
assert verdict.ok

# %% [markdown]
# How to read it. **forward**: `DDP` found a plan for each of the 16 states,
# stationary to the tolerance in the controls that are not held by a bound.
# **backward**: `Riccati` is direct, hence one step. If plans had come from a
# planner that draws samples, the forward status would be `not_stationary`, and
# the gradient an approximation. In the check, the derivative by the weights is
# right although a third of the controls is at a bound; were one of them just
# about to leave it, the plan would have a kink there, and the check would say
# so.
