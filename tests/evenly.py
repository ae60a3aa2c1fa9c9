"""Training at an even density: with front-loading, a test's few steps would send everything."""

from functools import partial

import sparcel
from sparcel.core.training import Averager

attach_evenly = partial(sparcel.attach, frontload=False)
even_averager = partial(Averager, frontload=False)
