"""Named tensors in, updates out, all or nothing: what the drivers of all wrappers share."""

from sparcel.core.training import *
from sparcel.core.training import __all__ as __all__
