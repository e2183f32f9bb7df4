# %% [markdown]
# # Bilevel image denoising
#
# A classical way to clean an image x: look for the image y that is near x and
# looks like an image, `y = argmin ½‖y - x‖² + R(y)`. A *field of experts* makes
# R from filters: images have weak responses to the right filters almost
# everywhere, noise does not. Which filters, and how much each counts, can be
# learned: choose them such that the *minimiser* is close to the clean image.
# That is a problem within a problem, and the inner one is a layer.

# %%
import math

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import conv2d

import torchdil as dil

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)

# %% [markdown]
# ## Data
#
# Digits of 8 x 8 pixels between 0 and 1, with strong noise added: 80 to learn
# from, 200 others for the test. The quality of an image is its PSNR, the peak
# signal-to-noise ratio in decibel; 3 dB more is half the squared error.

# %%
images = torch.as_tensor(load_digits().images) / 16
order = torch.randperm(len(images))
clean, clean_test = images[order[:80]], images[order[-200:]]
noisy, noisy_test = (
    part + 0.25 * torch.randn_like(part) for part in (clean, clean_test)
)


def psnr(y, target):
    return -10 * (y.detach() - target).square().mean().log10().item()


# %% [markdown]
# ## The energy
#
# `R(y) = Σ_k exp(α_k) Σ_pixels φ((f_k * y)_pixel)` with 8 filters f_k of 3 x 3
# pixels. φ(r) = √(r² + ε²) is close to |r|, so that a few strong responses
# (edges) are allowed, but smooth: the theorem needs a derivative at the
# minimum, and |r| has none just where the minimiser likes to be. The energy is
# convex, with one minimum. It returns one number for each image, so each image
# is a problem of its own.
#
# The filters start as the cosine patterns of image compression, less the
# constant one.


# %%
class FieldOfExperts(nn.Module):
    def __init__(self, log_weight):
        super().__init__()
        waves = torch.stack(
            [
                torch.cos(math.pi * (torch.arange(3) + 0.5) * k / 3)
                for k in range(3)
            ]
        )
        waves = waves / waves.norm(dim=1, keepdim=True)
        self.filters = nn.Parameter(
            torch.einsum("ia,jb->ijab", waves, waves).reshape(9, 1, 3, 3)[1:]
        )
        self.log_weights = nn.Parameter(torch.full((8,), log_weight))

    def forward(self, y, x):
        responses = conv2d(y.unsqueeze(1), self.filters, padding=1)
        rest = (responses.square() + 0.05**2).sqrt().sum(
            dim=(2, 3)
        ) @ self.log_weights.exp()
        return 0.5 * (y - x).square().sum(dim=(1, 2)) + rest


# %% [markdown]
# ## The layer
#
# 64 unknowns for each of 80 images. `LBFGS` needs only gradients of the energy,
# `CG` only products with its Hessian, so larger images are no other matter. The
# steps of the outer problem are rough, and six digits of its gradient are
# plenty: `rtol=1e-6`. The search starts from the noisy image.


# %%
def denoiser(log_weight):
    return dil.ArgminLayer(
        FieldOfExperts(log_weight),
        solver=dil.LBFGS(rtol=1e-6),
        linear_solver=dil.CG(rtol=1e-6),
        init=lambda x: x,
    )


# %% [markdown]
# The untrained model, to be fair, gets the best weight of a grid, the same for
# all filters.

# %%
with torch.no_grad():
    grid = {
        weight: psnr(denoiser(weight)(noisy), clean)
        for weight in (-4.5, -4.0, -3.5, -3.0, -2.5)
    }
    best = max(grid, key=grid.get)
    untrained = denoiser(best)(noisy_test)
for weight, value in grid.items():
    print(f"weight exp({weight}): training PSNR {value:.2f} dB")

# %% [markdown]
# ## Learning the filters
#
# Forward: minimise 80 energies. Backward: 80 linear systems with their
# Hessians, then one gradient of the energy by the filters and weights: 80
# numbers in all. Nothing of the way that L-BFGS went is kept or differentiated.

# %%
layer = denoiser(best)
optimizer = torch.optim.Adam(layer.parameters(), lr=0.08)
history = []
for _ in range(30):
    optimizer.zero_grad()
    y = layer(noisy)
    (y - clean).square().mean().backward()
    optimizer.step()
    history.append(psnr(y, clean))
with torch.no_grad():
    learned = layer(noisy_test)
results = {"noisy": noisy_test, "untrained": untrained, "learned": learned}
for name, y in results.items():
    print(f"{name:10} test PSNR {psnr(y, clean_test):5.2f} dB")
assert (
    psnr(learned, clean_test)
    > psnr(untrained, clean_test) + 0.5
    > psnr(noisy_test, clean_test) + 2
)

# %%
fig, axes = plt.subplots(4, 10, figsize=(9, 3.9))
for row, (name, y) in zip(
    axes, {"clean": clean_test, **results}.items(), strict=True
):
    for axis, image in zip(row, y, strict=False):
        axis.imshow(image.numpy(), cmap="gray", vmin=0, vmax=1)
        axis.set(xticks=[], yticks=[])
        axis.grid(False)
    row[0].set_ylabel(name)
fig.suptitle("Test images")
plt.show()

# %%
fig = plt.figure(figsize=(9, 2.6))
left, right = fig.subfigures(1, 2, width_ratios=(1, 1.2))
axis = left.subplots()
axis.plot(history)
axis.axhline(grid[best], ls="--", color="C1", label="untrained")
axis.set(title="PSNR of the training images", xlabel="step", ylabel="dB")
axis.legend()
weights = layer.function.log_weights.detach()
for k, axis in zip(
    weights.argsort(descending=True), right.subplots(2, 4).flat, strict=True
):
    axis.imshow(
        layer.function.filters[k, 0].detach().numpy(),
        cmap="RdBu",
        vmin=-1,
        vmax=1,
    )
    axis.set(xticks=[], yticks=[])
    axis.set_title(f"weight {weights[k].exp():.3f}", fontsize=8)
    axis.grid(False)
plt.show()

# %% [markdown]
# ## The gradient report
#
# Of one more step, as text and as a figure, and the check.

# %%
(layer(noisy) - clean).square().mean().backward()
print(layer.report)
layer.report.plot().suptitle("Both solves of 80 images")
plt.show()
assert bool(layer.report.forward.converged.all())
assert bool(layer.report.backward.converged.all())

# %%
verdict = dil.check_gradient(layer, noisy[:2])
print(verdict)
assert verdict.ok

# %% [markdown]
# How to read it. The tolerances are those we asked for, 10⁻⁶ of the natural
# sizes, and the check says what that costs: the forward solve adds the most to
# the error of the gradient, and it is far below what counts as wrong. So the
# tolerances could be looser still. The Ritz values are the smallest and largest
# eigenvalues of the Hessians, as CG saw them. None is below 1, since the first
# term of the energy alone has the Hessian 1: the minimum is one, and CG is the
# right method.
