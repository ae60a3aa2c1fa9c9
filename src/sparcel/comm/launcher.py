"""What launched this process, by its environment, and the ranks that were launched with it."""

from __future__ import annotations

import os

_MPI_RANKS = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")
"""Variables that the launchers of MPICH, PMIx and Open MPI set."""

_TORCH = ("RANK", "WORLD_SIZE", "MASTER_ADDR")
"""Variables that torchrun sets."""


def launched() -> tuple[str, ...]:
    """Return the engines for which this process was launched; none if it was started alone."""
    if any(name in os.environ for name in _MPI_RANKS) and "TORCHELASTIC_RUN_ID" not in os.environ:
        return ("gloo", "mpi")
    return ("gloo",) if all(name in os.environ for name in _TORCH) else ()
