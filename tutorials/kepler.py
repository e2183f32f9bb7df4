# %% [markdown]
# # Kepler's equation: your first implicit layer
#
# Where is a planet at a given time? Kepler's answer goes through an angle E,
# the eccentric anomaly, which solves
#
#     E - e sin E = M
#
# where M is the time as an angle (the mean anomaly) and e the eccentricity of
# the orbit. No formula gives E. A solver does, in a few steps, and an implicit
# layer is just that: *the output is whatever solves an equation*. This tutorial
# solves it, differentiates the answer, and learns an orbit from measurements.
# It uses float64, which costs little here and makes errors easy to see.

# %%
import math

import matplotlib.pyplot as plt
import torch

import torchdil as dil

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)

# %% [markdown]
# ## Solving
#
# An equation is stated as what must vanish: the residual `F(y, x)`, here of the
# unknown y = E and the input x = (e, M). The first axis is the batch, so these
# are 200 equations, each solved on its own. The default solver is Newton's
# method. M itself is a good start.


# %%
def kepler(E, x):
    e, M = x
    return E - e * torch.sin(E) - M


layer = dil.RootLayer(kepler, init=lambda x: x[1])

M = torch.linspace(0, 6.28, 200)
fig, axis = plt.subplots(figsize=(6, 3.6))
for e in (0.0, 0.5, 0.9):
    E = layer((torch.full_like(M, e), M))
    assert (E - e * torch.sin(E) - M).abs().max() < 1e-9
    axis.plot(M, E, label=f"e = {e}")
axis.set(
    title="The solution of Kepler's equation",
    xlabel="mean anomaly M (time)",
    ylabel="eccentric anomaly E",
)
axis.legend()
plt.show()

# %% [markdown]
# ## Differentiating
#
# How does E move when e does? Autograd through the steps of Newton's method
# would answer, at the price of remembering them all. The implicit function
# theorem needs only the answer: along the solution `F(E(e), e) = 0` stays zero,
# so `F_E dE/de + F_e = 0`, and
#
#     dE/de = sin E / (1 - e cos E).
#
# `backward()` does this for any F: it solves one linear system with the
# Jacobian `F_E`, by products, never by a formula from you. Here we have the
# formula, and can compare.

# %%
e = torch.full_like(M, 0.5).requires_grad_()
E = layer((e, M))
E.sum().backward()
closed_form = (torch.sin(E) / (1 - e * torch.cos(E))).detach()
off = (e.grad - closed_form).abs().max()
print(f"largest difference from the closed form: {off:.1e}")
assert torch.allclose(e.grad, closed_form, rtol=1e-9, atol=1e-12)

# %% [markdown]
# ## Learning an orbit
#
# Now use it inside a model. A planet was seen at 20 times, each position off by
# about 0.02. Unknown are the size of its orbit, the eccentricity, the time of a
# revolution, and where it was at time zero. The model goes from these four
# numbers through the layer to positions; `sigmoid` keeps e between 0 and 1,
# `exp` keeps size and period positive.


# %%
def decode(theta):
    return theta[0].exp(), theta[1].sigmoid(), theta[2].exp(), theta[3]


def positions(theta, t):
    size, e, period, phase = decode(theta)
    M = 2 * torch.pi * t / period + phase
    E = layer((e.expand_as(M), M))
    x, y = torch.cos(E) - e, (1 - e**2).sqrt() * torch.sin(E)
    return size * torch.stack((x, y), dim=-1)


def encode(size, e, period, phase):
    logit = math.log(e / (1 - e))
    return torch.tensor([math.log(size), logit, math.log(period), phase])


true = [1.5, 0.6, 2.0, 0.3]  # size, eccentricity, period, phase
t = torch.linspace(0, 3, 20)
seen = positions(encode(*true), t) + 0.02 * torch.randn(20, 2)

theta = encode(1.0, 0.2, 2.4, 0.0).requires_grad_()
first = positions(theta, t).detach()
optimizer = torch.optim.LBFGS(
    [theta], max_iter=60, line_search_fn="strong_wolfe"
)


def loss():
    optimizer.zero_grad()
    value = (positions(theta, t) - seen).square().mean()
    value.backward()
    return value


optimizer.step(loss)
found = torch.stack(decode(theta)).detach()
names = ("size", "eccentricity", "period", "phase")
for name, was, now in zip(names, true, found, strict=True):
    print(f"{name:12}  true {was:.3f}  found {now:.3f}")
misfit = loss().sqrt().item()
print(f"misfit {misfit:.4f} where the noise is 0.02")
assert torch.allclose(found, torch.tensor(true), atol=0.05) and misfit < 0.025

# %%
fig, axis = plt.subplots(figsize=(6, 3.9))
axis.plot(*first.T, ":", color="0.5", label="first guess, at the same times")
round_trip = torch.linspace(0, float(found[2]), 200)
axis.plot(*positions(theta, round_trip).detach().T, label="learned orbit")
axis.plot(*seen.T, "o", ms=4, label="measured")
axis.plot(0, 0, "*", ms=12, color="#E69F00", label="sun")
axis.set(
    title="An orbit learned from 20 noisy positions",
    xlabel="x",
    ylabel="y",
    aspect="equal",
)
axis.legend(loc="center left", bbox_to_anchor=(1, 0.5))
plt.show()

# %% [markdown]
# ## When the solver stops early
#
# The theorem is about the exact answer. A solver that stops short gives a
# gradient that is wrong, and nothing in the shape or size of the numbers shows
# it. So every solve is checked: the default, `on_failure="warn"`, warns. To
# find out how wrong, and who is to blame, ask `check_gradient`. It compares
# with finite differences of the exact solution, and takes the layer apart:

# %%
hasty = dil.ArgminLayer(
    lambda E, x: (
        kepler(E, x) ** 2
    ),  # the same equation as a least-squares problem
    init=lambda x: x[1],
    solver=dil.GradientDescent(max_steps=2, step_size=0.1),
    on_failure="ignore",  # we want to see what happens
)
x = torch.full((5,), 0.5), torch.linspace(0.5, 2.5, 5)
verdict = dil.check_gradient(hasty, x)
print(verdict)
assert not verdict.ok and verdict.blame == "forward solve"

# %% [markdown]
# ## The gradient report
#
# And the layer that learned the orbit? Its report says how both solves of the
# last call went, here one more of the loss and its gradient; the check says
# whether the gradient is right.

# %%
loss()
print(layer.report)
assert bool(layer.report.forward.converged.all())

# %%
verdict = dil.check_gradient(layer, x)
print(verdict)
assert verdict.ok

# %% [markdown]
# How to read it. **forward**: Newton's method; the residual `|F|` of the worst
# sample is below the tolerance that was asked of it, so E is solved.
# **backward**: the linear system of the theorem; it is 1 by 1 here, and solved
# directly. The last line of the report estimates how far the answer and the
# adjoint are from the exact ones. In the check, the columns `layer`,
# `differences` and `unrolled` are three independent ways to the same
# derivative: they agree, so the gradient is right.
