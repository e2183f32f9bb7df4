# %% [markdown]
# # A deep equilibrium classifier
#
# A deep network applies one layer after another. If all layers are the same
# one, `y ← g(y, x)`, and there are many, y comes to rest: then `y = g(y, x)`, a
# *fixed point*. A deep equilibrium model (DEQ) has that as its definition. It
# is one layer with the depth of infinitely many; a solver finds y in as few
# steps as it can, and the backward pass needs only y, not the way there. Here
# such a layer learns to read handwritten digits.

# %%
import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split
from torch import nn

import torchdil as dil

torch.manual_seed(0)

# %% [markdown]
# ## Data, and a baseline
#
# scikit-learn has 1797 images of 8 x 8 pixels. Logistic regression shows what a
# model without hidden layers reaches.

# %%
pixels, labels = load_digits(return_X_y=True)
split = train_test_split(
    pixels / 8 - 1, labels, test_size=0.5, random_state=0, stratify=labels
)
X, X_test, Y, Y_test = (torch.as_tensor(part) for part in split)
X, X_test = X.float(), X_test.float()
baseline = (
    LogisticRegression(max_iter=1000)
    .fit(X.numpy(), Y.numpy())
    .score(X_test.numpy(), Y_test.numpy())
)
print(
    f"{len(X)} images to learn from, {len(X_test)} to test; "
    f"logistic regression reads {baseline:.1%} of these"
)

# %% [markdown]
# ## The layer
#
# `g(y, x) = tanh(W y + U x + b)`, with 96 unknowns y for each image. Not every
# W will do. Where g stretches distances there may be several fixed points, or
# none that a solver finds. Where it shrinks them by a factor below 1 there is
# exactly one, and every start leads there. tanh never stretches; W shrinks if
# the absolute values in each of its rows add up to less than 1. So we scale the
# rows that exceed 0.9, and no training can break the layer.


# %%
class Cell(nn.Module):
    def __init__(self, inputs, units):
        super().__init__()
        self.W = nn.Parameter(torch.randn(units, units) / units)
        self.U = nn.Linear(inputs, units)

    def forward(self, y, x):
        W = self.W * (0.9 / self.W.abs().sum(dim=1, keepdim=True)).clamp(max=1)
        return torch.tanh(y @ W.T + self.U(x))


# %% [markdown]
# `Anderson` is the usual solver for fixed points: it takes the steps `y ←
# g(y)`, and extrapolates from the last few. The backward solve is by GMRES:
# products with the Jacobian of g, no matrix. `init=(96,)` starts each image
# from zero.

# %%
equilibrium = dil.FixedPointLayer(
    Cell(64, 96), init=(96,), solver=dil.Anderson(), linear_solver=dil.GMRES()
)
model = nn.Sequential(equilibrium, nn.Linear(96, 10))

# %% [markdown]
# ## Training
#
# It is a module like any other. The model trains in float32, where a solve ends
# at about 10⁻⁵ of the size of y: plenty for a classifier. A little noise on the
# images keeps it from learning them by heart. We note how many steps the solver
# takes: a measure of how "deep" the layer is at the time.

# %%
epochs, accuracies, steps = 12, [], []
optimizer = torch.optim.AdamW(model.parameters(), weight_decay=1e-2)
schedule = torch.optim.lr_scheduler.OneCycleLR(
    optimizer, 0.02, epochs=epochs, steps_per_epoch=len(X.split(64))
)
for _ in range(epochs):
    for batch in torch.randperm(len(X)).split(64):
        optimizer.zero_grad()
        images = X[batch] + 0.3 * torch.randn_like(X[batch])
        nn.functional.cross_entropy(model(images), Y[batch]).backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        accuracies.append(
            (model(X_test).argmax(dim=1) == Y_test).float().mean().item()
        )
    steps.append(equilibrium.report.forward.stats.steps.float().mean().item())
print(
    f"the model reads {accuracies[-1]:.1%} of the test images, "
    f"logistic regression {baseline:.1%}"
)
assert accuracies[-1] > baseline

# %%
fig, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2))
left.plot(
    range(1, epochs + 1),
    [100 * a for a in accuracies],
    "o-",
    ms=4,
    label="equilibrium model",
)
left.axhline(100 * baseline, ls="--", color="C1", label="logistic regression")
left.set(title="Test images read correctly", xlabel="epoch", ylabel="%")
left.legend(loc="lower right")
right.plot(range(1, epochs + 1), steps, "o-", ms=4)
right.set(
    title="Steps of Anderson, mean of the test images",
    xlabel="epoch",
    ylim=(0, None),
)
plt.show()

# %% [markdown]
# ## What is the backward solve worth?
#
# Some train such models without it: `JacobianFree()` takes the gradient as if y
# had come from one last application of g. That costs nothing, and is wrong by
# as much as g still depends on y. Between it and the exact gradient lies
# `Neumann`, the sum of so many applications. Here are their errors in the
# gradient of the recurrent weights W, for 100 test images, in float64.

# %%
model, X_test = model.double(), X_test.double()


def gradient(linear_solver):
    equilibrium.linear_solver = linear_solver
    loss = nn.functional.cross_entropy(model(X_test[:100]), Y_test[:100])
    return torch.autograd.grad(loss, equilibrium.function.W)[0].flatten()


exact = gradient(dil.Dense())
for solver in (
    dil.JacobianFree(),
    dil.Neumann(max_steps=2),
    dil.Neumann(max_steps=8),
    dil.GMRES(),
):
    g = gradient(solver)
    name, stats = type(solver).__name__, equilibrium.report.backward.stats
    error = (g - exact).norm() / exact.norm()
    print(f"{name:12} {stats.steps.max():2} steps, relative error {error:.1e}")
assert torch.allclose(gradient(dil.GMRES()), exact, rtol=1e-6, atol=1e-10)

# %% [markdown]
# ## The gradient report
#
# The report of the last call, as text and as a figure, and the check against
# finite differences.

# %%
print(equilibrium.report)
equilibrium.report.plot().suptitle("Both solves of 100 test images")
plt.show()

# %%
verdict = dil.check_gradient(model, X_test[:4])
print(verdict)
assert verdict.ok

# %% [markdown]
# How to read it. Every image is a problem of its own: `converged 100` says that
# all were solved, and the steps are those of the easiest and the hardest. The
# smallest singular value of the Jacobian of `y - g(y, x)` is not near zero, as
# it must be with a g that shrinks; a training that drives it towards zero shows
# here first. In the check, the largest error is that of W: its scaling has
# kinks (`abs` and `clamp`), and the differences step over some of the 96 x 96.
# No solve adds anything, so the gradient of this model is right.
