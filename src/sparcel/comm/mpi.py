"""The communicator over MPI, by mpi4py (the extra ``mpi``)."""

from sparcel.core.comm.mpi import *
from sparcel.core.comm.mpi import __all__ as __all__
