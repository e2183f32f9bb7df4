"""Many forward and backward passes, with exceptions in the middle of some: memory must stay flat, and answers right.

`python tests/endurance.py --calls 10000 [--device cuda]` prints the memory as it goes.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import itertools
import queue
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import torchdil as dil
from torchdil import traced

# Before this many calls, caches fill and functions are traced; and after this many, calls repeat themselves.
WARM, PERIOD = 200, 40


class Broken(Exception):  # noqa: N818 (planned)
    """Thrown by a function in the middle of something."""


_places = itertools.count()


class Fault:
    """An exception that is to be thrown; what a trace is kept under does not look into libraries, where it is hidden.

    There, in a queue of its own: where ("forward", at the third call from now, "trace", while it is traced, or ""), the kind
    of the exception, the calls that are left.
    """

    def __init__(self) -> None:
        self.place = next(_places)
        vars(queue).setdefault("hidden", {})[self.place] = queue.SimpleQueue()
        self._hidden().put(("", Broken, 0))

    def _hidden(self) -> queue.SimpleQueue[tuple[str, Any, int]]:
        return vars(queue)["hidden"][self.place]

    @property
    def where(self) -> str:
        return self._change(lambda *state: state)[0]

    def __reduce__(self) -> tuple[type[Fault], tuple[()]]:
        return Fault, ()

    def plant(self, where: str, kind: Any = Broken) -> None:
        self._change(lambda *_: (where, kind, 3))

    def met(self) -> None:
        """Throw it if it is time."""

        def next_state(where: str, kind: Any, left: int) -> tuple[str, Any, int]:
            tracing = getattr(traced._here, "tracing", False)
            due = (where == "trace" and tracing) or (where == "forward" and left <= 1)
            return "" if due else where, kind, left - 1

        where, kind, _ = self._change(next_state)
        if where and not self.where:
            raise kind(f"in the middle of a {where}")

    def _change(self, change: Callable[..., tuple[str, Any, int]]) -> tuple[str, Any, int]:
        """What it was before."""
        hidden = self._hidden()
        state = hidden.get()
        hidden.put(change(*state))
        return state


class Score(nn.Module):
    """½ ‖y - x‖² + Σ softplus(W y), with a fault that can be planted."""

    def __init__(self, n: int = 4):
        super().__init__()
        W = torch.randn(n, n, generator=torch.Generator().manual_seed(0), dtype=torch.float64, device="cpu")
        self.W = nn.Parameter(0.5 * W)
        self.fault = Fault()

    def forward(self, y: Tensor, x: Tensor) -> Tensor:
        self.fault.met()
        return 0.5 * ((y - x) ** 2).sum(-1) + nn.functional.softplus(y @ self.W.mT).sum(-1)


def expected(score: Score, x: Tensor) -> tuple[Tensor, Tensor]:
    """y and the gradient of Σ y² with respect to x, by Newton's method and dense solves, a sample at a time."""
    W, found = score.W.detach(), []
    for row in x.detach():
        y = torch.zeros_like(row)
        for _ in range(30):
            s = torch.sigmoid(W @ y)
            H = torch.eye(len(y), dtype=y.dtype, device=y.device) + W.mT @ torch.diag(s * (1 - s)) @ W
            y = y - torch.linalg.solve(H, y - row + W.mT @ s)
        found.append((y, torch.linalg.solve(H, 2 * y)))
    return torch.stack([y for y, _ in found]), torch.stack([g for _, g in found])


def check(layer: nn.Module, x: Tensor, tolerance: float = 1e-8) -> None:
    """A forward and a backward pass, compared with the oracle."""
    x = x.detach().requires_grad_()
    y = layer(x)
    (grad,) = torch.autograd.grad((y**2).sum(), x)
    want = expected(layer.function, x)
    torch.testing.assert_close((y.detach(), grad), want, rtol=tolerance, atol=tolerance)


class Solved(Dataset):
    """x, y and the gradient of Σ y², worked out where the dataset is."""

    def __init__(self, layer: nn.Module, length: int = 6):
        self.layer, self.length = layer, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(3, 4, generator=generator, dtype=torch.float64, device="cpu").requires_grad_()
        for _ in range(3):  # in a worker it is traced on the way
            y = self.layer(x)
            (grad,) = torch.autograd.grad((y**2).sum(), x)
        return x.detach(), y.detach(), grad


def raises_in_backward(_: Tensor) -> Tensor:
    raise Broken("in the middle of a backward pass")


