"""The package as a whole: imports point one way, files stay small, the public names exist and say what they are."""

import ast
import dataclasses
import inspect
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import torchdil as dil

PACKAGE = Path(dil.__file__).parent
MAX_LINES = 400

# From the bottom up: a module imports only from its own group's package or from groups above it in this list.
LAYERS = [
    ("settings",),
    ("as_written", "batch", "compiled", "one_number", "shapes_only", "step_counts", "variables"),
    ("captures", "convolve", "matvec", "probe"),
    ("linear_graph",),
    ("linearize", "signature"),
    ("plot", "graph", "not_a_tensor", "status"),
    ("solution", "traced"),
    ("live",),
    ("progress",),
    ("operator",),
    ("linear",),
    ("modes",),
    ("arguments",),
    ("condition",),
    ("implicit",),
    ("transform",),
    ("problem",),
    ("foreign", "slope", "solvers"),
    ("diagnosis", "glance"),
    ("solve",),
    ("argmin", "root", "fixed_point"),
    ("attach", "watch", "advice"),
    ("check",),
    ("layers",),
    ("ode",),
    ("control",),
    ("__init__",),
    ("__main__",),
]
RANK = {name: rank for rank, group in enumerate(LAYERS) for name in group}

FUNCTIONS = ["argmin", "root", "fixed_point", "attach", "check_gradient", "odeint"]
MODULES = ["ArgminLayer", "RootLayer", "FixedPointLayer", "NeuralODE"]
SOLVERS = [
    "Anderson",
    "Broyden",
    "CEM",
    "GradientDescent",
    "LBFGS",
    "MPPI",
    "Newton",
    "Picard",
    "RandomShooting",
    "SciPy",
    "TorchOptim",
]
LINEAR_SOLVERS = ["CG", "NormalCG", "MINRES", "GMRES", "BiCGStab", "Dense", "Neumann", "JacobianFree", "Auto"]
RESULTS = ["Status", "Solution", "Report", "ConvergenceError", "ConvergenceWarning"]
PUBLIC = FUNCTIONS + MODULES + SOLVERS + LINEAR_SOLVERS + RESULTS

FILES = sorted(PACKAGE.rglob("*.py"))


def module_name(path):
    """`solvers.newton` for solvers/newton.py, `linear` for linear/__init__.py, `__init__` for the package itself."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


MODULE_NAMES = {module_name(path) for path in FILES}


def imported(path):
    """The modules of this package that a file imports, wherever in the file it does."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            # `from torchdil import batch` names a module, `from torchdil.batch import dot` does not.
            targets = [f"{node.module}.{alias.name}" for alias in node.names] + [node.module]
        else:
            continue
        inside = {target.removeprefix("torchdil.") for target in targets if target.startswith("torchdil.")}
        found |= {target for target in inside if target in MODULE_NAMES}
    return found


GRAPH = {module_name(path): imported(path) for path in FILES}


def test_the_graph_was_read():
    assert {"batch", "operator"} <= GRAPH["implicit"]
    assert "batch" in GRAPH["solve"]
    assert "layers" in GRAPH["__init__"]


def test_imports_are_acyclic():
    TopologicalSorter(GRAPH).prepare()  # raises CycleError with the cycle


@pytest.mark.parametrize("module", sorted(GRAPH))
def test_imports_point_downwards(module):
    top = module.split(".")[0]
    assert top in RANK, f"{top} has no place in LAYERS"
    for target in GRAPH[module]:
        below = target.split(".")[0]
        assert below == top or RANK[below] < RANK[top], f"{module} imports {target}, which is not below it"


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_files_are_small_and_well_named(path):
    assert len(path.read_text().splitlines()) <= MAX_LINES
    assert not any(word in path.stem.lower() for word in ("utils", "misc", "helpers", "common"))
    assert ast.get_docstring(ast.parse(path.read_text())), f"{path} has no docstring"


# Functions of torch that make a tensor on torch's default device unless they are told another.
MAKERS = {
    "arange",
    "as_tensor",
    "empty",
    "eye",
    "full",
    "linspace",
    "logspace",
    "ones",
    "rand",
    "randint",
    "randn",
    "tensor",
    "zeros",
}


def test_tensors_are_made_where_they_are_needed():
    makers = {f"torch.{name}" for name in MAKERS}
    trees = {path.name: ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}
    calls = [(name, node) for name, tree in trees.items() for node in ast.walk(tree) if isinstance(node, ast.Call)]
    made = [(name, node) for name, node in calls if ast.unparse(node.func) in makers]
    assert len(made) > 50
    assert not [f"{name}:{node.lineno}" for name, node in made if "device" not in {keyword.arg for keyword in node.keywords}]


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names(name):
    thing = getattr(dil, name)
    assert thing.__doc__
    first, *_ = inspect.cleandoc(thing.__doc__).splitlines()
    assert first[0].isupper() or first.startswith(("y ", "y=")), "a docstring begins with a sentence or an equation"
    if dataclasses.is_dataclass(thing):  # a dataclass without a docstring gets its signature as one
        assert thing.__doc__ != name + str(inspect.signature(thing)).replace(" -> None", "")


@pytest.mark.parametrize("name", [name for name in PUBLIC if inspect.isclass(getattr(dil, name))])
def test_public_methods_have_docstrings(name):
    for attribute, value in vars(getattr(dil, name)).items():
        if inspect.isfunction(value) and not attribute.startswith("_"):
            assert inspect.getdoc(getattr(getattr(dil, name), attribute)), f"{name}.{attribute} has no docstring"


# TorchOptim is nothing without a class; test_external.py has its values.
@pytest.mark.parametrize("name", [name for name in SOLVERS + LINEAR_SOLVERS if name != "TorchOptim"])
def test_solvers_are_values(name):
    """Frozen dataclasses: equal when their fields are, hashable, and safe to share."""
    solver = getattr(dil, name)
    assert solver() == solver()
    assert hash(solver()) == hash(solver())
    assert solver(rtol=1e-3) != solver()
    with pytest.raises(AttributeError):
        solver().rtol = 1.0
    assert eval(repr(solver(rtol=1e-3)), vars(dil)) == solver(rtol=1e-3)


def test_signatures():
    """The contract's keywords, in its order."""
    parameters = {name: list(inspect.signature(getattr(dil, name)).parameters) for name in FUNCTIONS}
    assert parameters["argmin"] == ["score", "y0", "args", "solver", "linear_solver", "on_failure"]
    assert parameters["root"] == ["residual", "y0", "args", "solver", "linear_solver", "batch_dims", "on_failure"]
    assert parameters["fixed_point"] == ["g", "y0", "args", "solver", "linear_solver", "batch_dims", "on_failure"]
    assert parameters["attach"] == [
        "residual",
        "y_star",
        "args",
        "linear_solver",
        "batch_dims",
        "symmetric",
        "on_failure",
    ]


def test_import_is_light():
    """torch._dynamo takes seconds to import, and few need it."""
    code = "import sys, torchdil; print('torch._dynamo' in sys.modules)"
    answer = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)
    assert answer.stderr == ""
    assert answer.stdout.split() == ["False"]


def test_the_version_is_the_same_everywhere():
    root = Path(__file__).parents[1]
    cited = re.search(r"^version: (\S+)$", (root / "CITATION.cff").read_text(), re.MULTILINE)
    latest = re.search(r"^## (\S+)", (root / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert cited is not None and latest is not None
    assert cited.group(1) == latest.group(1) == dil.__version__
