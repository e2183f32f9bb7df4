"""The implicit step: the stages of one step of a method, for B samples at once.

Y_i = y + h Σ_j a_ij f(t + c_j h, Y_j) is solved by Newton's iteration with one matrix, I - hγJ for a method whose stages follow
one another and I - h A⊗J for one whose stages are coupled. J = ∂f/∂y is taken at one point and kept, with the inverse, while
the iteration contracts; this and the stopping rule by the rate θ are those of Hairer & Wanner (1996), section IV.8.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchdil import batch
from torchdil.linear import GMRES
from torchdil.ode.derivative import jacobian
from torchdil.ode.field import Field
from torchdil.ode.interpolant import POINTS, Place, guess_coupled, guess_in_turn
from torchdil.ode.krylov import Block, at_hand
from torchdil.ode.methods import Method
from torchdil.ode.newton import SimplifiedNewton, fits, stages_in_turn, unknowns
from torchdil.operator import Operator
from torchdil.solution import Result, Status

# J is taken anew where the iteration contracts by less than this; a matrix for another h serves if h is this near.
_SLOW, _SAME = 0.03, 0.02
# More iterations than this throw doubt on where they began.
_MANY = 4
_INNER_RTOL = 1e-3
# A correction of so many roundings of Y is the last that can be made; an F of more than this share of the last has not fallen.
_ROUNDINGS, _FALLS = 20, 0.5
# The contraction that a first iteration is credited with at most.
_TRUST = 0.03


class StepSolver:
    """Solves one step after another and keeps what the next can use.

    Args:
        newton: the settings.
        method: the tableau.
        field: evaluates f at many points.
        call: f.
        y: a state, (B, D).
        owner: the user's function, with which what is compiled is kept; None: `call`.
        most: the most steps of a Krylov method in a solve; None: as many as it needs.

    Attributes:
        ok: the samples whose last step was solved, (B,); `all_ok` says whether that is all of them.
        rate: the slowest contraction in the last step, (B,), 0 where it was over at once.
        residual: the ‖F‖ that is left of the last step, or its error in units of `scale`, (B,).
        rows: the rows of the last step, (B, m, D).
        iterations: of each sample so far, (B,).
        weight: the size of each component, (B, D), by which F is measured; None: by its norm.
        finer: the same, less for components that are small: these are gone on with as long as their F falls; None: not so.
        jacobians, factorisations: how many were made.
        strained: whether a solve needed more than `most` steps: then nothing else holds.
    """

    def __init__(
        self,
        newton: SimplifiedNewton,
        method: Method,
        field: Field,
        call: Callable[..., Any],
        y: Tensor,
        owner: Any = None,
        most: int | None = None,
    ):
        self.method, self._field, self._call = method, field, call
        samples, d = y.shape
        s = method.stages
        self._in_turn = stages_in_turn(method)
        self._gamma = max(method.A[i][i] for i in range(s)) if self._in_turn else 0.0
        self._weights = method.tensors(y)[0]
        self._A = self._weights[:s]
        singular = not self._in_turn and abs(float(torch.linalg.det(self._A.double()))) < 1e-9
        self._inverse_A = None if self._in_turn or singular else torch.linalg.inv(self._A.double()).to(y.dtype)
        q = unknowns(method, d)
        self.kind = newton.jacobian or ("full" if fits(samples, q) else "krylov")
        self._gmres, owner = GMRES(rtol=_INNER_RTOL, max_steps=most), call if owner is None else owner
        block = Block(owner, (method, field.mode, field.layout), self._own, self._gmres, self._gmres)
        self._block = block if self.kind == "krylov" and at_hand(field) else None
        self.max_steps = newton.max_steps or (20 if self.kind in ("full", "krylov") else 100)
        self._explicit = method.explicit
        dense = self.kind in ("full", "diagonal") and not self._explicit
        self._eye = torch.eye(q, dtype=y.dtype, device=y.device) if dense else None
        self._plain, self._alone = field.mode != "samples", samples == 1
        first = not any(method.A[0])
        self.carries_slope = first and not self._explicit and method.stiffly_accurate and method.c[-1] == 1
        self.ok, self.all_ok = torch.ones(samples, dtype=torch.bool, device=y.device), True
        self._eta = torch.ones_like(y[:, 0])
        self.rate, self.residual = torch.zeros_like(self._eta), torch.zeros_like(self._eta)
        self.iterations = torch.zeros_like(self.ok, dtype=torch.long)
        self.rows = y.unsqueeze(1)
        self.jacobians = self.factorisations = 0
        self._limited, self.strained = most is not None, False
        self.J: Tensor | None = None
        self._M: Tensor | None = None
        self._M_h = 0.0
        self._filter: Tensor | None = None
        self._past: list[tuple[float, Tensor]] = []
        self._memory = -(-POINTS // s)
        self._measured = False
        self._trusted: Tensor | None = None
        self._long: Tensor | None = None
        self._plans: dict[Any, Any] = {}
        self.weight: Tensor | None = None
        self.finer: Tensor | None = None

    def slopes(self, at: Tensor, Y: Tensor) -> Tensor:
        """f at the stages: at (q,) or (B, q), Y and the result (B, q, D)."""
        return self._field(self._call, at, Y) if Y.shape[1] > 1 else self.slope(at, Y.squeeze(1)).unsqueeze(1)

    def slope(self, at: Tensor, y: Tensor) -> Tensor:
        """f at a point of each sample: at (1,) or (B, 1), y and the result (B, D)."""
        if not self._plain or (at.dim() > 1 and not self._alone):
            return self._field(self._call, at, y.unsqueeze(1)).squeeze(1)
        layout = self._field.layout
        return layout.ravel(self._call(at.reshape(-1)[0], layout.unravel(y)))

    def refresh(self, at: Tensor, y: Tensor, where: Tensor | None = None) -> None:
        """Take J at a point of each sample, at (1,) or (B, 1), y (B, D); of the samples in `where` (B,) if given."""
        if self._eye is None:
            return
        self.jacobians += 1
        J = jacobian(self._field, self._call, self.slope, at, y)
        if self.kind == "diagonal":
            J = torch.diag_embed(J.diagonal(dim1=1, dim2=2))
        J = torch.where(torch.isfinite(J).flatten(1).all(dim=1)[:, None, None], J, 0.0)
        self.J = J if where is None or self.J is None else torch.where(where[:, None, None], J, self.J)

    def factorise(self, h: float | Tensor, where: Tensor | None = None) -> None:
        """The inverse matrix for steps of size h, a number or (B, 1); of the samples in `where` (B,) if given."""
        if self._eye is None or self.J is None:
            return
        self.factorisations += 1
        step = h.unsqueeze(2) if isinstance(h, Tensor) else h
        if self._in_turn:
            matrix = self._eye - (step * self._gamma) * self.J
        else:
            s, d = self._A.shape[0], self.J.shape[1]
            product = self._A.view(s, 1, s, 1) * self.J.view(-1, 1, d, 1, d)
            matrix = self._eye - step * product.reshape(-1, s * d, s * d)
            if self.method.error_filter:
                self._filter = torch.linalg.inv_ex(self._eye[:d, :d] - (step * self.method.error_filter) * self.J).inverse
        M = torch.linalg.inv_ex(matrix).inverse
        self._M = M if where is None or self._M is None else torch.where(where[:, None, None], M, self._M)

    def filtered(self, h: Tensor, at: Tensor, y: Tensor, error: Tensor) -> Tensor:
        """An error estimate (B, D) times (I - hγJ)⁻¹ with the γ of the method; at (1,) or (B, 1), h (B, 1)."""
        gamma = self.method.error_filter
        if self.kind == "krylov" and gamma:
            return self._gmres.solve(Operator(lambda z: z - h * gamma * self.slope(at, z), y, False), error).value
        if not gamma or self._eye is None:
            return error
        matrix = self._M if self._in_turn else self._filter
        assert matrix is not None
        return torch.bmm(matrix, error.unsqueeze(2)).squeeze(2)

    def advance(self, h: float, at: Tensor, y: Tensor, tolerance: Tensor, alive: Tensor | None, first: Tensor | None) -> Tensor:
        """A step on a grid that all samples share; J and its inverse are renewed when they must be.

        Args:
            h: the size of the step.
            at: the times of its stages, (s,).
            y: the state, (B, D).
            tolerance: ‖F‖ to reach, in units of `weight`, (B,).
            alive: the samples to solve for, (B,); None: all.
            first: h f(t, y) where known, (B, D).

        Returns:
            h times the slopes of the stages, (B, s, D).
        """
        if self._eye is not None and self.J is None:
            self.refresh(at[-1:], y)
        elif self._eye is not None and self._measured:
            slow = self.rate > _SLOW
            if bool(slow.any()):  # at the predicted end, as it is to serve there and beyond
                self.refresh(at[-1:], torch.add(y, self._past[-1][1][:, -1], alpha=h / self._past[-1][0]), slow)
                self.factorise(h, slow)
        if self._M is None or abs(h - self._M_h) > _SAME * abs(h):
            self.factorise(h)
            self._M_h = h
        G = self.solve(h, at, y, tolerance, alive, first, past=self._past)
        if not self.all_ok and self._eye is not None:
            # Not with that J, or from that start: a new J at y, where it is sure to exist, and from there.
            solved, rows, eta, rate, trusted = self.ok, self.rows, self._eta, self.rate, self._trusted
            missed = ~solved if alive is None else alive & ~solved
            self.refresh(at[:1], y, missed)
            self.factorise(h, missed)
            again = self.solve(h, at, y, tolerance, missed, first)
            G, self.rows = (torch.where(missed[:, None, None], new, old) for new, old in ((again, G), (self.rows, rows)))
            self._eta, self.rate = (torch.where(missed, new, old) for new, old in ((self._eta, eta), (self.rate, rate)))
            self._measured, self._trusted = True, trusted
            self.ok = solved | self.ok
            self.all_ok = bool((self.ok if alive is None else self.ok | ~alive).all())
        self._past = [*self._past, (h, G)][-self._memory :]
        return G

    def solve(
        self,
        h: float | Tensor,
        at: Tensor,
        y: Tensor,
        tolerance: Tensor,
        alive: Tensor | None = None,
        first: Tensor | None = None,
        past: list[tuple[float, Tensor]] | None = None,
        start: Tensor | None = None,
        scale: Tensor | None = None,
    ) -> Tensor:
        """h f at the stages, (B, s, D), with the matrix there is; sets `ok`, `rate`, `residual` and `rows`.

        Args:
            h: the size of the step, a number or (B, 1).
            at: the times of the stages, (s,) or (B, s).
            y, tolerance, alive, first: as in `advance`.
            past: the last steps, (h, h f) each, to start from.
            start: or the stages to start from, for coupled ones, (B, s, D).
            scale: measure corrections of Y in these units, root mean square, instead of F by its norm, (B, D).
        """
        self._scale, self._tolerance, self._everyone = scale, tolerance, alive is None
        self.ok, self.all_ok, self._measured = torch.ones_like(self.ok) if alive is None else alive, True, False
        solve = self._one_by_one if self._in_turn else self._coupled
        return solve(h, at, y, past or [], start if first is None else first)

    def _plan(self, h: float | Tensor, past: list[tuple[float, Tensor]]) -> Any:
        """How to start from the last steps; remembered for their sizes relative to this one's."""
        ratios = () if isinstance(h, Tensor) else tuple(round(old / h, 4) for old, _ in past)
        if ratios not in self._plans:
            c, plan = self.method.c, guess_in_turn if self._in_turn else guess_coupled
            places: list[Place] = []
            before = 0.0
            for k in reversed(range(len(ratios))):
                places = [((cj - 1) * ratios[k] - before, k, j, 1 / ratios[k]) for j, cj in enumerate(c)] + places
                before += ratios[k]
            self._plans[ratios] = plan(self.method, places)
        return self._plans[ratios]

    def _one_by_one(
        self, h: float | Tensor, at: Tensor, y: Tensor, past: list[tuple[float, Tensor]], first: Tensor | None
    ) -> Tensor:
        gamma, step = self._gamma, h * self._gamma
        G: list[Tensor] = []
        rows: list[Tensor] = []
        for i, (known, earlier, later) in enumerate(self._plan(h, past)):
            base = y
            for j, weight in known:
                base = torch.add(base, G[j], alpha=weight)
            here = at[..., i : i + 1]
            if self.method.A[i][i] == 0:
                G.append(first if i == 0 and first is not None else h * self.slope(here, base))
                rows.append(base)
                continue
            guess = base
            for k, j, weight in earlier:
                guess = torch.add(guess, past[k][1][:, j], alpha=weight)
            for j, weight in later:
                guess = torch.add(guess, G[j], alpha=weight)

            def residual(Y: Tensor, base: Tensor = base, here: Tensor = here) -> Tensor:
                return Y - base - step * self.slope(here, Y)

            start = guess if self._trusted is None else batch.select(self._trusted, guess, base)
            Y = self._iterate(residual, start, here, step)
            if self._long is not None or self._trusted is not None:
                self._doubt(guess, base, Y)
            G.append(Y - base if gamma == 1 else (Y - base) / gamma)
            rows.append(Y)
        slopes = G[0].unsqueeze(1) if len(G) == 1 else torch.stack(G, dim=1)
        if len(self._weights) > len(G):
            rows.append(y + torch.matmul(self._weights[-1], slopes))
        self.rows = rows[0].unsqueeze(1) if len(rows) == 1 else torch.stack(rows, dim=1)
        return slopes

    def _coupled(
        self, h: float | Tensor, at: Tensor, y: Tensor, past: list[tuple[float, Tensor]], start: Tensor | None
    ) -> Tensor:
        s, A = self.method.stages, self._A
        step = h.unsqueeze(2) if isinstance(h, Tensor) else h
        base = y.unsqueeze(1)
        level = base.expand(-1, s, -1)
        if start is None and past and not isinstance(h, Tensor):
            used, weights = self._plan(h, past)
            slopes = torch.stack([past[k][1][:, j] for k, j in used], dim=1)
            start = base + torch.matmul(weights.to(y), slopes)
        guess, level = (level if start is None else start).flatten(1), level.flatten(1)
        trusted = None if not past else self._trusted

        def residual(Y: Tensor) -> Tensor:
            Y = Y.unflatten(1, (s, -1))
            return (Y - base - step * torch.matmul(A, self.slopes(at, Y))).flatten(1)

        Y = self._iterate(residual, guess if trusted is None else batch.select(trusted, guess, level), at, step)
        if past and (self._long is not None or self._trusted is not None):
            self._doubt(guess, level, Y)
        Y = Y.unflatten(1, (s, -1))
        G = step * self.slopes(at, Y) if self._inverse_A is None else torch.matmul(self._inverse_A, Y - base)
        self.rows = Y if len(self._weights) == s else torch.cat((Y, base + torch.matmul(self._weights[-1:], G)), dim=1)
        return G

    def _doubt(self, guess: Tensor, base: Tensor, Y: Tensor) -> None:
        """Start the next steps from where the last one ended, for samples whose guess was worse than that."""
        good = batch.norm(Y - guess) <= batch.norm(Y - base)
        for unquestioned in (self._trusted, None if self._long is None else ~self._long):
            good = good if unquestioned is None else good | unquestioned
        self._trusted = None if bool(good.all()) else good

    def _iterate(self, residual: Callable[[Tensor], Tensor], Y: Tensor, at: Tensor, h: float | Tensor) -> Tensor:
        """Newton's iteration on (B, q), frozen for each sample where it is done; at and h as in `_own`."""
        running, tolerance, scale = self.ok, self._tolerance, self._scale
        # A small correction proves nothing before its rate is known: it may be the matrix that is wrong. A small F does.
        eta = self._eta if scale is None else torch.full_like(self._eta, torch.finfo(Y.dtype).max)
        before: Tensor | None = None
        failed: Tensor | None = None
        measured: Tensor | None = None
        reached: Tensor | None = None  # by what F is in units of `weight`, where those of `finer` are looked at, too
        left = torch.full_like(self._eta, torch.inf)
        self._long = None
        for k in range(self.max_steps):
            F, correction = self._correction(residual, Y, at, h)
            if self.strained:
                break
            size = batch.norm(_in_units(F, self.weight) if scale is None else _in_units(correction, scale) / Y.shape[1] ** 0.5)
            if before is not None:
                theta = size / before
                going = running if reached is None else running & ~reached
                eta = torch.where(going, torch.where(theta < 1, theta / (1 - theta), torch.inf), eta)
                # Below the tolerance rounding sets the rate, and who would mind.
                rate = torch.where(running & ~(size <= tolerance), theta, 0.0)
                self.rate, self._measured = torch.maximum(self.rate, rate) if self._measured else rate, True
            moved = Y - correction
            Y = moved if self._alone or (before is None and self._everyone) else batch.select(running, moved, Y)
            self.iterations += running
            self.residual = eta * size
            over = self.residual <= tolerance
            if self.finer is not None:
                reached = over if reached is None else reached | over
                small = batch.norm(_in_units(F, self.finer))
                over, left = reached & ((eta * small <= tolerance) | ~(small <= _FALLS * left)), small
            running = running & ~over
            if not bool(running.any()):
                break
            measured = running if k == 0 else measured
            self._long = running if k == _MANY else self._long
            if before is not None:
                # Neither shrinking nor going to be small in time, unless rounding is all that is left.
                slow = ~((theta < 0.99) & (theta ** (self.max_steps - 1 - k) * self.residual <= tolerance))
                rounding = _ROUNDINGS * torch.finfo(Y.dtype).eps * batch.norm(_in_units(Y, self.weight))
                exhausted = batch.norm(_in_units(correction, self.weight)) <= rounding
                ended = slow | exhausted if reached is None else (slow | exhausted) & ~reached
                hopeless = running & ended & ~exhausted
                failed = hopeless if failed is None else failed | hopeless
                running = running & ~ended
                if not bool(running.any()):
                    break
            before = size
        # What the first iteration of the next step may count on; not much, as f may be less linear there.
        self._eta = eta**0.8 if measured is None else torch.where(measured, eta.clamp(_TRUST, 1.0), eta**0.8)
        if failed is not None or k + 1 == self.max_steps:
            lost = running if reached is None else running & ~reached
            lost = lost if failed is None else lost | failed
            self.ok = self.ok & ~lost
            self.all_ok = self.all_ok and not bool(lost.any())
        return Y

    def _correction(
        self, residual: Callable[[Tensor], Tensor], Y: Tensor, at: Tensor, h: float | Tensor
    ) -> tuple[Tensor, Tensor]:
        if self.kind == "krylov":
            if self._block is None:
                operator = Operator(residual, Y, False)
                F = operator.graph()[1].detach()
                return F, self._noted(self._gmres.solve(operator, F))
            with torch.no_grad():
                F = residual(Y)
                step = h if isinstance(h, Tensor) else torch.full((), h, dtype=Y.dtype, device=Y.device)
                return F, self._noted(self._block.solve(Y, (at, step), F, self._block.expected()))
        F = residual(Y)
        return F, F if self._M is None else torch.bmm(self._M, F.unsqueeze(2)).squeeze(2)

    def _noted(self, found: Result) -> Tensor:
        if self._limited and not self.strained:
            self.strained = bool((found.status != Status.converged).any())
        return found.value

    def _own(self, Y: Tensor, at: Tensor, h: Tensor) -> Tensor:
        """The part of F that depends on the stages, (B, q): at as in `solve`, h times γ where the stages are solved in turn."""
        if self._in_turn:
            return Y - h * self.slope(at, Y)
        stages = Y.unflatten(1, (self.method.stages, -1))
        return (stages - h * torch.matmul(self._A, self.slopes(at, stages))).flatten(1)


def _in_units(a: Tensor, units: Tensor | None) -> Tensor:
    """F, Y or a correction, (B, q), in units of each component, (B, D)."""
    return a if units is None else (a.unflatten(1, (-1, units.shape[1])) / units.unsqueeze(1)).flatten(1)
