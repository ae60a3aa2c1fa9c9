"""What the kernels and a step of DDP take on a GPU, beside what else there is.

    python -m benchmarks.gpu.measure [--quick] [--json PATH]

begins no measurement after 450 s. It needs a data-centre GPU, torch 2.11 or newer, numpy and
Triton. It times the kernels (`kernels`) and steps of DDP on processes that
share the card (`steps`), checks every result, prints tables, and writes a record with the
card's name to benchmarks/results. A wrong result ends it. Without CUDA it is a trial at tiny sizes
in Triton's interpreter, whose times mean nothing, and writes a record only to ``--json``.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

if not torch.cuda.is_available():  # before Triton is imported
    os.environ["TRITON_INTERPRET"] = "1"

import triton

from benchmarks.gpu import kernels as timed
from benchmarks.gpu import steps as trained
from benchmarks.gpu.checks import WrongResultError
from benchmarks.gpu.clock import first_line
from benchmarks.gpu.rank import Job
from benchmarks.gpu.report import (
    LARGE,
    SPARSE,
    TARGET,
    Limits,
    count,
    kernel_table,
    limit_lines,
    step_table,
)
from sparcel import kernels
from sparcel.bench import results

RESULTS = Path(__file__).parents[1] / "results"

UNEVEN = 25_557_032
"""A length that is no multiple of 16, as those of DDP's buckets often are: that of ResNet-50."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """What to measure.

    Attributes
    ----------
    vectors
        Inputs and sizes, those first that the limits are about.
    repeats, seconds
        How often to time a method, and for how long at most.
    ranks, job
        Numbers of processes, and what they train.
    kernels_s, total_s
        Seconds after which no further cell, and no further step, begins.
    """

    vectors: tuple[tuple[str, int], ...]
    densities: tuple[float, ...]
    repeats: int
    seconds: float
    ranks: tuple[int, ...]
    job: Job
    kernels_s: float = 250.0
    total_s: float = 450.0


FULL = Plan(
    vectors=(
        ("gaussian", TARGET),
        ("clustered", TARGET),
        ("gaussian", LARGE),
        ("gaussian", 1_000_000),
        ("gaussian", UNEVEN),
        ("gaussian", 1_000_000_000),
    ),
    densities=(SPARSE, 0.01, 0.1),
    repeats=30,
    seconds=0.3,
    ranks=(1, 2, 4),
    job=Job("cuda:0", width=2048, layers=6, batch=64, seconds=3.0),
)
QUICK = Plan(
    vectors=(("gaussian", TARGET), ("gaussian", LARGE)),
    densities=(SPARSE,),
    repeats=10,
    seconds=0.1,
    ranks=(2,),
    job=Job("cuda:0", width=2048, layers=6, batch=64, seconds=1.0),
)
TRIAL = Plan(
    vectors=(("gaussian", 20_000),),
    densities=(0.01,),
    repeats=1,
    seconds=0.1,
    ranks=(1, 2),
    job=Job("cpu", width=64, layers=3, batch=8, seconds=0.1),
)


def kernel_rows(chosen: Any, place: torch.device, plan: Plan, until: float) -> Iterator[Row]:
    """Yield the rows of all cells, or why a cell was not measured."""
    for name, size in plan.vectors:
        for density in plan.densities:
            begun, note = time.monotonic(), ""
            about = {"input": name, "size": size, "density": density, "method": "all"}
            if begun > until:
                note = "no time was left"
            elif not timed.fits(size, place):
                note = "does not fit in the card's memory"
            if note:
                yield about | {"note": note}
                continue
            turns = {"repeats": plan.repeats, "seconds": plan.seconds}
            try:
                yield from timed.measure(chosen, place, name, size, density, **turns)
            except WrongResultError as error:
                where = f"{name}, {count(size)}, {density:.1%}"
                raise WrongResultError(f"{where}: {error}") from error
            except torch.OutOfMemoryError:
                yield about | {"note": "does not fit in the card's memory"}
            except Exception as error:
                yield about | {"note": f"failed: {first_line(error)}"}
            taken = time.monotonic() - begun
            print(f"{name}, {count(size)}, {density:.1%}: {taken:.1f} s", flush=True)


def profiles(chosen: Any, place: torch.device) -> Iterator[Row]:
    """Yield what the calls that have limits consist of."""
    for size in (TARGET, LARGE):
        try:
            yield timed.profiled(chosen, place, size, SPARSE)
        except Exception as error:  # the profiler may lack the right to look
            yield {"size": size, "note": first_line(error)}


def origin(place: torch.device, quick: bool) -> Row:
    """Describe the card, the machine and the versions, without paths of this machine."""
    about: Row = {"card": "none, but Triton's interpreter"}
    if place.type == "cuda":
        card = torch.cuda.get_device_properties(place)
        about = {
            "card": card.name,
            "memory_gb": card.total_memory / 1e9,
            "multiprocessors": card.multi_processor_count,
            "driver": said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
            "cuda": torch.version.cuda,
        }
    return about | {
        **results.machine(),
        "triton": triton.__version__,
        "commit": said("git", "rev-parse", "--short", "HEAD"),
        "command": "python -m benchmarks.gpu.measure" + (" --quick" if quick else ""),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def said(*command: str) -> str:
    """Return the first word that a command says, which this machine may not have."""
    try:
        found = subprocess.run(command, cwd=RESULTS, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return (found.stdout.split() or ["unknown"])[0]


def run(chosen: Any, place: torch.device, plan: Plan, record: Row) -> None:
    """Measure, and fill a record, which holds what was measured if this raises."""
    begun = time.monotonic()
    rows, steps = record.setdefault("kernels", []), record.setdefault("steps", [])
    try:
        try:
            for row in kernel_rows(chosen, place, plan, begun + plan.kernels_s):
                rows.append(row)
        finally:
            print_lines(kernel_table(rows))
        if place.type == "cuda":
            record["profiles"] = list(profiles(chosen, place))
            torch.cuda.empty_cache()  # the ranks share the card
        for row in trained.measure(plan.ranks, plan.job, begun + plan.total_s):
            steps.append(row)
    except WrongResultError as error:
        record["wrong"] = str(error)
        raise
    finally:
        if place.type == "cuda":
            record["limits"] = Limits(rows, steps).all()
        record["checks"] = sum(row.get("checked", 0) for row in rows)
        record["seconds"] = time.monotonic() - begun
        print_lines(step_table(steps))
        print_lines(limit_lines(record.get("limits", [])))


def print_lines(lines: Iterable[str]) -> None:
    for line in lines:
        print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer vectors, and two processes")
    parser.add_argument("--json", type=Path, help="where to write the record")
    arguments = parser.parse_args()
    on_card = torch.cuda.is_available()
    place = torch.device("cuda", 0) if on_card else torch.device("cpu")
    # On the CPU `sparcel.kernels` would take the kernels in C++.
    chosen = kernels if on_card else importlib.import_module("sparcel.kernels.gpu")
    plan = (QUICK if arguments.quick else FULL) if on_card else TRIAL
    record = origin(place, arguments.quick)
    if not on_card:
        print("A TRIAL without a GPU: its times mean nothing, and no limit is judged.", flush=True)
    print(f"{record['card']}, torch {record['torch']}, Triton {record['triton']}", flush=True)
    path = arguments.json
    if path is None and on_card:
        name = re.sub("[^a-z0-9]+", "_", record["card"].lower())
        path = RESULTS / f"gpu_{name}{'_quick' if arguments.quick else ''}.json"
    try:
        run(chosen, place, plan, record)
    except WrongResultError as error:
        sys.exit(f"wrong result: {error}")
    finally:
        if path is not None:
            path.write_text(json.dumps(record, indent=1) + "\n")
    failed = [row for row in record["kernels"] + record["steps"] if "failed" in row.get("note", "")]
    if failed:
        sys.exit(f"{len(failed)} measurements failed; the tables show which")


if __name__ == "__main__":
    main()
