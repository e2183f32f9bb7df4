"""torchdil: differentiable implicit layers for PyTorch.

A layer defined by a problem instead of a formula: y = argmin_u f(u; x, θ), a root, or a fixed point. Any solver finds y; the
backward pass is exact by the implicit function theorem, matrix-free, and says how right it is.
"""

from torchdil import control as control
from torchdil import ode as ode
from torchdil.argmin import argmin as argmin
from torchdil.attach import attach as attach
from torchdil.check import GradientCheck as GradientCheck
from torchdil.check import check_gradient as check_gradient
from torchdil.fixed_point import fixed_point as fixed_point
from torchdil.layers import ArgminLayer as ArgminLayer
from torchdil.layers import FixedPointLayer as FixedPointLayer
from torchdil.layers import LastSolution as LastSolution
from torchdil.layers import RootLayer as RootLayer
from torchdil.linear import CG as CG
from torchdil.linear import GMRES as GMRES
from torchdil.linear import MINRES as MINRES
from torchdil.linear import Auto as Auto
from torchdil.linear import BiCGStab as BiCGStab
from torchdil.linear import Dense as Dense
from torchdil.linear import Jacobi as Jacobi
from torchdil.linear import JacobianFree as JacobianFree
from torchdil.linear import LinearSolver as LinearSolver
from torchdil.linear import Neumann as Neumann
from torchdil.linear import NormalCG as NormalCG
from torchdil.linear import Nystrom as Nystrom
from torchdil.linear import SecantMemory as SecantMemory
from torchdil.linear import WarmStart as WarmStart
from torchdil.ode import NeuralODE as NeuralODE
from torchdil.ode import odeint as odeint
from torchdil.root import root as root
from torchdil.solution import ConvergenceError as ConvergenceError
from torchdil.solution import ConvergenceWarning as ConvergenceWarning
from torchdil.solution import Report as Report
from torchdil.solution import Solution as Solution
from torchdil.solution import Status as Status
from torchdil.solvers import CEM as CEM
from torchdil.solvers import LBFGS as LBFGS
from torchdil.solvers import MPPI as MPPI
from torchdil.solvers import Anderson as Anderson
from torchdil.solvers import Broyden as Broyden
from torchdil.solvers import GradientDescent as GradientDescent
from torchdil.solvers import Newton as Newton
from torchdil.solvers import Picard as Picard
from torchdil.solvers import RandomShooting as RandomShooting
from torchdil.solvers import SciPy as SciPy
from torchdil.solvers import Solver as Solver
from torchdil.solvers import TorchOptim as TorchOptim

__version__ = "0.1.0"
