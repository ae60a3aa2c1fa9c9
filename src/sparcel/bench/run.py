"""The program that every rank runs: measures all cells, one after the other."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from sparcel.bench import contenders, report
from sparcel.bench.baselines import DENSE
from sparcel.bench.contenders import contender
from sparcel.bench.engines import BenchEngine, connected
from sparcel.bench.inputs import Case, load_gradients
from sparcel.bench.predicted import NOW, predicted, rates_for, verdict
from sparcel.bench.results import Cell, Results, summarized
from sparcel.bench.settings import BenchSettings
from sparcel.bench.timing import Measured, merged, time_contender
from sparcel.comm import Communicator, launched
from sparcel.cost import Rates, read_rates
from sparcel.formats import format_named

_BASELINE = "dense fp32"

_LOCAL_SIZES = ("LOCAL_WORLD_SIZE", "MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE")
"""Variables in which torchrun, MPICH and Open MPI tell the number of ranks of a machine."""


@dataclass(frozen=True)
class CellKey:
    """What tells a cell of the table from others: the row's name, the case and the engine."""

    algorithm: str
    case: Case
    engine: BenchEngine


def read_files(settings: BenchSettings) -> Tensor | None:
    """Return the gradients of the settings, if any, and check that their rates can be read.

    Raises
    ------
    InputError
        When a file can't be read, or holds something else.
    """
    for source in settings.rates.values():
        if source != NOW:
            read_rates(source)
    return None if settings.gradients is None else load_gradients(Path(settings.gradients))


def run(settings: BenchSettings, console: Console) -> Results:
    """Measure all cells of the settings; every rank calls, rank 0 shows and saves the results.

    Raises
    ------
    InputError
        When an engine or an algorithm does not exist, or a file holds no gradients.
    """
    with connected(settings.engines or launched()) as engines:
        comm = engines[0].comm
        # As a job, so that the other ranks learn of the cause if only one can't read a file.
        gradients = comm.run(lambda: read_files(settings))
        _share_cores(comm.size)
        results = Results(settings.command, network(settings, comm), comm.size)
        rates = rates_for(engines, settings.rates)
        results.rates = {name: json.loads(one.to_json()) for name, one in rates.items()}
        groups = list(_groups(settings, gradients, engines, results.network["ranks_per_node"]))
        runs = settings.rounds * sum(map(len, groups))
        with report.progress(console if comm.rank == 0 else None, runs) as show:
            while groups:
                # Pop each case, so that its inputs are freed when it is done.
                results.cells += _cells(groups.pop(0), settings, results.network, rates, show)
        _compare(results)
        if comm.rank == 0:
            for block in report.tables(results):
                console.print(block, soft_wrap=isinstance(block, str))
            for line in (report.summary(results), verdict(results.cells)):
                if line:
                    console.print(line, soft_wrap=True)
            if settings.json is not None:
                results.save(Path(settings.json))
                console.print(f"Results: {settings.json}", soft_wrap=True)
        return results


def network(settings: BenchSettings, comm: Communicator) -> dict[str, Any]:
    """Describe the network, by the lab or by launcher and settings; all ranks call."""
    rate = settings.rate_bits_per_s or _number("SPARCEL_LAB_RATE_BITS_PER_S")
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
    here = next(filter(None, told), ranks)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // here))


def _groups(
    settings: BenchSettings,
    gradients: Tensor | None,
    engines: list[BenchEngine],
    ranks_per_node: int,
) -> Iterator[list[CellKey]]:
    """Yield the places of each case's cells, for each row all engines.

    The dense baselines are measured with the first case of each size.
    """
    rows = contenders.names(settings.algorithms, settings.whole_step, ranks_per_node)
    for size in settings.sizes if gradients is None else (gradients.shape[1],):
        names = rows
        for distribution in settings.distributions:
            for density in settings.densities:
                rows_of = _rows(gradients, distribution)
                case = Case(size, density, distribution, engines[0].comm.size, rows_of)
                yield [CellKey(name, case, engine) for name in names for engine in engines]
                names = [name for name in rows if name not in DENSE]


def _rows(gradients: Tensor | None, distribution: str) -> Tensor | None:
    return gradients if distribution == "file" else None


def _cells(
    group: list[CellKey],
    settings: BenchSettings,
    network: dict[str, Any],
    rates: dict[str, Rates],
    show: report.Show,
) -> list[Cell]:
    """Measure the cells of one case in rounds, so that passing disturbances hit all of them."""
    each, format = network["ranks_per_node"], format_named(settings.format)
    found: dict[CellKey, list[Measured]] = {}
    for _ in range(settings.rounds):
        for place in group:
            made = contender(place.algorithm, place.case, place.engine, each, format)
            if made is None:
                show(None)
                continue
            comm = place.engine.comm
            found.setdefault(place, []).append(
                time_contender(made, comm, settings.iterations, settings.warmup)
            )
            show(_cell(place, found[place][-1], network))
    cells = []
    for place, rounds in found.items():
        cells.append(replace(_cell(place, merged(rounds), network), format=settings.format))
        cells[-1].predicted = predicted(
            place.algorithm, place.case, each, rates.get(place.engine.name), format
        )
    return cells


def _cell(place: CellKey, found: Measured, network: dict[str, Any]) -> Cell:
    case, seconds = place.case, summarized(found.seconds)
    dense = place.algorithm in DENSE
    rate, shared = network["rate_bits_per_s"], network["ranks_per_node"] > 1
    wire = None if rate is None or shared else 8 * found.bytes / rate
    return Cell(
        engine=place.engine.name,
        algorithm=place.algorithm,
        size=case.size,
        density=1.0 if dense else case.density,
        k=case.size if dense else case.k,
        distribution="any" if dense else case.distribution,
        dtype="bfloat16" if DENSE.get(place.algorithm) == torch.bfloat16 else "float32",
        seconds=seconds,
        phases=found.phases,
        bytes=found.bytes,
        wire_share=None if wire is None else wire / seconds["median"],
        speedup=None,
        wrong=found.wrong,
    )


def _compare(results: Results) -> None:
    """Set every cell's speed-up."""
    for cell in results.cells:
        baselines = [
            other.median
            for other in results.cells
            if other.algorithm == _BASELINE and other.size == cell.size
        ]
        cell.speedup = min(baselines) / cell.median
