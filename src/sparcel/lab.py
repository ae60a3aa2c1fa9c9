"""A cluster on one machine: nodes joined by emulated Ethernet, and workers that run on them."""

from sparcel.tools.lab import *
from sparcel.tools.lab import __all__ as __all__
