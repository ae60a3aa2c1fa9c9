"""The program that every rank runs: measures all cells, one after the other; and its start."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from sparcel.core.comm import Communicator, launched
from sparcel.core.cost import Rates, read_rates
from sparcel.core.formats import format_named
from sparcel.tools.bench import NOW
from sparcel.tools.bench.contenders import DENSE, BenchEngine, connected, contender, names
from sparcel.tools.bench.inputs import Case, load_gradients
from sparcel.tools.bench.results import (
    Cell,
    Results,
    Show,
    progress,
    summarized,
    summary,
    tables,
    verdict,
)
from sparcel.tools.bench.settings import BenchSettings
from sparcel.tools.bench.timing import (
    Measured,
    merged,
    predicted,
    set_rates,
    time_contender,
)
from sparcel.tools.lab import Loopback, Workers

_BASELINE = "dense fp32"

_LOCAL_SIZES = ("LOCAL_WORLD_SIZE", "MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE")
"""Variables in which torchrun, MPICH and Open MPI tell the number of ranks of a machine."""


def read_files(settings: BenchSettings) -> Tensor | None:
    """Return the gradients of the settings, if any, and check that their rates can be read.

    Raises
    ------
    InputError
        When a file can't be read, or holds something else.
    """
    for source in settings.sources.values():
        if source != NOW:
            read_rates(source)
    return None if settings.gradients is None else load_gradients(settings.gradients.resolve())


def run(settings: BenchSettings, console: Console) -> Results:
    """Measure all cells of the settings; every rank calls, rank 0 shows and saves the results.

    Raises
    ------
    InputError
        When an engine or an algorithm does not exist, or a file holds no gradients.
    """
    with connected(settings.on or launched()) as engines:
        comm = engines[0].comm
        # As a job, so that the other ranks learn of the cause if only one can't read a file.
        gradients = comm.run(lambda: read_files(settings))
        _share_cores(comm.size)
        command = shlex.join(["sparcel", *sys.argv[1:]])
        results = Results(command, network(settings, comm), comm.size)
        rates = set_rates(engines, settings.sources)
        results.rates = {name: json.loads(one.to_json()) for name, one in rates.items()}
        rows = names(settings.algorithms, settings.whole_step, results.network["ranks_per_node"])
        cases = list(_cases(settings, gradients, comm.size, rows))
        runs = settings.rounds * len(engines) * sum(len(names) for _, names in cases)
        with progress(console if comm.rank == 0 else None, runs) as show:
            measuring = Measuring(settings, engines, results.network, rates, show)
            while cases:
                # Pop each case, so that its inputs are freed when it is done.
                results.cells += measuring.cells(*cases.pop(0))
        _compare(results)
        if comm.rank == 0:
            for block in tables(results):
                console.print(block, soft_wrap=isinstance(block, str))
            for line in (summary(results), verdict(results.cells)):
                if line:
                    console.print(line, soft_wrap=True)
            if settings.json is not None:
                results.save(settings.json)
                console.print(f"Results: {settings.json.resolve()}", soft_wrap=True)
        return results


def network(settings: BenchSettings, comm: Communicator) -> dict[str, Any]:
    """Describe the network, by the lab or by launcher and settings; all ranks call."""
    rate = settings.bits_per_s or _number("SPARCEL_LAB_RATE_BITS_PER_S")
    each = _number("SPARCEL_LAB_RANKS_PER_NODE") or _number("LOCAL_WORLD_SIZE")
    each = each or comm.run(comm.ranks_per_node)
    nodes = _number("SPARCEL_LAB_NODES") or -(-comm.size // each)
    description = os.environ.get("SPARCEL_LAB_DESCRIPTION", f"{comm.size} ranks, as launched")
    return {
        "description": description,
        "nodes": nodes,
        "ranks_per_node": each,
        "rate_bits_per_s": rate,
    }


def _number(variable: str) -> int | None:
    text = os.environ.get(variable, "")
    return int(text) if text.isdigit() else None


def _share_cores(ranks: int) -> None:
    """Give each rank its share of this machine's cores, unless the environment sets the threads."""
    told = () if "SPARCEL_LAB_NODES" in os.environ else map(_number, _LOCAL_SIZES)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(_threads(next(filter(None, told), ranks)))


