"""What the code of a function does with its variables, told by its bytecode."""

from __future__ import annotations

import dis
import functools
import itertools
import types
from collections.abc import Iterable
from itertools import pairwise

# Ways to use variables without naming them.
_SEEING = frozenset({"super", "locals", "vars", "dir", "eval", "exec"})
_GLOBAL = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL"})


@functools.lru_cache(maxsize=4096)
def reads_in(code: types.CodeType) -> dict[tuple[bool, str], frozenset[str] | None]:
    """The attributes that code reads of each variable, (global or not, name); None for one that it uses in other ways."""
    cells = {*code.co_cellvars, *code.co_freevars}
    found: dict[tuple[bool, str], frozenset[str] | None] = {}
    if _SEEING.intersection(code.co_names):  # variables that are not named
        found = {(False, name): None for name in (*code.co_varnames, *cells)}

    def note(everywhere: bool, name: str, names: Iterable[str] | None) -> None:
        known = found.get((everywhere, name), frozenset())
        found[everywhere, name] = None if known is None or names is None else known.union(names)

    steps = [step for step in dis.get_instructions(code) if step.opname != "EXTENDED_ARG"]
    for step, following in pairwise(steps):
        everywhere = step.opname in _GLOBAL
        local = step.opcode in dis.haslocal  # of a cell it is the cell that is loaded, for a function inside
        if everywhere or local or (step.opcode in dis.hasfree and step.opname not in ("MAKE_CELL", "LOAD_CLOSURE")):
            # Newer interpreters use two variables at once: an attribute can only be read of the second.
            *others, last = step.argval if isinstance(step.argval, tuple) else (step.argval,)
            loaded = step.opname.rfind("LOAD") > step.opname.rfind("STORE") and "CLEAR" not in step.opname
            read = [following.argval] if loaded and following.opname in ("LOAD_ATTR", "LOAD_METHOD") else None
            for name, attributes in (*((other, None) for other in others), (last, read)):
                if not (local and name in cells):
                    note(everywhere, name, attributes)
    for inside in (constant for constant in code.co_consts if isinstance(constant, types.CodeType)):
        for (everywhere, name), names in reads_in(inside).items():
            if everywhere or name in inside.co_freevars:
                note(everywhere, name, names)
    return found


@functools.lru_cache(maxsize=4096)
def names_in(code: types.CodeType) -> list[str]:
    """The names that a function looks up, functions defined inside it included."""
    inside = [name for constant in code.co_consts if isinstance(constant, types.CodeType) for name in names_in(constant)]
    return [*code.co_names, *inside]


@functools.lru_cache(maxsize=4096)
def mentioned(code: types.CodeType) -> frozenset[str]:
    """The names that a function looks up anywhere, attributes included, and strings that may be such names, as of `getattr`."""
    several = (constant for constant in code.co_consts if isinstance(constant, (tuple, frozenset)))
    constants = itertools.chain(code.co_consts, *several)
    strings = (constant for constant in constants if isinstance(constant, str) and constant.isidentifier())
    inside = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return frozenset().union(code.co_names, strings, *map(mentioned, inside))


@functools.lru_cache(maxsize=4096)
def composes_names(code: types.CodeType) -> bool:
    """Whether code asks for attributes by names that are not constants, as `getattr(self, f"_loss_{kind}")` does."""
    steps = [step for step in dis.get_instructions(code) if step.opname != "EXTENDED_ARG"]
    for place, step in enumerate(steps):
        if step.opname in _GLOBAL and step.argval == "getattr":
            # Its arguments come next: an object, perhaps an attribute of one, and a constant that nothing is added to.
            following = itertools.takewhile(lambda one: "CALL" not in one.opname, steps[place + 1 :])
            parts = [one for one in following if one.opname not in ("PUSH_NULL", "LOAD_ATTR")]
            constant = [one.argval for one in parts[1:2] if one.opname == "LOAD_CONST"]
            if not (constant and isinstance(constant[0], str)) or any(not one.opname.startswith("LOAD") for one in parts):
                return True
    return any(composes_names(inside) for inside in code.co_consts if isinstance(inside, types.CodeType))


@functools.lru_cache(maxsize=4096)
def imported_by(code: types.CodeType) -> list[tuple[str, int]]:
    """The modules that a function imports when it is called, with the level of relative imports."""
    steps = [step for step in dis.get_instructions(code) if step.opname != "EXTENDED_ARG"]
    found = []
    for place, step in enumerate(steps):
        if step.opname == "IMPORT_NAME":
            level = steps[place - 2].argval  # pushed before the names that are imported from the module
            found.append((step.argval, level if isinstance(level, int) else 0))
    inside = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return [*found, *(one for code in inside for one in imported_by(code))]


@functools.lru_cache(maxsize=4096)
def reads_gradient(code: types.CodeType) -> bool:
    """Whether code reads `grad` of a tensor, and not the function of `torch.autograd` and `torch.func`."""
    for before, step in pairwise(step for step in dis.get_instructions(code) if step.opname != "EXTENDED_ARG"):
        called = step.argrepr != "grad"  # as newer interpreters say
        if step.opname == "LOAD_ATTR" and step.argval == "grad" and not called and before.argval not in ("autograd", "func"):
            return True
    return any(reads_gradient(inside) for inside in code.co_consts if isinstance(inside, types.CodeType))
