"""`pytest --device cuda`: all tensors that tests make without naming a device are made there."""

import pytest
import torch

from torchdil.traced import forget_all


def pytest_addoption(parser):
    parser.addoption("--device", default="cpu", help="where tests put their tensors, such as cuda")


def pytest_configure(config):
    name = config.getoption("--device")
    if name == "cpu":
        return
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise pytest.UsageError(f"--device must be one of this machine, which has no GPU that torch can use, got {name}.")
    torch.set_default_device(name)
    generator, numpy = torch.Generator, torch.Tensor.numpy
    # Generators make numbers where the tensors are, and oracles in NumPy take what they are given.
    torch.Generator = lambda device=name: generator(device)
    torch.Tensor.numpy = lambda self, **options: numpy(self.cpu(), **options)


@pytest.fixture(scope="session")
def device(request):
    """For the tests that name it."""
    return request.config.getoption("--device")


@pytest.fixture(autouse=True)
def _no_traces():
    """Layers that tests before this one have called are forgotten: what is rounded how must not depend on their order."""
    forget_all()
