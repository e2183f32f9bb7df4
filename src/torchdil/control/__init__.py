"""Optimal control: Riccati equations, linear-quadratic regulators and model-predictive control as implicit layers."""

from torchdil.control.dare import dare as dare
from torchdil.control.dare import dlqr as dlqr
from torchdil.control.ddp import DDP as DDP
from torchdil.control.lqr import Policy as Policy
from torchdil.control.lqr import lqr as lqr
from torchdil.control.mpc import MPC as MPC
from torchdil.control.plan import Rollout as Rollout
from torchdil.control.riccati import Riccati as Riccati
from torchdil.control.stein import Stein as Stein
