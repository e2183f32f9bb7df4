"""What processes do together, for `test_distributed`: each starts here, and imports no more than it needs."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import torchdil as dil
from torchdil import traced

# So many steps of training at least: layers are traced on the way.
STEPS = traced._PATIENCE + 3
RATE = 0.05


class Score(nn.Module):
    """A strictly convex score, (B,)."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 6), nn.Softplus(), nn.Linear(6, 4))

    def forward(self, y: Tensor, x: Tensor) -> Tensor:
        return ((y - x) ** 2).sum(-1) + 0.1 * (self.body(y) ** 2).sum(-1)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 3)

    def forward(self, y: Tensor, x: Tensor) -> Tensor:
        return y**3 + 2 * y + 0.3 * torch.tanh(self.body(y)) - x


def make_model(kind: str) -> nn.Sequential:
    torch.manual_seed(0)
    layer = dil.ArgminLayer(Score(), init=(3,)) if kind == "argmin" else dil.RootLayer(Residual(), init=(3,))
    return nn.Sequential(nn.Linear(2, 3), layer, nn.Linear(3, 1)).double()


def batches(rank: int) -> Iterator[Tensor]:
    """The inputs of a process: each has another number of them, of another size, and one of them is empty."""
    generator = torch.Generator().manual_seed(rank)
    for step in range(STEPS + rank):
        samples = 0 if step == 2 and rank == 0 else 1 + rank
        yield torch.randn(samples, 2, generator=generator, dtype=torch.float64)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return ((model(x) - x.sum(1, keepdim=True)) ** 2).sum()


def alone(kind: str, world: int) -> list[Tensor]:
    """The parameters after the training of `world` processes, in one."""
    model, inputs = make_model(kind), [list(batches(rank)) for rank in range(world)]
    optimiser = torch.optim.SGD(model.parameters(), lr=RATE)
    for step in range(max(map(len, inputs))):
        optimiser.zero_grad()
        for mine in inputs:
            if step < len(mine):
                (loss_of(model, mine[step]) / world).backward()
        optimiser.step()
    return [p.detach() for p in model.parameters()]


def data_parallel(kind: str, group: Any, rank: int) -> list[Tensor]:
    """The same by DDP, whose `join` lets processes without inputs shadow the others."""
    model = DistributedDataParallel(make_model(kind), process_group=group)
    optimiser = torch.optim.SGD(model.parameters(), lr=RATE)
    with model.join():
        for x in batches(rank):
            optimiser.zero_grad()
            loss_of(model, x).backward()
            optimiser.step()
    return [p.detach() for p in model.parameters()]


def trained(model: nn.Module, ranks: Sequence[int], world: int) -> nn.Module:
    """The model after a training in which these of the processes take part."""
    optimiser = torch.optim.SGD(model.parameters(), lr=RATE)
    for step in range(STEPS):
        optimiser.zero_grad()
        for rank in ranks:
            x = torch.randn(2, 2, generator=torch.Generator().manual_seed(step * world + rank), dtype=torch.float64)
            (loss_of(model, x) / len(ranks)).backward()
        optimiser.step()
    return model


def sharded(rank: int, world: int) -> list[Tensor]:
    """The parameters of a model whose layers are sharded, and the model around them, after that training."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (world,))
    model = make_model("argmin")
    for part in (*model, model):
        fully_shard(part, mesh=mesh)
    return [p.detach().full_tensor() for p in trained(model, [rank], world).parameters()]


def sharded_score(world: int) -> str:
    """What is said where the function of a layer is sharded alone."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    layer = make_model("argmin")[1]
    fully_shard(layer.function, mesh=init_device_mesh("cpu", (world,)))
    try:
        layer(torch.ones(2, 3, dtype=torch.float64)).sum().backward()
    except RuntimeError as error:
        return str(error)
    return ""


def work(rank: int, world: int, store: str, results: str) -> None:
    """All of it, in process `rank`; the first one writes what came out."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch, of its own hooks
            warnings.simplefilter("error", dil.ConvergenceWarning)
            found: dict[str, Any] = {"four": data_parallel("argmin", None, rank)}
            pair = dist.new_group([0, 1])
            if rank < 2:
                found["two"] = data_parallel("root", pair, rank)
            dist.barrier()
            found["traces"] = sum(memory.trace is not None for memory in traced._memories.values())
            found["sharded"] = sharded(rank, world)
            found["said"] = sharded_score(world)
        if rank == 0:
            torch.save(found, results)
        dist.barrier()
    finally:
        dist.destroy_process_group()
