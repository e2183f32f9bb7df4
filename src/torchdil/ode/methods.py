"""Runge-Kutta methods as tableaus.

A step of size h from y_n solves for the stages Y_i and the next state:

    Y_i = y_n + h Σ_j a_ij f(t_n + c_j h, Y_j),      y_{n+1} = y_n + h Σ_j b_j f(t_n + c_j h, Y_j).

Everything else in `torchdil.ode` follows from (A, b, c): how the step is solved, and how it is differentiated.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

Matrix = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Method(ABC):
    """A Runge-Kutta method: subclasses state `A` and `b`; c_i = Σ_j a_ij.

    Attributes:
        A: the coefficients a_ij, s rows of s numbers.
        b: the weights of the step, s numbers.
        order: the order of the global error.
        names: the strings by which `odeint` knows the method.
        always_adaptive: whether steps are adaptive where neither tolerances nor a grid are given.
        error_weights: of the slopes in the error estimate, b - b̂ of an embedded method, s numbers; () where there is none.
        error_start: the weight of f(t_n, y_n) in it, where that is no stage.
        error_filter: γ, if the estimate is multiplied by (I - hγ ∂f/∂y)⁻¹ to be right for stiff equations.
        error_order: the power of h that the error estimate falls with, less one.
        error_share: the part of the tolerance that a step may use: the errors of steps add up.
    """

    names: ClassVar[tuple[str, ...]] = ()
    always_adaptive: ClassVar[bool] = False

    @property
    @abstractmethod
    def A(self) -> Matrix: ...

    @property
    def b(self) -> tuple[float, ...]:
        return self.A[-1]

    @property
    @abstractmethod
    def order(self) -> int: ...

    @property
    def error_weights(self) -> tuple[float, ...]:
        return ()

    @property
    def error_start(self) -> float:
        return 0.0

    @property
    def error_filter(self) -> float:
        return 0.0

    @property
    def error_order(self) -> int:
        return self.order

    @property
    def error_share(self) -> float:
        return 1.0

    @property
    def c(self) -> tuple[float, ...]:
        return tuple(math.fsum(row) for row in self.A)

    @property
    def stages(self) -> int:
        """s."""
        return len(self.A)

    @property
    def stiffly_accurate(self) -> bool:
        """Whether the last stage is the next state."""
        return self.A[-1] == self.b

    @property
    def rows(self) -> Matrix:
        """A, and b below it unless the last stage is the next state: one row an unknown of the step, m rows in all."""
        return self.A if self.stiffly_accurate else (*self.A, self.b)

    @property
    def places(self) -> tuple[float, ...]:
        """Where in the step the rows belong to: c, and 1 for the next state."""
        return (*self.c, 1.0)[: len(self.rows)]

    @property
    def explicit(self) -> bool:
        """Whether no stage depends on itself or a later one."""
        return not any(self.A[i][j] for i in range(self.stages) for j in range(i, self.stages))

    @property
    def diagonal(self) -> bool:
        """Whether no stage depends on a later one, so that they can be solved one after the other."""
        return not any(self.A[i][j] for i in range(self.stages) for j in range(i + 1, self.stages))

    @property
    def adaptive(self) -> bool:
        """Whether the method estimates its error."""
        return bool(self.error_weights)

    def tensors(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """`rows` (m, s) and c (s,) in the dtype and on the device of `like`."""
        return _tensors(self, like.dtype, like.device)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


@functools.lru_cache(maxsize=256)
def _tensors(method: Method, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    with torch.inference_mode(False):
        return tuple(torch.tensor(a, dtype=dtype, device=device) for a in (method.rows, method.c))  # type: ignore[return-value]


@dataclass(frozen=True, repr=False)
class BackwardEuler(Method):
    """y_{n+1} = y_n + h f(t_{n+1}, y_{n+1}): the paper's. Order 1, L-stable."""

    names = ("backward_euler", "implicit_euler")
    A = ((1.0,),)
    order = 1


@dataclass(frozen=True, repr=False)
class ImplicitMidpoint(Method):
    """y_{n+1} = y_n + h f(t_n + h/2, (y_n + y_{n+1})/2). Order 2, A-stable, symplectic."""

    names = ("implicit_midpoint", "gl2")
    A = ((0.5,),)
    b = (1.0,)
    order = 2


