"""One file per method: how the network is built, how the gradient is transformed, which coordinates decide.

Importing a method's module registers it; add yours to the list below. `parse` reads what ``--method`` says.
"""

from hesscond.methods.adaptive import AdaGrad, Adam, AdamW, RMSProp
from hesscond.methods.base import Method
from hesscond.methods.batchnorm import BatchNormalization
from hesscond.methods.batchrenorm import BatchRenormalization
from hesscond.methods.bnp import BNP
from hesscond.methods.composed import Composed
from hesscond.methods.curvature_diagonal import AdaHessian, Sophia
from hesscond.methods.equilibration import Equilibration
from hesscond.methods.four_things import FourThings
from hesscond.methods.gauss_newton import GaussNewton
from hesscond.methods.kfac import EKFAC, KFAC
from hesscond.methods.muon import Muon
from hesscond.methods.normalization import GroupNormalization, InstanceNormalization, LayerNormalization
from hesscond.methods.optimal_diagonal import OptimalDiagonal
from hesscond.methods.preprocessing import MinMax, Standardization
from hesscond.methods.psgd import PSGD
from hesscond.methods.registry import method_class, register, registered
from hesscond.methods.regularization import L2, GradientRegularization
from hesscond.methods.shampoo import SOAP, Shampoo
from hesscond.methods.spec import Spec, options, parse
from hesscond.methods.sphere import Sphere
from hesscond.methods.vanilla import Vanilla
from hesscond.methods.weight_normalization import CentredWeightNormalization, WeightNormalization
from hesscond.methods.weight_standardization import WeightStandardization
from hesscond.methods.whitening import Whitening

__all__ = [
    "BNP",
    "EKFAC",
    "KFAC",
    "L2",
    "PSGD",
    "SOAP",
    "AdaGrad",
    "AdaHessian",
    "Adam",
    "AdamW",
    "BatchNormalization",
    "BatchRenormalization",
    "CentredWeightNormalization",
    "Composed",
    "Equilibration",
    "FourThings",
    "GaussNewton",
    "GradientRegularization",
    "GroupNormalization",
    "InstanceNormalization",
    "LayerNormalization",
    "Method",
    "MinMax",
    "Muon",
    "OptimalDiagonal",
    "RMSProp",
    "Shampoo",
    "Sophia",
    "Spec",
    "Sphere",
    "Standardization",
    "Vanilla",
    "WeightNormalization",
    "WeightStandardization",
    "Whitening",
    "method_class",
    "options",
    "parse",
    "register",
    "registered",
]
