"""Functions of tensors that are called again and again, made fast.

A solve on a small state is a few hundred small operations, and Python takes longer to ask for them than they take. So a
function that comes back with the same shapes is traced into a list of operations (`make_fx`), which runs as a TorchScript graph
on a CPU and as a CUDA graph on a GPU. Tensors that the function closes over become inputs by reference: what an optimizer
writes into them is seen.

What was traced may be out of date all the same: a parameter was replaced by another tensor, a Python number in the function
has changed. So results from here are never trusted: whoever uses one checks it with the function itself, and calls `forget` if
it is wrong.
"""

from __future__ import annotations

import functools
import threading
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

Function = Callable[..., tuple[Tensor, ...]]

# torch.fx changes nn.Module while it traces: two threads at once would leave it changed.
tracing = threading.RLock()
# Calls of one kind before it is traced.
_PATIENCE = 10
# Inputs and outputs of all CUDA graphs take no more than this part of the memory, what a graph needs in between likewise.
_PART = 1 / 16
# How many kinds of one function are remembered: a batch size that is never the same must not fill the memory.
_KINDS = 64


@contextmanager
def quietly() -> Iterator[None]:
    """A block in which torch says nothing of its own TorchScript, of graphs that were not captured, and of slow vmap.

    What it says of the last in a backward pass would reach the user when that ends.
    """
    functorch: Any = torch._C._functorch
    functorch._set_vmap_fallback_warning_enabled(False)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        functorch._set_vmap_fallback_warning_enabled(True)


@contextmanager
def unless_waited_for(on_gpu: bool) -> Iterator[bool]:
    """A block in which nobody else traces; False, in a backward pass on a GPU, if somebody does.

    All backward passes on a GPU run in one thread, which whoever traces may be waiting for: to wait there would be for ever.
    """
    free = tracing.acquire(blocking=not on_gpu or torch._C._current_graph_task_id() < 0)
    try:
        yield free
    finally:
        if free:
            tracing.release()


class _Kind:
    """What is known of one function at one set of shapes: how often it came, and its fast form once there is one."""

    def __init__(self) -> None:
        self.calls = 0
        self.fast: Function | None = None
        self.lock = threading.Lock()


_memories: weakref.WeakKeyDictionary[Any, dict[Hashable, Any]] = weakref.WeakKeyDictionary()


def memory(owner: Any) -> dict[Hashable, Any]:
    """What is remembered of a function as long as it lives; of one that cannot be a key, nothing."""
    try:
        return _memories.setdefault(owner, {})
    except TypeError:  # no weak references to it, or no hash
        return {}


class Compiled:
    """`function`, by its fast form where there is one.

    Args:
        owner: the user's function; the fast form is kept as long as it lives.
        key: what else it depends on, besides the shapes of its inputs.
        function: tensors -> tensors, in plain torch operations.
        patience: after how many calls of one kind to trace it, which takes a few tenths of a second; None: ten.

    Attributes:
        was_fast: whether the last call was one of the fast form.
    """

    was_fast = False

    def __init__(self, owner: Any, key: Hashable, function: Function, patience: int | None = None):
        self._function, self._memory = function, memory(owner)
        self._patience = _PATIENCE if patience is None else patience
        self._key = (key, getattr(owner, "training", None))

    @torch.no_grad()
    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        signature = (self._key, *((t.shape, t.dtype, t.device) for t in inputs))
        if signature not in self._memory:
            kinds = [key for key, value in self._memory.items() if isinstance(value, _Kind)]
            if len(kinds) >= _KINDS:
                del self._memory[kinds[0]]
        kind = self._memory.setdefault(signature, _Kind())
        kind.calls += 1
        if kind.calls == self._patience + 1:
            with unless_waited_for(inputs[0].is_cuda) as free:
                if free:
                    kind.fast = _fast_form(self._function, inputs)
                else:
                    kind.calls -= 1
        self.was_fast = kind.fast is not None
        if kind.fast is None:
            return self._function(*inputs)
        with kind.lock:
            return kind.fast(*inputs)

    def forget(self) -> bool:
        """The fast forms are out of date. Whether there were any."""
        any_fast = any(kind.fast is not None for kind in self._memory.values() if isinstance(kind, _Kind))
        self._memory.clear()
        return any_fast


def _fast_form(function: Function, inputs: tuple[Tensor, ...]) -> Function | None:
    """The function as a graph, or None if it cannot be one."""
    from torch.fx.experimental.proxy_tensor import make_fx  # slow to import, and few need it

    try:
        with quietly():
            traced, captured = _lifted(make_fx(lambda *inputs: function(*inputs))(*inputs))
            if inputs[0].is_cuda:
                graph = CudaGraph(traced, inputs, captured)
                return graph if room_for(graph.pool, graph.device) else None
            fast = scripted(traced, inputs, captured)
    except Exception:  # whatever torch could not do: the plain function can
        return None
    return lambda *inputs: fast(*inputs, *captured)


def scripted(function: Function, tensors: Sequence[Tensor], others: Sequence[Tensor]) -> Function:
    """`function(*tensors, *others)`, which may change the first, as a TorchScript graph."""

    def inputs() -> tuple[Tensor, ...]:
        return (*(t.clone() for t in tensors), *others)

    # As `torch.jit.trace` does, which would keep the function for ever; and not of a module, which would keep the example.
    graph, _ = torch._C._create_graph_by_tracing(lambda *inputs: function(*inputs), inputs(), lambda _: "", True, False)
    compiled: Function = torch._C._create_function_from_graph("forward", graph)
    for _ in range(2):  # it is optimised in its first runs
        compiled(*inputs())
    return compiled


