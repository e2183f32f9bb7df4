"""`pytest --device cuda`: where the tests that ask for a `device` put their tensors."""

import pytest
import torch


def pytest_addoption(parser):
    parser.addoption("--device", default="cpu", help="of the tensors of those tests that can be run anywhere, such as cuda")


@pytest.fixture(scope="session")
def device(request):
    name = request.config.getoption("--device")
    if name.startswith("cuda") and not torch.cuda.is_available():
        pytest.fail(f"--device must be one of this machine, which has no GPU that torch can use, got {name}.", pytrace=False)
    return name
