"""Will it help: what a step of training takes with every method, on a cluster as it is."""

from sparcel.tools.plan import *
from sparcel.tools.plan import __all__ as __all__