def _threads(ranks: int) -> int:
    return max(1, (os.cpu_count() or 1) // ranks)


def _cases(
    settings: BenchSettings, gradients: Tensor | None, ranks: int, rows: list[str]
) -> Iterator[tuple[Case, list[str]]]:
    """Yield each case and the rows to measure: of dense sums those of the first of each size."""
    for size in settings.coordinates if gradients is None else (gradients.shape[1],):
        names = rows
        for distribution, density in settings.kinds:
            given = gradients if distribution == "file" else None
            yield Case(size, density, distribution, ranks, given), names
            names = [name for name in rows if name not in DENSE]


@dataclass
class Measuring:
    """What is measured of every case, and how."""

    settings: BenchSettings
    engines: list[BenchEngine]
    network: dict[str, Any]
    rates: dict[str, Rates]
    show: Show

    def __post_init__(self) -> None:
        self.format = format_named(self.settings.format)

    def cells(self, case: Case, names: Sequence[str]) -> list[Cell]:
        """Measure a case's cells in rounds, so that passing disturbances hit all of them."""
        rounds: dict[tuple[str, str], list[Measured]] = {}
        cells: dict[tuple[str, str], Cell] = {}
        settings, here = self.settings, self.network["ranks_per_node"]
        for _, name, engine in product(range(settings.rounds), names, self.engines):
            made, key = contender(name, case, engine, here, self.format), (name, engine.name)
            if made is not None:
                found = time_contender(made, engine.comm, settings.iterations, settings.warmup)
                rounds.setdefault(key, []).append(found)
                cells[key] = self._cell(name, case, engine.name, merged(rounds[key]))
            self.show(cells.get(key))
        return [*cells.values()]

    def _cell(self, name: str, case: Case, engine: str, found: Measured) -> Cell:
        seconds, is_dense = summarized(found.seconds), name in DENSE
        rate, here = self.network["rate_bits_per_s"], self.network["ranks_per_node"]
        is_known = rate is not None and here == 1
        return Cell(
            engine=engine,
            algorithm=name,
            size=case.size,
            density=1.0 if is_dense else case.density,
            k=case.size if is_dense else case.k,
            distribution="any" if is_dense else case.distribution,
            dtype="bfloat16" if DENSE.get(name) == torch.bfloat16 else "float32",
            seconds=seconds,
            phases=found.phases,
            bytes=found.bytes,
            wire_share=8 * found.bytes / rate / seconds["median"] if is_known else None,
            speedup=None,
            wrong=found.wrong,
            predicted=predicted(name, case, here, self.rates.get(engine), self.format),
            format=self.settings.format,
        )


def _compare(results: Results) -> None:
    """Set every cell's speed-up."""
    baselines: dict[int, float] = {}
    for cell in results.cells:
        if cell.algorithm == _BASELINE:
            baselines[cell.size] = min(cell.median, baselines.get(cell.size, cell.median))
    for cell in results.cells:
        cell.speedup = baselines[cell.size] / cell.median


def start(ranks: int, console: Console, mpi: bool) -> None:
    """Run this process's command on processes of this machine, and show the output of rank 0.

    Raises
    ------
    WorkerFailedError
        As soon as one process fails; the others are ended.
    """
    # Without -P, Python would take modules from the folder in which the command runs.
    argv = [sys.executable, "-P", "-m", "sparcel", *sys.argv[1:]]
    environment = {
        "OMP_NUM_THREADS": str(_threads(ranks)),
        "COLUMNS": str(console.width),
        # UCX finds no route if loopback is the only device that it may use; among all it works.
        "UCX_NET_DEVICES": os.environ.get("UCX_NET_DEVICES", "all"),
    }
    with Workers(Loopback(ranks), argv, environment, mpi=mpi) as workers:
        for rank, line in workers.lines():
            if rank == 0:
                console.print(line, markup=False, soft_wrap=True)
