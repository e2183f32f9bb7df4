# %% [markdown]
# # A stiff neural ODE from data
#
# Robertson's reaction turns A into B slowly, B into C very fast, and B back
# into A fast. Its rate constants are 0.04, 3·10⁷ and 10⁴: nine orders of
# magnitude apart. Such an equation is *stiff*, and most solvers for neural ODEs
# cannot do it at all. Here we see what goes wrong with an explicit solver, and
# why an implicit one does not mind; then we learn the three constants from
# measurements, and in the end a whole rate law, by a network.

# %%
import matplotlib.pyplot as plt
import torch
from scipy.integrate import solve_ivp
from torch import nn

import torchdil as dil

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)

# %% [markdown]
# ## The field
#
# A neural ODE is dy/dt = f(t, y) with an `nn.Module` as f. Ours holds the
# logarithms of the rates, so that they stay positive and a step of the
# optimiser changes each by a factor. `y` is of shape (N, 3): the amounts of A,
# B and C in N experiments.


# %%
class Reaction(nn.Module):
    def __init__(self, rates):
        super().__init__()
        self.log_rates = nn.Parameter(torch.tensor(rates).log())

    def forward(self, t, y):
        k = self.log_rates.exp()
        a, b, c = y.unbind(-1)
        slow, fast, back = k[0] * a, k[1] * b * b, k[2] * b * c
        return torch.stack((back - slow, slow - fast - back, fast), dim=-1)


true = Reaction([0.04, 3e7, 1e4])
y0 = torch.tensor([[1.0, 0.0, 0.0]])

# %% [markdown]
# ## Why explicit solvers fail
#
# B is used up within 1/2000 of a second of being made: its amount is always
# next to a balance, and hardly moves. An explicit method computes the next
# state from the present slope alone. A step h multiplies a small distance from
# the balance by about `1-2000h`, or another polynomial in 2000 h, and that
# *grows* unless h is about 1/1000 or less. RK4 with steps of 1/500:

# %%
options = {"step_size": 1 / 500}
t = torch.tensor([0.0, 2.0])
rk4 = dil.ode.solve(
    true, y0, t, method="rk4", options=options, on_failure="ignore"
)
print(f"status: {dil.Status(rk4.status.item()).name}")
print("A, B, C at t = 2:", ", ".join(f"{y:.0e}" for y in rk4.value[-1, 0]))
assert rk4.status.item() == dil.Status.non_finite

# %% [markdown]
# (Without `on_failure="ignore"` that is a warning; the state stays at the last
# one that was finite.) An explicit solver with adaptive steps, here SciPy's
# RK45, does find the solution, but the balance dictates its step for ever: the
# work grows with the length of time, though nothing happens any more. An
# implicit method solves for the next state instead. It is stable with any step,
# and takes long ones as soon as the solution is smooth. RadauIIA of order 5 is
# the usual choice for very stiff equations of a few unknowns.


# %%
def field(t, y):  # for SciPy
    slow, fast, back = 0.04 * y[0], 3e7 * y[1] ** 2, 1e4 * y[1] * y[2]
    return [back - slow, slow - fast - back, fast]


settings = {"method": "radauIIA5", "rtol": 1e-4, "atol": 1e-8}
ends = [0.01, 0.1, 1.0, 10.0, 100.0, 1e3, 1e4]
implicit, explicit = [], []
for end in ends:
    stats = dil.ode.solve(true, y0, torch.tensor([0.0, end]), **settings).stats
    implicit.append(int(stats.accepted + stats.rejected))
for end in ends[:4]:
    run = solve_ivp(field, (0, end), [1.0, 0.0, 0.0], rtol=1e-4, atol=1e-8)
    explicit.append(len(run.t) - 1)
for k, end in enumerate(ends):
    steps = explicit[k] if k < 4 else "-"
    print(f"to t = {end:<5g}: RK45 {steps:>5} steps, RadauIIA {implicit[k]:2}")
rate = explicit[3] / 10
print(f"RK45 would need some {rate * 1e4:.0e} steps to t = 10⁴")
assert implicit[-1] < 200 and explicit[3] > 5000

# %%
fig, axis = plt.subplots(figsize=(6, 3.4))
axis.loglog(ends[:4], explicit, "s-", color="C1", label="explicit: RK45")
more = [rate * end for end in ends[3:]]
axis.loglog(ends[3:], more, ":", color="C1", label="the same, extrapolated")
axis.loglog(ends, implicit, "o-", color="C0", label="implicit: RadauIIA(5)")
axis.set(
    title="Steps for Robertson's reaction, errors alike",
    xlabel="end of the time interval",
    ylabel="steps",
)
axis.legend()
plt.show()

# %% [markdown]
# ## Data
#
# Two experiments, one from pure A and one with some C in it, measured at 15
# times up to 10⁴, with errors of 2%. The times are far apart at the end: the
# solver does not mind, since its steps are its own. `NeuralODE` takes each
# experiment of the batch with steps of its own, too. B is tiny (about 10⁻⁵),
# hence the small `atol`, and hence errors that are measured relatively in the
# loss.

# %%
starts = torch.tensor([[1.0, 0.0, 0.0], [0.5, 0.0, 0.5]])
t = torch.cat((torch.zeros(1), torch.logspace(-3, 4, 15)))
with torch.no_grad():
    tight = dil.NeuralODE(true, method="radauIIA5", rtol=1e-8, atol=1e-12)
    exact = tight(starts, t)
    data = exact * (1 + 0.02 * torch.randn_like(exact))