@dataclass(frozen=True, repr=False)
class Trapezoid(Method):
    """y_{n+1} = y_n + h/2 (f(t_n, y_n) + f(t_{n+1}, y_{n+1})), Crank-Nicolson. Order 2, A-stable."""

    names = ("trapezoid", "crank_nicolson")
    A = ((0.0, 0.0), (0.5, 0.5))
    order = 2


@dataclass(frozen=True, repr=False)
class TRBDF2(Method):
    """A trapezoid to t_n + (2 - √2) h, then a backward difference. Order 2, L-stable, with an error estimate of order 3."""

    names = ("trbdf2",)
    _w: ClassVar[float] = math.sqrt(2) / 4
    _d: ClassVar[float] = 1 - math.sqrt(2) / 2
    A = ((0.0, 0.0, 0.0), (_d, _d, 0.0), (_w, _w, _d))
    order = 2
    error_weights = (_w - (1 - _w) / 3, _w - (3 * _w + 1) / 3, 2 * _d / 3)
    error_filter = _d


@dataclass(frozen=True, repr=False)
class SDIRK2(Method):
    """Two equal diagonal stages (Alexander). Order 2, L-stable."""

    names = ("sdirk2",)
    _d: ClassVar[float] = 1 - math.sqrt(2) / 2
    A = ((_d, 0.0), (1 - _d, _d))
    order = 2


@dataclass(frozen=True, repr=False)
class Kvaerno5(Method):
    """Kværnø's ESDIRK 5(4) with seven stages, A. Kværnø, BIT 44 (2004). Order 5, L-stable, error estimate of order 4."""

    names = ("kvaerno5", "esdirk5")
    always_adaptive = True
    _d: ClassVar[float] = 0.26
    A = (
        (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0),
        (_d, _d, 0.0, 0.0, 0.0, 0.0, 0.0),
        (0.13, 0.84033320996790809, _d, 0.0, 0.0, 0.0, 0.0),
        (0.22371961478320505, 0.47675532319799699, -0.06470895363112615, _d, 0.0, 0.0, 0.0),
        (0.16648564323248321, 0.10450018841591720, 0.03631482272098715, -0.13090704451073998, _d, 0.0, 0.0),
        (0.13855640231268224, 0.0, -0.04245337201752043, 0.02446657898003141, 0.61943039072480676, _d, 0.0),
        (0.13659751177640291, 0.0, -0.05496908796538376, -0.04118626728321046, 0.62993304899016403, 0.06962479448202728, _d),
    )
    order = 5
    error_order = 4
    error_share = 0.1
    error_weights = tuple(b - b_hat for b, b_hat in zip(A[-1], A[-2], strict=True))


@functools.cache
def _collocation(c: tuple[float, ...]) -> tuple[Matrix, tuple[float, ...]]:
    """A and b of the collocation method with the nodes c: a_ij and b_j integrate the j-th Lagrange polynomial to c_i and 1."""
    a_rows = []
    for x in (*c, 1.0):
        integrals = []
        for j, node in enumerate(c):
            others = [other for i, other in enumerate(c) if i != j]
            lagrange = np.poly1d(others, r=True) / math.prod(node - other for other in others)
            integrals.append(float(np.polyint(lagrange)(x)))
        a_rows.append(tuple(integrals))
    b = a_rows.pop()
    return tuple(a_rows), b


@dataclass(frozen=True)
class _Collocation(Method):
    """A method whose stages lie on a polynomial; `order` chooses how many."""

    order: int
    _nodes: ClassVar[dict[int, tuple[float, ...]]]

    def __post_init__(self) -> None:
        if self.order not in self._nodes:
            raise ValueError(
                f"order must be one of {', '.join(map(str, self._nodes))} for {type(self).__name__}, got {self.order!r}."
            )

    @property
    def A(self) -> Matrix:
        return _collocation(self.c)[0]

    @property
    def b(self) -> tuple[float, ...]:
        return _collocation(self.c)[1]

    @property
    def c(self) -> tuple[float, ...]:
        return self._nodes[self.order]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.order})"


