"""Count the words that many processes read: ``mpiexec -n 4 python mpi_dense.py``.

Every process sees few words of a large vocabulary.
"""

import numpy as np
from mpi4py import MPI

VOCABULARY = 1_000_000

comm = MPI.COMM_WORLD
words = np.random.default_rng(comm.rank).zipf(1.3, size=20_000) % VOCABULARY
seen, times = np.unique(words, return_counts=True)

counts = np.zeros(VOCABULARY, dtype=np.float32)
counts[seen] = times
total = np.empty_like(counts)
comm.Allreduce(counts, total)
seen = np.flatnonzero(total)
times = total[seen]

if comm.rank == 0:
    print(f"{len(seen)} words, the most frequent {times.max():.0f} times, {times.sum():.0f} in all")
