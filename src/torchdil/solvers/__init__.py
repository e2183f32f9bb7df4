"""Forward solvers: one file each, all per sample, none of them differentiated."""

from torchdil.solvers.anderson import Anderson as Anderson
from torchdil.solvers.base import Solver as Solver
from torchdil.solvers.broyden import Broyden as Broyden
from torchdil.solvers.gradient import GradientDescent as GradientDescent
from torchdil.solvers.lbfgs import LBFGS as LBFGS
from torchdil.solvers.newton import Newton as Newton
from torchdil.solvers.picard import Picard as Picard
from torchdil.solvers.sampling import CEM as CEM
from torchdil.solvers.sampling import MPPI as MPPI
from torchdil.solvers.sampling import RandomShooting as RandomShooting
from torchdil.solvers.scipy_solver import SciPy as SciPy
from torchdil.solvers.torch_optim import TorchOptim as TorchOptim
