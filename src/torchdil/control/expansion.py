"""Dynamics and cost along a trajectory, to second order.

With the costates λ_H = ∇c_f, λ_t = ∂c/∂x + Aᵀ λ_{t+1} the gradient of the total cost in u_t is ∂c/∂u + Bᵀ λ_{t+1}, and its
Hessian is that of the linear-quadratic problem

    min ½ Σ [dx; du]ᵀ ∇²(c + λ_{t+1}ᵀ h) [dx; du] + ½ dx_Hᵀ ∇²c_f dx_H,    dx_{t+1} = A dx_t + B du_t,    dx_0 = 0.

All times and samples are differentiated together.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchdil.control.plan import Plan
from torchdil.control.shapes import apply, symmetric
from torchdil.graph import rows_by_autograd


class Expansion(NamedTuple):
    """The linear-quadratic problem at a trajectory.

    Attributes:
        x: the states, (B, H+1, n).
        A, B: ∂h/∂x and ∂h/∂u, (B, H, n, n) and (B, H, n, m).
        Q, M, R: the blocks xx, ux, uu of ∇²(c + λᵀh), (B, H, n, n), (B, H, m, n), (B, H, m, m).
        P: ∇²c_f, (B, n, n).
        slope: the gradient of the total cost in u, (B, H, m).
    """

    x: Tensor
    A: Tensor
    B: Tensor
    Q: Tensor
    M: Tensor
    R: Tensor
    P: Tensor
    slope: Tensor

    def hold(self, held: Tensor) -> Expansion:
        """The same with the controls in `held`, (B, H, m), taken out: their own block is the identity."""
        free = ~held
        R = torch.where(free.unsqueeze(-1) & free.unsqueeze(-2), self.R, torch.diag_embed(held.to(self.R.dtype)))
        B, M = torch.where(free.unsqueeze(-2), self.B, 0.0), torch.where(free.unsqueeze(-1), self.M, 0.0)
        return self._replace(B=B, M=M, R=R)


def expand(plan: Plan, u: Tensor, x0: Tensor) -> Expansion:
    """The expansion at the trajectory that the controls u (B, H, m) lead to from x0 (B, n); no graph."""
    with torch.no_grad():
        x = plan.states(u.detach(), x0.detach())
    n = x.shape[2]
    with torch.enable_grad():
        z = torch.cat((x[:, :-1], u.detach()), dim=2).requires_grad_()
        ahead = plan.stages(plan.dynamics, z[..., :n], z[..., n:])
        costs = plan.stages(plan.cost, z[..., :n], z[..., n:])
        slope = _gradient(costs, z, torch.ones_like(costs))
        end = x[:, -1].clone().requires_grad_()
        final = plan.last(end, u[:, -1].detach())
        end_slope = _gradient(final, end, torch.ones_like(final))
        jacobian = _jacobian(ahead, z)
        A, B = jacobian[..., :n], jacobian[..., n:]
        costates = [end_slope.detach()]
        for t in reversed(range(1, u.shape[1])):
            costates.append(slope[:, t, :n].detach() + apply(A[:, t].mT, costates[-1]))
        hamiltonian = slope + _gradient(ahead, z, torch.stack(costates[::-1], dim=1))
        in_u = hamiltonian[..., n:].detach()
        hessian, P = _jacobian(hamiltonian, z), _jacobian(end_slope, end)
    hessian, P = symmetric(hessian), symmetric(P)
    return Expansion(x, A, B, hessian[..., :n, :n], hessian[..., n:, :n], hessian[..., n:, n:], P, in_u)


def _gradient(value: Tensor, at: Tensor, weights: Tensor) -> Tensor:
    if not value.requires_grad:
        return torch.zeros_like(at)
    (grad,) = torch.autograd.grad(value, at, weights, create_graph=True, materialize_grads=True)
    return grad


def _jacobian(value: Tensor, at: Tensor) -> Tensor:
    """(..., p), a function of (..., k) row by row -> (..., p, k); no graph."""
    if not value.requires_grad:
        return at.new_zeros((*value.shape, at.shape[-1]))
    eye = torch.eye(value.shape[-1], dtype=at.dtype, device=at.device)
    units = eye.reshape(-1, *(1,) * (value.dim() - 1), value.shape[-1]).expand(-1, *value.shape)
    return rows_by_autograd(value, at, units).movedim(0, -2)
