"""Records of measurements: the command, the machine and the rules that they come from, and rows.

A training's row tells the *rule* of its scheme: a fingerprint of what it does to gradients, not of
its code. So a refactoring leaves it alone, and a row that was trained by another rule is known.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from datetime import UTC, datetime
from functools import cache
from itertools import product
from multiprocessing import get_context
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import sparcel
from sparcel.core.comm import Communicator
from sparcel.errors import InputError
from sparcel.tools.bench import results

Row = dict[str, Any]

RESULTS = Path(__file__).parent / "results"

RANKS = 8
"""Those that a rule is told by: as many as in the records."""

LENGTHS = {1 << 12: 8, 1 << 17: 1}
"""Coordinates of vectors, and how many steps each takes. Several show what is done with memory. On
a long vector exchanges take no shortcut for short ones; more steps of it would depend on which rank
owns what, which belongs to no rule."""


def options(doc: str | None, *paths: str, **defaults: Any) -> argparse.Namespace:
    """Parse a command that takes paths, each by its place, and options.

    An option is told by its default, which has its type: False is a switch, and a sequence takes
    several. A type or a function stands for an option without a default, and a dict is what
    argparse is told. Help shows the docstring.
    """
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for path in paths:
        several = path == "places"  # paths or URLs
        parser.add_argument(path, type=str if several else Path, nargs="+" if several else None)
    for name, default in defaults.items():
        told = {"default": default, "help": f"default: {default}".replace("%", "%%")}
        if isinstance(default, dict):
            told = default
        elif default is False:
            told = {"action": "store_true"}
        elif callable(default):
            told = {"type": default}
        elif isinstance(default, list | tuple):
            told |= {"nargs": "+", "type": type(default[0])}
        else:
            told |= {"type": type(default)}
        parser.add_argument(f"--{name.replace('_', '-')}", **told)
    found = parser.parse_args()
    for name, value in vars(found).items():
        if isinstance(value, Path) and name != "output":
            _NAMES[value] = name.upper()
    _NAMES.update(
        (Path(one), f"PLACE{n}") for n, one in enumerate(vars(found).get("places", ()), 1)
    )
    return found


_NAMES: dict[Path, str] = {}
"""What records call the paths that a command was told, which are of one machine."""


def among(choices: Iterable[Any], default: Iterable[Any] | None = None) -> dict[str, Any]:
    """Return an option that takes some of the choices; by default all."""
    choices = list(choices)
    default = choices if default is None else list(default)
    return {"nargs": "+", "choices": choices, "default": default, "metavar": "NAME"}


NEEDED = {"type": Path, "required": True}
"""An option that takes a path, and must be given."""


def grid(**values: Iterable[Any]) -> list[Row]:
    """Return a job for each combination of values; those of the last name vary fastest."""
    return [dict(zip(values, one, strict=True)) for one in product(*values.values())]


def machine() -> Row:
    """Describe the machine, the commit of the package that is measured, the command and the date.

    In the command, names stand for the paths that `options` found.
    """
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=Path(sparcel.__file__).parent,  # not the script's, which may be of another checkout
        capture_output=True,
        text=True,
        check=False,
    )
    return {
        **results.machine(),
        "commit": commit.stdout.strip(),
        "command": shlex.join(
            ["python", *itself(), *(_NAMES.get(Path(one), one) for one in sys.argv[1:])]
        ),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def itself() -> list[str]:
    """Return what Python is called with to run this program again, without its arguments."""
    return ["-m", sys.modules["__main__"].__spec__.name]


def in_lab(nodes: int, rate: str, *more: object, lab: Sequence[object] = ()) -> None:
    """Run this program, with more arguments, on each of some emulated nodes."""
    options = ["--nodes", nodes, "--rate", rate, *lab]
    command = ["-m", "sparcel", "lab", "run", *options, "--", sys.executable, *itself(), *more]
    subprocess.run([sys.executable, *map(str, command)], check=True)


def network() -> Row:
    """Return what the lab tells of its network."""
    return {
        name.removeprefix("SPARCEL_LAB_").lower(): value
        for name, value in os.environ.items()
        if name.startswith("SPARCEL_LAB_")
    }


def recorded(name: str) -> Row:
    """Return a record."""
    record: Row = json.loads((RESULTS / f"{name}.json").read_text())
    return record


def rows_of(path: Path | str) -> list[Row]:
    """Return the rows of a record, by its path or its name; none if there is no such file."""
    path = RESULTS / f"{path}.json" if isinstance(path, str) else path
    rows: list[Row] = json.loads(path.read_text())["rows"] if path.exists() else []
    return rows


def grouped(rows: Iterable[Row], *names: str) -> dict[Any, list[Row]]:
    """Return rows by what they have of a name, or of several."""
    found: dict[Any, list[Row]] = {}
    for row in rows:
        found.setdefault(itemgetter(*names)(row), []).append(row)
    return found


def shown_of(name: str) -> list[Row]:
    """Return the rows of a record that pages show: those of rules that have not changed since."""
    return [row for row in rows_of(name) if is_todays(row)]


def left_of(path: Path, jobs: Iterable[Row]) -> tuple[list[Row], list[Row]]:
    """Return the rows of a record, and the jobs of which no row of today's rules has all values."""
    rows = rows_of(path)
    done = [row for row in rows if is_todays(row)]
    return rows, [job for job in jobs if not any(job.items() <= row.items() for row in done)]


