"""Linear solvers: one file each, all per sample, all matrix-free except `Dense`."""

from torchdil.linear.auto import Auto as Auto
from torchdil.linear.base import LinearSolver as LinearSolver
from torchdil.linear.bicgstab import BiCGStab as BiCGStab
from torchdil.linear.cg import CG as CG
from torchdil.linear.dense import Dense as Dense
from torchdil.linear.gmres import GMRES as GMRES
from torchdil.linear.minres import MINRES as MINRES
from torchdil.linear.neumann import JacobianFree as JacobianFree
from torchdil.linear.neumann import Neumann as Neumann
from torchdil.linear.normal_cg import NormalCG as NormalCG
from torchdil.linear.precondition import Jacobi as Jacobi
from torchdil.linear.precondition import Nystrom as Nystrom
from torchdil.linear.precondition import SecantMemory as SecantMemory
from torchdil.linear.warm_start import WarmStart as WarmStart
