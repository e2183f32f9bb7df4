"""Layers whose backward solves are measured by `experiments.preconditioning`: argmins, so that J is the Hessian.

Each is learned for a few steps by Adam: the parameters change the curvature, as in training, and so does the solution.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, log_softmax, softplus

Tensors = tuple[Tensor, ...]
DIGITS = 10


class Problem(NamedTuple):
    """y = argmin_u energy(u, parameters, data), and what is learned.

    Attributes:
        energy: (B, n) -> (B,).
        parameters: are learned.
        data: other tensors of the energy.
        start: where the forward solves start, (B, n).
        loss: of the solution.
        learning_rate: of Adam.
    """

    energy: Callable[[Tensor, Tensors, Tensors], Tensor]
    parameters: Tensors
    data: Tensors
    start: Tensor
    loss: Callable[[Tensor], Tensor]
    learning_rate: float


def _random(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def _to(target: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda y: (y - target).square().mean()


def network(seed: int, size: float) -> Problem:
    """An energy network of two hidden layers, as in the paper: convex, and flat but for a little of ‖y - x‖²."""
    generator = torch.Generator().manual_seed(seed)
    samples, n, hidden = 8, round(200 * size), round(200 * size)
    first = 4 * _random(generator, n, hidden) / n**0.5
    second = 2 * _random(generator, hidden, hidden) / hidden**0.5
    x, target = _random(generator, samples, n), _random(generator, samples, n)

    def energy(y: Tensor, parameters: Tensors, data: Tensors) -> Tensor:
        first, second = parameters
        inner = softplus(softplus(y @ first) @ second.square() / len(second) ** 0.5)
        return 0.005 * (y - data[0]).square().sum(1) + inner.sum(1)

    return Problem(energy, (first, second), (x,), torch.zeros_like(x), _to(target), 0.01)


def scales(seed: int, size: float) -> Problem:
    """Unknowns of very different scales: condition numbers from 10 to 10⁴ in one batch."""
    generator = torch.Generator().manual_seed(seed)
    samples, n = 8, round(100 * size)
    powers = torch.linspace(1, 4, samples, dtype=torch.float64).unsqueeze(1)
    curvature = 10 ** (powers * torch.linspace(0, 1, n, dtype=torch.float64))
    weights = _random(generator, n, n) / n**0.5
    x, target = _random(generator, samples, n), _random(generator, samples, n)

    def energy(y: Tensor, parameters: Tensors, data: Tensors) -> Tensor:
        curvature, x = data
        return 0.5 * (curvature * (y - x).square()).sum(1) + softplus(y @ parameters[0]).sum(1)

    return Problem(energy, (weights,), (curvature, x), torch.zeros_like(x), _to(target), 0.01)


def few_large(seed: int, size: float) -> Problem:
    """A few directions of large curvature, different for each sample, and a network: eigenvalues from 1 to some thousands."""
    generator = torch.Generator().manual_seed(seed)
    samples, n, rank = 8, round(200 * size), 20
    strong = 5 * _random(generator, samples, n, rank) / torch.arange(1, rank + 1)
    weights = _random(generator, n, n) / n**0.5
    x, target = _random(generator, samples, n), _random(generator, samples, n)

    def energy(y: Tensor, parameters: Tensors, data: Tensors) -> Tensor:
        strong, x = data
        along = torch.einsum("bnk,bn->bk", strong, y)
        return 0.5 * (y - x).square().sum(1) + 0.5 * along.square().sum(1) + softplus(y @ parameters[0]).sum(1)

    return Problem(energy, (weights,), (strong, x), torch.zeros_like(x), _to(target), 0.01)


def regression(seed: int, size: float) -> Problem:
    """Softmax regression on handwritten digits; one ridge for each pixel is learned on other digits (a hyper-gradient)."""
    from sklearn.datasets import load_digits

    images, labels = (torch.as_tensor(array) for array in load_digits(return_X_y=True))
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    images = (images.double() / 16)[order]
    labels = labels[order]
    count = round(600 * size)
    pixels = images.shape[1]
    classes = torch.nn.functional.one_hot(labels[:count], DIGITS).double()
    held_out, held_out_labels = images[count : 2 * count], labels[count : 2 * count]

    def energy(y: Tensor, parameters: Tensors, data: Tensors) -> Tensor:
        weights = y.view(pixels, DIGITS)
        images, classes = data
        fit = -(classes * log_softmax(images @ weights, dim=1)).sum() / len(images)
        return (fit + 0.5 * (parameters[0].exp().unsqueeze(1) * weights.square()).sum()).unsqueeze(0)

    def loss(y: Tensor) -> Tensor:
        return cross_entropy(held_out @ y.view(pixels, DIGITS), held_out_labels)

    ridge = torch.full((pixels,), -7.0, dtype=torch.float64)
    start = torch.zeros(1, pixels * DIGITS, dtype=torch.float64)
    return Problem(energy, (ridge,), (images[:count], classes), start, loss, 0.1)


def denoising(seed: int, size: float) -> Problem:
    """A field of experts, ½‖y - x‖² + w Σ log cosh(K y): images with noise, K a bank of 5 x 5 filters that is learned."""
    generator = torch.Generator().manual_seed(seed)
    samples, side, count = 2, round(32 * size**0.5), 6
    filters = _random(generator, count, 1, 5, 5)
    filters = 3 * (filters - filters.mean(dim=(2, 3), keepdim=True)) / 5
    edges = torch.linspace(-1, 1, side, dtype=torch.float64)
    clean = torch.stack([((edges[:, None] + edges) * (k + 1)).sign() for k in range(samples)])
    noisy = clean + 0.5 * _random(generator, samples, side, side)

    def energy(y: Tensor, parameters: Tensors, data: Tensors) -> Tensor:
        response = torch.conv2d(y.view(len(y), 1, side, side), parameters[0], padding=2)
        prior = (softplus(2 * response) - response).sum(dim=(1, 2, 3))
        return 0.5 * (y - data[0]).square().sum(1) + 2 * prior

    x = noisy.flatten(1)
    return Problem(energy, (filters,), (x,), x.clone(), _to(clean.flatten(1)), 0.02)


def implicit_euler(seed: int, size: float) -> Problem:
    """One stiff step of backward Euler for a gradient flow, y = argmin_u ‖u - x‖² / 2h + E(u): reaction and diffusion.

    The conductivity between neighbours, which is learned, spans three orders of magnitude.
    """
    generator = torch.Generator().manual_seed(seed)
    samples, side, h = 2, round(24 * size**0.5), 0.05
    shape = (2, side, side)
    smooth = torch.nn.functional.avg_pool2d(_random(generator, *shape), 5, 1, 2, count_include_pad=False)
    conductivity = 3.5 * smooth / smooth.std() / 2 + 5
    x, target = (_random(generator, samples, side * side) for _ in range(2))

    def energy(y: Tensor, parameters: Tensors, data: Tensors) -> Tensor:
        u, (across, down) = y.view(-1, side, side), parameters[0].exp()
        flow = (across[1:] * (u[:, 1:] - u[:, :-1]).square()).sum(dim=(1, 2))
        flow = flow + (down[:, 1:] * (u[:, :, 1:] - u[:, :, :-1]).square()).sum(dim=(1, 2))
        reaction = (0.25 * y**4 - 0.5 * y.square()).sum(1)
        return (y - data[0]).square().sum(1) / (2 * h) + 0.5 * flow + reaction

    return Problem(energy, (conductivity,), (x,), x.clone(), _to(target), 0.05)


PROBLEMS: dict[str, Callable[[int, float], Problem]] = {
    "network": network,
    "scales": scales,
    "few_large": few_large,
    "regression": regression,
    "denoising": denoising,
    "implicit_euler": implicit_euler,
}
