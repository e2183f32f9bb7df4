"""f as it was when it was called, for backward passes that evaluate it again."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from torchdil.problem import Call, as_called


def called(func: Call) -> Callable[[], Call]:
    """() -> func, of a module with the parameters that it has now: `torch.func.functional_call` swaps them for a while."""
    if not isinstance(func, nn.Module):
        return lambda: func
    again = as_called(func)
    held = [(table, dict(table)) for part in func.modules() for table in (part._parameters, part._buffers)]

    def then() -> Call:
        # The module itself where it can be: what is remembered of it is of use.
        same = all(table.get(name) is value for table, values in held for name, value in values.items())
        return func if same else again

    return then


def changed(asked: str) -> RuntimeError:
    """What to say of a function that is not what it was; `asked`: the argument that made it necessary to evaluate it again."""
    return RuntimeError(
        f"func gives other values in the backward pass than in the forward pass, where {asked} evaluates it again: leave what "
        'it uses as it is until then, or use gradient="ift" without checkpoint.'
    )