def fast(function: Function, tensors: tuple[Tensor, ...], others: tuple[Tensor, ...]) -> Function | None:
    """`function(*tensors, *others)` as a TorchScript graph or a CUDA graph; itself where that cannot be, or would not pay.

    None: not now, as somebody else is tracing.
    """
    inputs = (*tensors, *others)
    try:
        with unless_waited_for(inputs[0].is_cuda) as free, quietly():
            if not free:
                return None
            if not inputs[0].is_cuda:
                return scripted(function, tensors, others)
            return CudaGraph(function, inputs) if room_for(sum(t.nbytes for t in inputs), inputs[0].device) else function
    except Exception:
        return function


def by_inductor(function: Function, tensors: Sequence[Tensor], others: Sequence[Tensor]) -> Function:
    """The same by the code generator of torch.compile, whose results are the same to rounding; it takes seconds."""
    import torch._inductor as inductor  # slow to import, and few need them
    from torch.fx.experimental.proxy_tensor import make_fx

    def inputs() -> list[Any]:
        return [*(t.clone() for t in tensors), *others]

    compiled = inductor.compile(make_fx(lambda *inputs: tuple(function(*inputs)))(*inputs()), inputs())
    compiled(*inputs())  # what is missing may show in a call only
    return lambda *inputs: tuple(compiled(*inputs))


def _lifted(traced: Any) -> tuple[Any, list[Tensor]]:
    """The traced module with the tensors that it had closed over as further inputs."""
    graph = traced.graph
    captured: list[Tensor] = []
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    for node in list(graph.nodes):
        if node.op == "get_attr":
            with graph.inserting_after(last):
                last = graph.placeholder(f"captured_{len(captured)}")
            captured.append(getattr(traced, node.target).detach())
            node.replace_all_uses_with(last)
            graph.erase_node(node)
    graph.eliminate_dead_code()
    traced.recompile()
    return traced, captured


class CudaGraph:
    """A function as one launch: inputs are copied into fixed places, results out of them.

    Args:
        function: tensors -> tensors; it may change its inputs.
        inputs: an example.
        captured: further inputs, read where they are.

    Attributes:
        pool: the bytes that it keeps for what it computes.
    """

    def __init__(self, function: Function, inputs: tuple[Tensor, ...], captured: Sequence[Tensor] = ()):
        self._captured = captured
        self.device = inputs[0].device
        self._lock = threading.Lock()
        with torch.cuda.device(self.device), _capturable():
            self._inputs = [t.clone() for t in inputs]
            stream = _side_stream(self.device)
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(2):  # libraries set themselves up in their first calls, which cannot be captured
                    function(*self._inputs, *captured)
            torch.cuda.current_stream().wait_stream(stream)
            self._graph = torch.cuda.CUDAGraph()
            with _capturing(self._graph, stream):
                before = torch.cuda.memory_reserved()
                self._outputs = function(*self._inputs, *captured)
                self.pool = torch.cuda.memory_reserved() - before
        self._places_in, self._places_out = _by_type(self._inputs), _by_type(self._outputs)
        _graphs.add(self)

    @property
    def nbytes(self) -> int:
        """What it keeps for its inputs and outputs."""
        return sum(t.nbytes for t in (*self._inputs, *self._outputs))

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        results = [torch.empty_like(t) for t in self._outputs]
        with self._lock, torch.cuda.device(self.device):
            _copy(self._places_in, self._inputs, inputs)
            self._graph.replay()
            _copy(self._places_out, results, self._outputs)
        return tuple(results)


_graphs: weakref.WeakSet[CudaGraph] = weakref.WeakSet()


def room_for(nbytes: int, device: torch.device) -> bool:
    """Whether a graph with so large inputs may be kept, besides those that are."""
    memory = torch.cuda.get_device_properties(device).total_memory
    return nbytes + sum(graph.nbytes for graph in list(_graphs) if graph.device == device) <= _PART * memory


@functools.cache
def _side_stream(device: torch.device) -> Any:
    """One for all graphs: cuBLAS keeps tens of megabytes for each stream that it has seen."""
    return torch.cuda.Stream(device)


@contextmanager
def _capturing(graph: Any, stream: Any) -> Iterator[None]:
    """`torch.cuda.graph`, beside which other threads may go on, and after which torch is as it was, though it fails."""
    generator, before = torch.cuda.default_generators[stream.device.index], torch.cuda.current_stream()
    spare = generator.clone_state()
    try:
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            yield
    except BaseException:
        torch.cuda.set_stream(before)
        generator.graphsafe_set_state(spare)
        raise


@contextmanager
def _capturable() -> Iterator[None]:
    """Matrices are factorised by cuBLAS and cuSOLVER: MAGMA, torch's choice for batches, cannot be captured."""
    before = torch.backends.cuda.preferred_linalg_library()
    try:
        _prefer("cusolver")
        yield
    finally:
        _prefer(before)


def _prefer(library: Any) -> None:
    def prefer(_: float) -> float:
        torch.backends.cuda.preferred_linalg_library(library)
        return 0.0

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Torch calls this experimental, on stderr; it is a warning of Python only where a function of torch called us.
        torch.zeros(1, device="cpu").apply_(prefer)


def _by_type(tensors: Sequence[Tensor]) -> list[list[int]]:
    """The places of the tensors of each type."""
    return [[i for i, t in enumerate(tensors) if t.dtype == dtype] for dtype in {t.dtype for t in tensors}]


def _copy(places: list[list[int]], to: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """One launch for all tensors of a type."""
    for of in places:
        torch._foreach_copy_([to[i] for i in of], [tensors[i] for i in of])