# %% [markdown]
# ## Learning the rates
#
# The guess is wrong by factors of 3 to 5. The gradient is exact for the numbers
# that the solver returned: the implicit function theorem on the whole
# trajectory, one linear solve backwards through its steps. So L-BFGS, which
# does not forgive wrong gradients, is at home here.


# %%
def misfit(node):
    relative = (node(starts, t)[1:] - data[1:]) / (data[1:].abs() + 1e-9)
    return relative.square().mean()


def fit(node, max_iter):
    optimizer = torch.optim.LBFGS(
        node.parameters(), max_iter=max_iter, line_search_fn="strong_wolfe"
    )
    history = []

    def loss():
        optimizer.zero_grad()
        value = misfit(node)
        value.backward()
        history.append(value.item() ** 0.5)
        return value

    optimizer.step(loss)
    count, last = len(history), min(history)
    print(f"misfit {history[0]:.3f}, after {count} evaluations {last:.3f}")
    assert last < 0.03


model = Reaction([0.2, 6e6, 3e4])
node = dil.NeuralODE(model, **settings)
with torch.no_grad():
    guess = node(starts, t)
fit(node, max_iter=25)
found, rates = (part.log_rates.detach().exp() for part in (model, true))
names = ("A → B", "B + B → C + B", "B + C → A + C")
for name, was, now in zip(names, rates, found, strict=True):
    print(f"{name:14} true {was:.2e}  found {now:.3e}")
assert torch.allclose(found, rates, rtol=0.05)

# %%
fine = torch.cat((torch.zeros(1), torch.logspace(-3, 4, 120)))
with torch.no_grad():
    learned = node(starts, fine)
fig, axes = plt.subplots(1, 3, figsize=(9, 3))
for k, axis in enumerate(axes):
    axis.semilogx(t[1:], guess[1:, 0, k], ":", color="0.5", label="first guess")
    axis.semilogx(fine[1:], learned[1:, 0, k], color="C0", label="learned")
    seen = data[1:, 0, k]
    axis.semilogx(t[1:], seen, "o", ms=4, color="C1", label="measured")
    axis.set(title="ABC"[k], xlabel="t")
axes[0].legend(fontsize=8)
fig.suptitle("Robertson's reaction, the first experiment")
plt.show()

# %% [markdown]
# ## A law instead of a number
#
# Now suppose that we know the first two reactions, but not how the third one
# depends on C. Let a small network say: its rate is `10⁴ b net(c)`, with a
# `softplus` that keeps it positive. The truth would be `net(c) = c`, but nobody
# tells. Nothing else changes: the field is a module, and what it contains is
# its own business.


# %%
class Unknown(nn.Module):
    def __init__(self):
        super().__init__()
        layers = nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1), nn.Softplus()
        self.net = nn.Sequential(*layers)

    def forward(self, t, y):
        a, b, c = y.unbind(-1)
        slow, fast = 0.04 * a, 3e7 * b * b
        back = 1e4 * b * self.net(c.unsqueeze(-1)).squeeze(-1)
        return torch.stack((back - slow, slow - fast - back, fast), dim=-1)


unknown = Unknown()
node = dil.NeuralODE(unknown, **settings)
c = torch.linspace(0, 0.9, 50)
with torch.no_grad():
    law_before = unknown.net(c.unsqueeze(-1))
fit(node, max_iter=40)
with torch.no_grad():
    law = unknown.net(c.unsqueeze(-1)).squeeze(-1)
print(f"largest error of the law: {(law - c).abs().max():.3f}")
assert (law - c).abs().max() < 0.08

# %%
fig, axis = plt.subplots(figsize=(6, 3.2))
axis.plot(c, law_before, ":", color="0.5", label="before learning")
axis.plot(c, law, label="learned")
axis.plot(c, c, "--", color="C1", label="true")
axis.set(title="The learned law", xlabel="amount of C", ylabel="net(c)")
axis.legend()
plt.show()

# %% [markdown]
# ## The gradient report
#
# `node.report` is about the last call; here one more evaluation of the misfit
# and its gradient. The check compares the derivatives by the weights of the
# network with finite differences. It looks at every number that comes out, so B
# is divided by its size.

# %%
misfit(node).backward()
print(node.report)
assert bool(node.report.forward.converged.all())
assert bool(node.report.backward.converged.all())

# %%
verdict = dil.check_gradient(
    lambda: node(starts, t) / torch.tensor([1.0, 1e-5, 1.0])
)
print(verdict)
assert verdict.ok

# %% [markdown]
# How to read it. **forward**: each of the two experiments took steps of its
# own. The residual is that of the implicit equations of all steps, and well
# below what the tolerance of the integration asks. **backward**: `Bidiagonal`
# is a direct solve that uses what J is like, each step knowing only itself and
# the one before. In the check there are two solves: the steps (1), and the
# outputs between them (2). The derivatives by the layer, by differences and
# through unrolled steps agree, to the error that the changing grid of adaptive
# steps leaves in the differences.
#
# To go on: put a field of yours in the place of `Unknown`. [Differential
# equations](../ode.md) has the methods, batches and failures.
