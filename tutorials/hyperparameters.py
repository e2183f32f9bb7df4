# %% [markdown]
# # Hyper-parameters by implicit gradients
#
# How strongly should a model be regularised? Which of the training examples
# should it believe? The usual way is to try values on a grid. That works for
# one number and is hopeless for two hundred. But trained weights are an argmin,
# `w(λ) = argmin_w loss(w, λ)`, so they have a derivative by λ, and the loss on
# validation data can be minimised by gradients like anything else: *bilevel*
# optimisation. Here it chooses a penalty, and then finds the wrong labels in a
# training set by giving each example a weight of its own.

# %%
import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_breast_cancer
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler
from torch.nn.functional import (
    binary_cross_entropy_with_logits as cross_entropy,
)

import torchdil as dil

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)

# %% [markdown]
# ## Data
#
# 569 tumours, 30 measurements each, malignant (0) or benign (1). 200 are for
# training, 100 for validation and 269 for the test, which nothing else sees. A
# quarter of the training labels are wrong: we flip them, and tell nobody. A
# constant behind the features is for the intercept.

# %%
features, labels = load_breast_cancer(return_X_y=True)
order = torch.randperm(len(labels))
train, val, test = order[:200], order[200:300], order[300:]
features = torch.as_tensor(
    StandardScaler().fit(features[train]).transform(features)
)
X, Y = (
    torch.cat((features, torch.ones(len(labels), 1)), dim=1),
    torch.as_tensor(labels).double(),
)
wrong = torch.rand(200) < 0.25
given = torch.where(wrong, 1 - Y[train], Y[train])


def loss_on(rows, w):
    return cross_entropy(X[rows] @ w, Y[rows])


# %% [markdown]
# ## The inner problem is a layer
#
# Logistic regression with a penalty exp(λ) on the weights and a weight
# sigmoid(v_i) for each example. It is convex with one solution, which Newton's
# method finds in a few steps. Backward, the system with the Hessian is solved
# by CG, the method for symmetric positive definite matrices.
# `on_failure="raise"` makes a solve that fails an error: a search that runs
# unattended should not go on from there. With equal weights, 1/2 each, it is
# scikit-learn's model with C = 1/(2 exp λ), and must agree with it.


# %%
def score(w, v, penalty):
    examples = cross_entropy(X[train] @ w, given, reduction="none")
    return (v.sigmoid() * examples).sum() + 0.5 * penalty.exp() * (
        w[:-1] ** 2
    ).sum()


def trained(v, penalty):
    return dil.argmin(
        score,
        torch.zeros(31),
        (v, penalty),
        linear_solver=dil.CG(),
        on_failure="raise",
    )


v, penalty = torch.zeros(200), torch.tensor(0.5)
w = trained(v, penalty).value
reference = LogisticRegression(
    C=1 / (2 * penalty.exp().item()), tol=1e-10, max_iter=10_000
).fit(X[train, :-1], given)
sklearn_w = torch.as_tensor(reference.coef_[0])
off = (w[:-1] - sklearn_w).abs().max()
print(f"largest difference from scikit-learn's weights: {off:.1e}")
assert torch.allclose(w[:-1], sklearn_w, atol=1e-5)

# %% [markdown]
# ## One hyper-parameter
#
# `trained` is differentiable, so the validation loss is a function of λ with a
# derivative. With one hyper-parameter a grid can show us the curve; the
# derivatives by the theorem are drawn as tangents, and compared with finite
# differences.

# %%
grid = torch.linspace(-4, 8, 25)
curve = torch.stack([loss_on(val, trained(v, value).value) for value in grid])
fig, axis = plt.subplots(figsize=(6, 3.4))
axis.plot(grid, curve, color="C0", label="validation loss, 25 solves")
for at in (-3.0, -1.0, 5.0, 7.0):
    penalty = torch.tensor(at, requires_grad=True)
    loss = loss_on(val, trained(v, penalty).value)
    (slope,) = torch.autograd.grad(loss, penalty)
    ahead, behind = (
        loss_on(val, trained(v, torch.tensor(at + h)).value)
        for h in (1e-4, -1e-4)
    )
    assert abs(slope - (ahead - behind) / 2e-4) < 1e-6
    ends = torch.tensor([-0.8, 0.8])
    axis.plot(
        at + ends,
        (loss + slope * ends).detach(),
        color="C1",
        lw=3,
        label="implicit derivative" if at == 7 else None,
    )
axis.set(
    title="One penalty for all weights",
    xlabel="λ, the logarithm of the penalty",
    ylabel="validation loss",
)
axis.legend()
plt.show()

# %% [markdown]
# ## Two hundred
#
# Now the weight of each example, with the best penalty of the grid. A step
# costs one solve forward and one linear solve backward, however many
# hyper-parameters there are. Validation data can be overfitted, too, the more
# easily the more is chosen by them: 20 steps, not 200.

# %%
penalty, v = grid[curve.argmin()], torch.zeros(200, requires_grad=True)
optimizer = torch.optim.Adam([v], lr=0.3)
history = []
for _ in range(21):
    optimizer.zero_grad()
    solution = trained(v, penalty)
    loss = loss_on(val, solution.value)
    loss.backward()
    history.append((loss.item(), loss_on(test, solution.value).item()))
    optimizer.step()
for name, k in (("all examples alike", 0), ("learned weights", -1)):
    on_val, on_test = history[k]
    print(f"{name:18}  validation loss {on_val:.3f}, test loss {on_test:.3f}")
low = v.detach() < 0
caught = (wrong & low).sum() / wrong.sum()
suspected = (~wrong & low).sum() / (~wrong).sum()
print(
    f"lost weight: {caught:.0%} of wrong labels, {suspected:.0%} of right ones"
)
assert (
    history[-1][1] < 0.6 * history[0][1] and caught > 0.8 and suspected < 0.25
)

# %%
fig, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2))
left.plot(history, label=("validation", "test"))
left.set(
    title="Loss while the examples are weighed", xlabel="step", ylim=(0, None)
)
left.legend()
bins = torch.linspace(0, 1, 21)
right.hist(
    [v.detach()[~wrong].sigmoid(), v.detach()[wrong].sigmoid()],
    bins,
    stacked=True,
    label=["right label", "wrong label"],
)
right.set(title="The learned weights", xlabel="weight", ylabel="examples")
right.legend()
plt.show()

# %% [markdown]
# ## The gradient report
#
# Of the last step of the search, and the check of the whole map from weights to
# trained model.

# %%
print(solution.report)

# %%
verdict = dil.check_gradient(trained, v, penalty)
print(verdict)
assert verdict.ok

# %% [markdown]
# How to read it. **forward**: Newton's method, a residual far below its
# tolerance: one more step would change nothing. **backward**: CG needs no more
# steps than there are unknowns, 31. Its Ritz values are estimates of the
# smallest and largest eigenvalue of the Hessian: both positive, so w is a
# minimum, and their quotient, the condition number, says how hard the system
# was. "of g" is the relative error that the backward solve adds to the
# gradient.