@dataclass(frozen=True, repr=False)
class GaussLegendre(_Collocation):
    """Collocation at the Gauss nodes. Order 4 (two stages) or 6 (three), A-stable, symplectic."""

    order: int = 4
    _nodes: ClassVar[dict[int, tuple[float, ...]]] = {
        4: (0.5 - math.sqrt(3) / 6, 0.5 + math.sqrt(3) / 6),
        6: (0.5 - math.sqrt(15) / 10, 0.5, 0.5 + math.sqrt(15) / 10),
    }


@dataclass(frozen=True, repr=False)
class RadauIIA(_Collocation):
    """Collocation at the right Radau nodes. Order 3 (two stages) or 5 (three), L-stable; order 5 estimates its error."""

    order: int = 5
    _nodes: ClassVar[dict[int, tuple[float, ...]]] = {
        3: (1 / 3, 1.0),
        5: (0.4 - math.sqrt(6) / 10, 0.4 + math.sqrt(6) / 10, 1.0),
    }

    # The estimate of Hairer & Wanner (1996), section IV.8: an embedded formula of order 3 with f(t_n, y_n) as one more stage.

    @property
    def error_filter(self) -> float:
        return 1 / (3 + 3 ** (2 / 3) - 3 ** (1 / 3)) if self.order == 5 else 0.0

    @property
    def error_start(self) -> float:
        return self.error_filter

    @property
    def error_weights(self) -> tuple[float, ...]:
        if self.order != 5:
            return ()
        e = [self.error_filter * x / 3 for x in (-13 - 7 * math.sqrt(6), -13 + 7 * math.sqrt(6), -1.0)]
        return tuple(math.fsum(e[i] * self.A[i][j] for i in range(3)) for j in range(3))

    @property
    def error_order(self) -> int:
        return 3


@dataclass(frozen=True, repr=False)
class ForwardEuler(Method):
    """y_{n+1} = y_n + h f(t_n, y_n): explicit, for comparison. Order 1."""

    names = ("forward_euler", "euler")
    A = ((0.0,),)
    b = (1.0,)
    order = 1


@dataclass(frozen=True, repr=False)
class RK4(Method):
    """The classical Runge-Kutta method: explicit, for comparison. Order 4."""

    names = ("rk4",)
    A = ((0.0, 0.0, 0.0, 0.0), (0.5, 0.0, 0.0, 0.0), (0.0, 0.5, 0.0, 0.0), (0.0, 0.0, 1.0, 0.0))
    b = (1 / 6, 1 / 3, 1 / 3, 1 / 6)
    order = 4


_SINGLE = (BackwardEuler, ImplicitMidpoint, Trapezoid, TRBDF2, SDIRK2, Kvaerno5, ForwardEuler, RK4)
_BY_NAME: dict[str, Method] = {name: kind() for kind in _SINGLE for name in kind.names}
_BY_NAME |= {"gl4": GaussLegendre(4), "gl6": GaussLegendre(6), "radau": RadauIIA(5)}
_BY_NAME |= {f"{name}{order}": RadauIIA(order) for order in (3, 5) for name in ("radauiia", "radau")}

# torchdiffeq's adaptive methods.
_EXPLICIT = ("dopri5", "dopri8", "bosh3", "fehlberg2", "adaptive_heun")


def method_of(given: Any) -> Method:
    """The method that an object or a string names; torchdiffeq's names are known too, in any case."""
    if isinstance(given, Method):
        return given
    if isinstance(given, type) and issubclass(given, Method):
        raise TypeError(f"method must be an object, got the class {given.__name__}: write {given.__name__}().")
    if not isinstance(given, str):
        raise TypeError(f"method must be a torchdil.ode method such as BackwardEuler() or its name, got {given!r}.")
    if given.lower() in _EXPLICIT:
        raise ValueError(f'method must be one for stiff equations, got {given!r}: use "kvaerno5", which adapts its steps, too.')
    if given.lower() not in _BY_NAME:
        raise ValueError(f"method must be one of {', '.join(sorted(_BY_NAME))}, got {given!r}.")
    return _BY_NAME[given.lower()]
