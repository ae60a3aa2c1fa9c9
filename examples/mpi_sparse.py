"""Count the words that many processes read: ``mpiexec -n 4 python mpi_sparse.py``.

Every process sees few words of a large vocabulary.
"""

import numpy as np
from mpi4py import MPI

import sparcel

VOCABULARY = 1_000_000

comm = MPI.COMM_WORLD
words = np.random.default_rng(comm.rank).zipf(1.3, size=20_000) % VOCABULARY
seen, times = np.unique(words, return_counts=True)

counts = sparcel.SparseStream(seen, times.astype(np.float32), VOCABULARY)
total = sparcel.all_reduce(counts, group=comm)
seen, times = np.asarray(total.indices), np.asarray(total.values)

if comm.rank == 0:
    print(f"{len(seen)} words, the most frequent {times.max():.0f} times, {times.sum():.0f} in all")
