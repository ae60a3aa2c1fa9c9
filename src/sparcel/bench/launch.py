"""Starting the ranks, where nobody else did."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from rich.console import Console

from sparcel.bench.settings import Settings
from sparcel.errors import InputError
from sparcel.lab import Job, Loopback


def start(settings: Settings, ranks: int, console: Console) -> None:
    """Run the benchmark on processes of this machine, and show what rank 0 prints.

    Raises
    ------
    InputError
        When MPI is asked for, and has no ``mpiexec`` here.
    WorkerFailedError
        As soon as one fails; the others are ended.
    """
    argv = [sys.executable, "-m", "sparcel.bench", settings.to_json()]
    threads = str(max(1, (os.cpu_count() or 1) // ranks))
    environment = {"OMP_NUM_THREADS": threads, "COLUMNS": str(console.width)}
    network = Loopback(ranks)
    environment["SPARCEL_LAB_DESCRIPTION"] = network.description
    if "mpi" in settings.engines:
        command = [_mpiexec(), "-n", str(ranks), *argv]
        ended = subprocess.run(command, env={**os.environ, **environment}, check=False)
        if ended.returncode:
            sys.exit(ended.returncode)
        return
    with Job(network, argv, environment) as job:
        for rank, line in job.lines():
            if rank == 0:
                console.print(line, markup=False, soft_wrap=True)


def _mpiexec() -> str:
    beside = Path(sys.executable).with_name("mpiexec")  # where the wheels of MPICH put it
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if found is None:
        raise InputError(
            "engine 'mpi' needs mpiexec: pip install mpich, or load your cluster's MPI"
        )
    return found
