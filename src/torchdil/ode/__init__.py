"""Ordinary differential equations: implicit methods with exact gradients."""

from torchdil.ode.methods import RK4 as RK4
from torchdil.ode.methods import SDIRK2 as SDIRK2
from torchdil.ode.methods import TRBDF2 as TRBDF2
from torchdil.ode.methods import BackwardEuler as BackwardEuler
from torchdil.ode.methods import ForwardEuler as ForwardEuler
from torchdil.ode.methods import GaussLegendre as GaussLegendre
from torchdil.ode.methods import ImplicitMidpoint as ImplicitMidpoint
from torchdil.ode.methods import Kvaerno5 as Kvaerno5
from torchdil.ode.methods import Method as Method
from torchdil.ode.methods import RadauIIA as RadauIIA
from torchdil.ode.methods import Trapezoid as Trapezoid
from torchdil.ode.neural import NeuralODE as NeuralODE
from torchdil.ode.newton import SimplifiedNewton as SimplifiedNewton
from torchdil.ode.odeint import odeint as odeint
from torchdil.ode.odeint import solve as solve
from torchdil.ode.whole import WholeTrajectory as WholeTrajectory
