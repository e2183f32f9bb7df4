"""Result files, checkpoints and what processes hand each other are data: nothing that is read can run code."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("src", "experiments", "benchmarks", "docs")
FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))

# Modules whose readers build any object that a file asks for, or run what it holds.
MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "shelve", "marshal", "jsonpickle", "runpy", "code"}
# Functions that do, by the end of their names, whatever the module is called there.
FUNCTIONS = {
    "eval", "exec", "compile",
    "joblib.load", "joblib.dump", "pd.read_pickle", "pandas.read_pickle", "yaml.load", "yaml.unsafe_load",
    "torch.hub.load", "torch.jit.load", "torch.package.PackageImporter", "torch.export.load",
}  # fmt: skip


def name_of(node):
    """ "a.b.c" of a call's function; the empty string of anything else."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *parts[::-1]]) if isinstance(node, ast.Name) else ""


def option(call, name):
    """The constant that is given for a keyword; None if it is not given."""
    (value,) = [word.value for word in call.keywords if word.arg == name] or [ast.Constant(None)]
    return value.value if isinstance(value, ast.Constant) else "not a constant"


def dangers(source):
    """What in a file could run code that it reads, a line each."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [f"line {node.lineno}: import {a.name}" for a in node.names if a.name.split(".")[0] in MODULES]
        elif isinstance(node, ast.ImportFrom):
            base = (node.module or "").split(".")[0]
            found += [f"line {node.lineno}: from {node.module}"] if base in MODULES else []
            found += [f"line {node.lineno}: from {base} import load" for a in node.names if (base, a.name) in LOADERS]
        elif isinstance(node, ast.Call):
            name = name_of(node.func)
            wrong = name in FUNCTIONS
            wrong |= name == "torch.load" and option(node, "weights_only") is not True
            wrong |= name.split(".")[-1] == "load" and option(node, "allow_pickle") not in (None, False)
            found += [f"line {node.lineno}: {name}"] if wrong else []
    return found


LOADERS = {("torch", "load"), ("joblib", "load"), ("joblib", "dump"), ("numpy", "load"), ("yaml", "load")}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_that_is_read_can_run_code(path):
    assert dangers(path.read_text("utf-8")) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import dill.session",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "torch.load(path, weights_only=choice)",
        "np.load(path, allow_pickle=True)",
        "numpy.load(path, allow_pickle=flag)",
        "joblib.load(path)",
        "from torch import load",
        "eval(text)",
    ],
)
def test_the_check_sees(source):
    assert len(dangers(source)) == 1


def test_the_check_lets_through():
    fine = "torch.load(path, weights_only=True); np.load(path); json.loads(line); re.compile(x); model.eval()"
    assert dangers(fine) == [] and len(FILES) > 100
