"""Weight deltas: what changed since the last version, to everyone who serves the model."""

from sparcel.products.delta import *
from sparcel.products.delta import __all__ as __all__
