# %% [markdown]
# # Learn dynamics from a regulator, through the Riccati equation
#
# A linear system `x' = A x + B u` has a best feedback `u = -K x` for each
# quadratic cost, the linear-quadratic regulator (LQR). K comes from a matrix S
# that solves the discrete algebraic Riccati equation (DARE); `dil.control.dlqr`
# solves it, and differentiates the solution. That turns the question round: if
# we see what an optimal controller does, what must the system be that it
# controls?

# %%
import matplotlib.pyplot as plt
import torch
from scipy.linalg import solve_discrete_are

import torchdil as dil

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)

# %% [markdown]
# ## The layer
#
# A mass on a weak spring, pushed by a motor, in steps of 0.2 s. The state is
# (position, speed), the control the force. How A and B come about is not our
# business; they are what we shall pretend not to know.

# %%
A = torch.tensor([[1.0, 0.2], [-0.1, 0.95]])
B = torch.tensor([[0.02], [0.2]])
K = dil.control.dlqr(A, B, Q=torch.eye(2), R=torch.eye(1))
print(f"u = -({K[0, 0]:.3f} position + {K[0, 1]:.3f} speed)")

# %% [markdown]
# ## What can be known
#
# K has two numbers, A has four and B two: one controller cannot tell the
# system. But several can, if their costs differ and are known: say, the same
# machine run with five settings between "keep the position" and "save power".
# `dlqr` takes batches: costs of shape (5, ...) give five gains, found together.
# SciPy solves the same Riccati equation, one at a time and without derivatives,
# and must agree.

# %%
Q = torch.diag_embed(
    torch.tensor([[0.1, 0.1], [1.0, 0.1], [10.0, 0.1], [0.1, 3.0], [10.0, 3.0]])
)
R = torch.tensor([1.0, 1.0, 0.3, 1.0, 0.1]).reshape(5, 1, 1)
expert = dil.control.dlqr(A, B, Q, R)  # (5, 1, 2)
for K, q, r in zip(expert, Q, R, strict=True):
    S = torch.as_tensor(
        solve_discrete_are(A.numpy(), B.numpy(), q.numpy(), r.numpy())
    )
    assert torch.allclose(
        K, torch.linalg.solve(r + B.T @ S @ B, B.T @ S @ A), rtol=1e-10
    )

# %% [markdown]
# We see each controller act in 40 states, with some noise.

# %%
states = torch.randn(5, 40, 2)
actions = -states @ expert.mT
actions = actions + 0.01 * torch.randn_like(actions)

# %% [markdown]
# ## Learning the system
#
# The guess is a system without a spring and without friction, and with a motor
# of half the strength. The loss compares actions; its gradient goes from them
# to the gains, through five Riccati equations, to A and B. Backward, the linear
# system of the theorem is a Stein equation, again between matrices, solved in
# O(n³).

# %%
A_guess, B_guess = (
    torch.tensor([[1.0, 0.2], [0.0, 1.0]]),
    torch.tensor([[0.0], [0.1]]),
)
A_learned, B_learned = (
    A_guess.clone().requires_grad_(),
    B_guess.clone().requires_grad_(),
)
optimizer = torch.optim.LBFGS(
    [A_learned, B_learned], max_iter=100, line_search_fn="strong_wolfe"
)
history = []


def loss():
    optimizer.zero_grad()
    K = dil.control.dlqr(A_learned, B_learned, Q, R)
    value = (-states @ K.mT - actions).square().mean()
    value.backward()
    history.append(value.item())
    return value


optimizer.step(loss)
for name, true, found in (("A", A, A_learned), ("B", B, B_learned)):
    print(f"{name} true    {true.tolist()}")
    rounded = [[round(number, 3) for number in row] for row in found.tolist()]
    print(f"{name} learned {rounded}")
first, last = history[0] ** 0.5, min(history) ** 0.5
print(
    f"off by {first:.3f} at first, {last:.4f} after {len(history)} evaluations"
)
assert torch.allclose(A_learned, A, atol=0.01) and torch.allclose(
    B_learned, B, atol=0.01
)

# %% [markdown]
# All six numbers are found. One of the five controllers alone would be matched
# as well, but by another system: try `Q[:1]` and `R[:1]`.
#
# ## Using it
#
# Knowing the system, we can design what nobody has shown: a regulator for a new
# cost, here a much faster one. Designed on the first guess it makes the true
# system unstable; designed on what was learned it is as good as one designed on
# the truth.

# %%
Q_new, R_new = torch.diag(torch.tensor([100.0, 0.1])), torch.tensor([[0.1]])
designs = {
    "true system": (A, B),
    "first guess": (A_guess, B_guess),
    "learned": (A_learned.detach(), B_learned.detach()),
}
fig, axis = plt.subplots(figsize=(6, 3.4))
costs = {}
for (name, (A_model, B_model)), style in zip(
    designs.items(), ("-", ":", "--"), strict=True
):
    K = dil.control.dlqr(A_model, B_model, Q_new, R_new)
    x, positions, costs[name] = torch.tensor([[1.0], [0.0]]), [], 0.0
    for _ in range(30):
        u = -K @ x
        positions.append(x[0].item())
        costs[name] += (x.T @ Q_new @ x + u.T @ R_new @ u).item()
        x = A @ x + B @ u
    axis.plot(positions, style, lw=2, label=f"{name}: cost {costs[name]:.3g}")
axis.set(
    title="A new regulator at work on the true system",
    xlabel="step",
    ylabel="position",
)
axis.legend()
plt.show()
assert (
    costs["learned"] < 1.001 * costs["true system"] < costs["first guess"] / 10
)

# %% [markdown]
# ## The gradient report
#
# `dlqr` returns a matrix and keeps no report: where a system has no stabilising
# controller it warns, or raises with `on_failure="raise"`, and names the sample
# and the reason. `check_gradient` takes it apart all the same. Three ways to
# solve the backward system must agree, too: `Stein`, CG on the n² unknowns, and
# a dense matrix.

# %%
grads = []
for linear_solver in (dil.control.Stein(), dil.CG(), dil.Dense()):
    K = dil.control.dlqr(
        A_learned, B_learned, Q, R, linear_solver=linear_solver
    )
    grads.append(torch.autograd.grad(K.sum(), A_learned)[0])
assert all(torch.allclose(grads[0], other, rtol=1e-8) for other in grads[1:])
verdict = dil.check_gradient(
    lambda A, B: dil.control.dlqr(A, B, Q, R, on_failure="raise"),
    A_learned,
    B_learned,
)
print(verdict)
assert verdict.ok

# %% [markdown]
# How to read it. The rows are the tensors that the gains depend on; the
# derivative along a direction of each was found by the layer, by differences of
# the exact solution, and through unrolled steps of Newton's method, and the
# three agree. Below, what each part adds to the error: the function itself,
# `Doubling`, which solves the five Riccati equations at once, and `Stein`,
# which solves backward. All are at rounding.
