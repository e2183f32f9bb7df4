"""`pytest --device cuda`: tensors that tests make without naming a device are made there, of numbers drawn on the CPU."""

import functools

import pytest
import torch

from torchdil.traced import forget_all

# Of programs, pages and processes, whose computations have a device of their own, and of what is for the CPU alone.
ON_CPU = {
    "test_best",
    "test_cartpole",
    "test_comparison",
    "test_distributed",
    "test_docs",
    "test_experiments",
    "test_files",
    "test_inductor",
    "test_inexact",
    "test_kepler",
    "test_lqr_experiment",
    "test_main",
    "test_page",
    "test_preconditioning",
    "test_runner",
    "test_runtime",
    "test_scale",
    "test_single",
    "test_structure",
    "test_table1",
    "test_tutorials",
    "test_typing",
}


def pytest_addoption(parser):
    parser.addoption("--device", default="cpu", help="where tests put their tensors, such as cuda")


def pytest_configure(config):
    name = config.getoption("--device")
    if name == "cpu":
        return
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise pytest.UsageError(f"--device must be one of this machine, which has no GPU that torch can use, got {name}.")
    config.addinivalue_line("filterwarnings", "ignore:Attempting to run cuBLAS:UserWarning")  # torch, of threads of autograd
    for place, functions in (
        (torch, ("normal", "rand", "randint", "randn", "randperm")),
        (torch.Tensor, ("normal_", "uniform_")),
    ):
        for function in functions:
            setattr(place, function, _drawn_on_cpu(getattr(place, function), inplace=place is not torch))
    numpy = torch.Tensor.numpy
    torch.Tensor.numpy = lambda self, **options: numpy(self.cpu(), **options)  # for oracles


def _drawn_on_cpu(function, inplace):
    """So that a test has the same numbers everywhere."""

    @functools.wraps(function)
    def draw(*args, **options):
        generator = options.get("generator")
        if options.get("device") is not None or (generator is not None and generator.device.type != "cpu"):
            return function(*args, **options)
        if inplace:
            return args[0].copy_(function(torch.empty_like(args[0], device="cpu"), *args[1:], **options))
        grad = options.pop("requires_grad", False)
        return function(*args, **options, device="cpu").to(torch.get_default_device()).requires_grad_(grad)

    return draw


def _go_where(item):
    name = item.config.getoption("--device")
    if name != "cpu":
        torch.set_default_device("cpu" if item.path.stem in ON_CPU else name)


def pytest_collectstart(collector):
    if isinstance(collector, pytest.Module):
        _go_where(collector)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Tests that share something their module makes once go to one process."""
    for item in items:
        used = [made for name in item.fixturenames for made in item._fixtureinfo.name2fixturedefs.get(name, ())]
        if any(made.scope == "module" for made in used) and item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.module.__name__))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    _go_where(item)


@pytest.fixture(scope="session")
def device(request):
    """For the tests that name it."""
    return request.config.getoption("--device")


@pytest.fixture(autouse=True)
def _no_traces():
    """Layers that tests before this one have called are forgotten: what is rounded how must not depend on their order."""
    forget_all()
