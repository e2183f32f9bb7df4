"""Forward solvers: one file each, all per sample, none of them differentiated."""

from torchdil.solvers.base import Solver as Solver
from torchdil.solvers.gradient import GradientDescent as GradientDescent
from torchdil.solvers.lbfgs import LBFGS as LBFGS
from torchdil.solvers.newton import Newton as Newton
from torchdil.solvers.picard import Picard as Picard