def write(path: Path, origin: Row, rows: Any) -> None:
    """Write a record; ``origin`` is what `machine` returned."""
    document = {**origin, "rows": rows}
    path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")


def add(path: Path, origin: Row, rows: list[Row], row: Row) -> None:
    """Add a row to a record, with its commit and date."""
    rows.append({**row, "commit": origin["commit"], "date": origin["date"]})
    write(path, origin, rows)


def report(output: Path | None, rows: Iterable[Row], **about: Any) -> None:
    """Print rows, and write them if there is an output, with what else is told of them."""
    rows = list(rows)
    show(rows)
    if output is not None:
        write(output, {**machine(), **about}, rows)


def show(rows: Iterable[Row], width: int = 200) -> None:
    """Print rows as a table: what of them is a number or a text."""
    rows = list(rows)
    every = {name: value for row in rows for name, value in row.items()}
    names = [name for name, value in every.items() if not isinstance(value, list | dict)]
    shown = Table(*names)
    for row in rows:
        shown.add_row(*(_text(row.get(name)) for name in names))
    Console(highlight=False, width=width).print(shown)


def tell(row: Row) -> None:
    """Print what of a row is short, in a line."""
    short = (f"{k} {_text(v)}" for k, v in row.items() if not isinstance(v, list | dict))
    print(", ".join(short), flush=True)


def _text(figure: Any) -> str:
    if isinstance(figure, float):
        return f"{figure:.4g}" if abs(figure) < 1000 else f"{figure:,.0f}"
    return "" if figure is None else str(figure)


def runs_told(doc: str | None, record: str | None = None, **defaults: Any) -> argparse.Namespace:
    """Parse what `run_all` is told: the folder of the tasks' folders, and runs at a time."""
    output = Path if record is None else RESULTS / f"{record}.json"
    return options(doc, "data", processes=int, output=output, **defaults)


def run_all(told: argparse.Namespace, work: Callable[..., Row], jobs: Iterable[Row]) -> None:
    """Call ``work(data, **job)`` for each job that a record lacks, and add the rows as they come.

    ``told`` is what `runs_told` returned. A row has all values of its job, and the minutes that it
    took. ``processes`` is the number of runs at a time; None for one on each core.
    """
    (rows, left), origin = left_of(told.output, jobs), machine()
    print(f"{len(left)} runs to do, {len(rows)} recorded", flush=True)
    with ProcessPoolExecutor(told.processes, get_context("spawn")) as pool:
        runs = [pool.submit(_run, work, told.data.resolve(), job) for job in left]
        for run in as_completed(runs):
            add(told.output, origin, rows, run.result())
            tell(rows[-1])


def _run(work: Callable[..., Row], data: Path, job: Row) -> Row:
    start = time.perf_counter()
    row = {**job, **work(data, **job)}
    return {**row, "minutes": round((time.perf_counter() - start) / 60, 2)}


def run_here(
    output: Path,
    work: Callable[..., Row],
    jobs: Iterable[Row],
    rank: int = 0,
    meet: Callable[[], object] = lambda: None,
    **about: Any,
) -> None:
    """Call ``work(**job)`` for each job that a record lacks, one after the other.

    If all of several ranks call, they ``meet``, and the first one adds the rows. The record also
    tells what is ``about`` all of them.
    """
    (rows, left), origin = left_of(output, jobs), {**machine(), **about}
    meet()  # all have read what the first one will write
    for job in left:
        row = {**job, **work(**job)}
        if rank == 0:
            add(output, origin, rows, row)
            tell(row)


def rule_of(scheme: str, settings: Mapping[str, Any]) -> str:
    """Return eight hexadecimal digits that stand for the updates of a scheme.

    The ranks' gradients are partly in common. They are in float64 and updates compared in float32,
    so that the order of sums does not matter. A warm-up is left out, because it is longer than the
    few steps that are done.
    """
    after = {name: one for name, one in settings.items() if not name.startswith("warmup")}
    made = sparcel.scheme(scheme, **after)

    def on_rank(comm: Communicator) -> str:
        updates = hashlib.sha256()
        for size, steps in LENGTHS.items():
            own = made.fresh()
            for step in range(steps):
                gradient = _numbers(step, size) + _numbers(steps + RANKS * step + comm.rank, size)
                update = own.step(gradient, comm).float()
                updates.update((update + 0.0).numpy().tobytes())  # −0 becomes 0
        return updates.hexdigest()[:8]

    return str(sparcel.simulate(RANKS, on_rank).results[0])


def _numbers(seed: int, size: int) -> Tensor:
    draws = torch.Generator().manual_seed(seed)
    return torch.randint(-(1 << 17), 1 << 17, (size,), generator=draws).double()


def is_todays(row: Mapping[str, Any]) -> bool:
    """Return whether a row of a record is of today's rule, or of none, as torch's hooks are."""
    return "scheme" not in row or row.get("rule") == _todays(
        row["scheme"], json.dumps(row["settings"], sort_keys=True)
    )


@cache
def _todays(scheme: str, settings: str) -> str:
    try:
        return rule_of(scheme, json.loads(settings))
    except InputError:
        return "there is no such scheme, or no such setting"
