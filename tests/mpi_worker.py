"""The process of one MPI rank for tests: ``mpiexec -n 8 python -m tests.mpi_worker ADDRESS``.

It serves the pool of `tests.mpi_pool` that listens at the address.
"""

import sys
from multiprocessing.connection import Client

from mpi4py import MPI

from tests.workers import serve

if __name__ == "__main__":
    with Client(sys.argv[1]) as connection:
        connection.send(MPI.COMM_WORLD.rank)
        serve(connection)
