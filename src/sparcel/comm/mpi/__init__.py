"""The communicator over MPI, by mpi4py (the extra ``mpi``).

Importing this starts MPI, as ``from mpi4py import MPI`` does.
"""

from sparcel.comm.mpi.communicator import MpiCommunicator, connect
from sparcel.comm.mpi.shutdown import exit_after_failure

__all__ = ["MpiCommunicator", "connect", "exit_after_failure"]
