"""The comparison with peers: gradients are judged before times, what fails is shown as such, the page is of the results."""

import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.peers import ablation, compare, page
from benchmarks.peers.problems import Problem, arrays, objective, problems, residual
from benchmarks.peers.torch_side import OPS

ROOT = Path(__file__).parent.parent
EVERYTHING = {path.stem: json.loads(path.read_text()) for path in sorted((ROOT / "benchmarks" / "results").glob("*.json"))}
RESULTS = {name: EVERYTHING[name] for name in page.WHERE if name in EVERYTHING}


@pytest.fixture(scope="module")
def tiny():
    return compare.run("cpu", None, None, "tiny")


def test_processes_take_turns_and_agree(tiny):
    (one,) = tiny["cases"]
    assert one["label"] == "tiny, 2" and set(one["ratios"]) == {"untraced", "compiled", "handwritten"}
    for name in ("torchdil", "untraced", "compiled", "handwritten"):
        found = one["systems"][name]
        assert "error" not in found and found["gradient_error"] < 1e-10
        assert 0 < found["backward"]["median"] < found["both"]["median"]
    assert one["limit"]["method"] == "Dense" and one["limit"]["median"] > 0
    assert 0 < one["floor"]["median"] < one["systems"]["torchdil"]["backward"]["median"]
    assert set(tiny["products"]) == {"size", "torch"} and tiny["products"]["torch"]["median"] > 0  # there is no JAX here


def test_a_process_that_fails_says_why():
    worker = compare.Worker("handwritten", compare.sys.executable, "cpu")
    problem = Problem("logistic", 20, of=("penalties",))
    try:
        answer = worker.ask(load="nowhere.npz", problem=compare.asdict(problem))
        assert "FileNotFoundError" in answer["error"]
    finally:
        worker.close()
    gone = compare.Worker("nobody", compare.sys.executable, "cpu")
    assert "ModuleNotFoundError" in gone.ask(load="nowhere.npz", problem=compare.asdict(problem))["error"]
    gone._process.kill()
    assert "the process ended with status -9" in gone.ask(calls=1, before=0)["error"]
    assert "ModuleNotFoundError" in gone.ask(load="nowhere.npz", problem=compare.asdict(problem))["error"]
    gone.close()


def test_a_process_that_takes_too_long_is_ended(monkeypatch):
    worker = compare.Worker("torchdil", compare.sys.executable, "cpu")
    monkeypatch.setattr(compare, "PATIENCE", 0.05)  # less than it takes to import anything
    problem = compare.asdict(Problem("tiny", 2, of=("x", "weights")))
    assert "no answer after" in worker.ask(load="nowhere.npz", problem=problem)["error"]
    monkeypatch.setattr(compare, "PATIENCE", 90.0)
    assert "FileNotFoundError" in worker.ask(load="nowhere.npz", problem=problem)["error"]  # it is started again
    worker.close()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_problems_have_shapes_and_solutions(device):
    for problem in problems(device):
        given = arrays(problem) if np.prod(problem.shape) <= 2**18 else None
        if given is None:
            continue
        tensors = {name: torch.as_tensor(array) for name, array in given.items()}
        y = torch.zeros(problem.shape, dtype=torch.float64)
        value = (residual if problem.kind == "root" else objective)(OPS, problem, y, tensors)
        assert value.shape == (problem.shape if problem.kind == "root" else problem.shape[:1] if problem.samples else ())
        assert set(problem.of) <= set(given)


def test_reference_is_the_theorem():
    problem = Problem("tiny", 2, of=("x", "weights"))
    found = compare.solved(problem)
    x, W, y, v = (torch.as_tensor(found[name]) for name in ("x", "weights", "solution", "v"))
    F = torch.func.grad(lambda y, x, W: objective(OPS, problem, y, {"x": x, "weights": W}))
    J, of_x, of_W = torch.func.jacrev(F, (0, 1, 2))(y, x, W)
    g = torch.linalg.solve(J, v)
    exact = torch.cat([-(g @ of_x), -(g @ of_W.reshape(2, 4))])
    np.testing.assert_allclose(compare.reference(problem, found), exact.numpy(), rtol=1e-9)


def test_check_finds_what_fell_behind(tiny):
    assert compare.check(tiny, tiny) == []
    slow = copy.deepcopy(tiny)
    slow["cases"][0]["ratios"]["handwritten"]["backward"] /= 50
    (line,) = compare.check(slow, tiny)
    assert line.startswith("tiny, 2: ") and "handwritten" in line
    assert compare.check(tiny, slow) == []


def test_page_is_that_of_the_results():
    assert page.text(RESULTS, EVERYTHING) == (ROOT / "docs" / "performance.md").read_text()
    assert {"seed", "torchdil", "torch", "cpu"} <= RESULTS["peers"]["machine"].keys()
    for one in RESULTS["peers"]["cases"]:
        assert set(one["systems"]) >= {"torchdil", "torchopt", "xitorch", "torchdeq", "jaxopt", "optimistix"}
        assert one["systems"]["torchdil"]["gradient_error"] < 1e-5


def test_page_shows_wrong_gradients_as_such(tiny):
    wrong = copy.deepcopy(tiny)
    wrong["cases"][0]["systems"]["untraced"]["error"] = "wrong gradient, off by 0.3"
    assert "| wrong gradient, off by 0.3 |" in page.text({"peers": wrong}, EVERYTHING)
    assert page.figure({"peers": tiny}).axes


def test_page_says_when_jax_multiplies_faster(tiny):
    faster = tiny | {"products": {"size": 512, "torch": {"median": 5.0}, "jax": {"median": 2.5}}}
    assert "takes torch 2 times as long here as it takes JAX" in page.text({"peers": faster}, EVERYTHING)
    assert "as it takes JAX" not in page.text({"peers": tiny}, EVERYTHING)


def test_gains_are_measured_one_by_one():
    """Every change still finds what it is to change, and all variants give the gradient."""
    found = ablation.case(Problem("tiny", 2, of=("x", "weights")), "cpu", rounds=1)
    assert set(found["gains"]) == {name for name, (_, where) in ablation.WITHOUT.items() if "cpu" in where}
    assert all(gain > 0 for gain in found["gains"].values()) and found["largest_difference"] < 1e-9
    assert found["gains"]["traced"] > 1  # by far the largest