class Work:
    """One of each kind of layer, called in turn with so many samples each."""

    def __init__(self, device: str, samples: int = 500):
        self.device, self.samples = device, samples
        self._generator = torch.Generator().manual_seed(1)
        self.score = Score().to(device)
        self.argmin = dil.ArgminLayer(self.score, init=(4,), linear_solver=dil.CG(rtol=1e-11))
        self.last = dil.ArgminLayer(self.score, init=dil.LastSolution((4,)))
        self.linear = nn.Linear(4, 4, dtype=torch.float64).to(device)
        self.deq = dil.FixedPointLayer(lambda y, x: 0.5 * torch.tanh(self.linear(y) + x), init=(4,), solver=dil.Anderson())
        self.root = dil.RootLayer(lambda y, x: y**3 + 2 * y + 0.1 * self.linear(y) - x, init=(4,), linear_solver=dil.GMRES())
        self.node = dil.NeuralODE(lambda t, y: torch.tanh(self.linear(y)) - y, method="trapezoid")
        self.times = torch.linspace(0, 1, 3, dtype=torch.float64, device=device)
        self.mpc = dil.control.MPC(lambda x, u: x + 0.1 * torch.tanh(self.linear(x)) + 0.1 * u, self.cost, 2, 4)
        self.optimiser = torch.optim.SGD(self.parameters(), lr=1e-3)

    def parameters(self) -> list[Tensor]:
        return [*self.score.parameters(), *self.linear.parameters()]

    def cost(self, x: Tensor, u: Tensor) -> Tensor:
        return (x**2).sum(-1) + (u**2).sum(-1)

    def draw(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._generator, dtype=torch.float64).to(self.device)

    def riccati(self, x: Tensor) -> Tensor:
        A = 0.5 * torch.eye(4, dtype=x.dtype, device=x.device) + 0.1 * self.linear.weight
        eye = torch.eye(4, dtype=x.dtype, device=x.device)
        return dil.control.dare(A, eye, eye, eye) * x.mean()

    def ways(self) -> list[Callable[[Tensor], Tensor]]:
        return [
            self.argmin,
            self.argmin,
            self.last,
            self.deq,
            self.root,
            lambda x: self.node(x, self.times),
            self.riccati,
            self.mpc,
        ]

    def call(self, k: int) -> None:
        """Call number k: a step of training; every tenth is broken off by an exception."""
        ways = self.ways()
        way, x = ways[k % len(ways)], self.draw(self.samples, 4).requires_grad_()
        broken = k % 10 == 9
        if broken and way in (self.argmin, self.last):
            self.score.fault.plant("forward")
        self.optimiser.zero_grad()
        try:
            y = way(x)
            if broken:
                (x.register_hook if k % 20 == 9 else y.register_hook)(raises_in_backward)
            (y**2).mean().backward()
            self.optimiser.step()
        except Broken:
            if not broken:
                raise
        self.score.fault.plant("")


def memory(device: str) -> dict[str, float]:
    """Live tensors, MB of this process and, on a GPU, MB of tensors there."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # what is free and kept for later is no leak
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * 4096 / 2**20
    tensors = sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())  # isinstance would wake lazy modules
    found: dict[str, Any] = {"tensors": tensors, "resident": resident}
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
        found["allocated"] = torch.cuda.memory_allocated(device) / 2**20
        found["reserved"] = torch.cuda.memory_reserved(device) / 2**20
    return found


def endure(
    calls: int, device: str, looks: int = 5, say: Callable[[str], None] = lambda _: None, forget: bool = False
) -> list[dict[str, float]]:
    """The memory after the warm-up, and at so many times until the last call; if told so without traces, which are bounded."""
    work, seen = Work(device), []
    marks = {WARM + (calls - WARM) * look // (looks * PERIOD) * PERIOD for look in range(looks + 1)}
    began = time.perf_counter()
    for k in range(calls + 1):
        if k in marks:
            if forget:
                traced.forget_all()
            seen.append(memory(device))
            numbers = ", ".join(f"{name} {value:.1f}" for name, value in seen[-1].items())
            say(f"{k:6d} calls, {time.perf_counter() - began:.0f} s: {numbers}")
        work.call(k)
    check(work.argmin, work.draw(3, 4))
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description="Many calls with flat memory.")
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--device", default="cpu")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    endure(chosen.calls, chosen.device, 10, lambda text: print(text, flush=True))


if __name__ == "__main__":
    main()
