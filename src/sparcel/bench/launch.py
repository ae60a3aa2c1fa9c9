"""Starts the ranks on this machine, if no launcher started them."""

from __future__ import annotations

import os
import sys

from rich.console import Console

from sparcel.lab import Loopback, Workers


def start(ranks: int, console: Console, mpi: bool) -> None:
    """Run this process's command on processes of this machine, and show the output of rank 0.

    Raises
    ------
    WorkerFailedError
        As soon as one process fails; the others are ended.
    """
    argv = [sys.executable, "-m", "sparcel", *sys.argv[1:]]
    threads = str(max(1, (os.cpu_count() or 1) // ranks))
    environment = {"OMP_NUM_THREADS": threads, "COLUMNS": str(console.width)}
    # UCX finds no route if loopback is the only device that it may use; among all it works.
    environment["UCX_NET_DEVICES"] = os.environ.get("UCX_NET_DEVICES", "all")
    with Workers(Loopback(ranks), argv, environment, mpi=mpi) as workers:
        for rank, line in workers.lines():
            if rank == 0:
                console.print(line, markup=False, soft_wrap=True)
