"""The demo's driver: runs the workers on a network, shows progress, and keeps the results."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from sparcel.demo.results import MethodResult, combine
from sparcel.demo.settings import (
    BATCH_PER_RANK,
    COMPUTE_STEPS,
    WARM_UP_STEPS,
    DemoSettings,
    methods,
)
from sparcel.lab import Network, Workers

_WORKER_ENVIRONMENT = {"OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Outcome:
    """The results of a run of the demo.

    Attributes
    ----------
    rows
        One row a method, in the order of :func:`sparcel.demo.settings.methods`.
    parameters
        Number of the model's parameters.
    """

    rows: list[MethodResult]
    parameters: int


def run(network: Network, settings: DemoSettings, console: Console) -> Outcome:
    """Train with every method on a network.

    Parameters
    ----------
    network
        Network to run on, with one worker on each node.
    settings
        Settings of the demo.
    console
        Console that shows the progress.

    Raises
    ------
    sparcel.lab.WorkerFailedError
        As soon as a worker fails; the others are ended.
    DivergedError
        When a method left the ranks with different models.
    """
    argv = [sys.executable, "-m", "sparcel.demo.worker", settings.to_json()]
    with _progress(console) as progress, Workers(network, argv, _WORKER_ENVIRONMENT) as workers:
        return _follow(progress, network.nodes, settings, _events(workers))


def _events(workers: Workers) -> Iterator[dict[str, Any]]:
    for rank, line in workers.lines():
        yield {"rank": rank, **json.loads(line)}


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description:<12}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[status]}"),
        TimeElapsedColumn(),
        console=console,
        refresh_per_second=4,
    )


def _follow(
    progress: Progress, nodes: int, settings: DemoSettings, events: Iterator[dict[str, Any]]
) -> Outcome:
    """Show the progress that the workers report, and combine their results."""
    names = [method.name for method in methods(settings)]
    tasks = {
        name: progress.add_task(name, total=settings.steps, start=False, visible=False, status="")
        for name in names
    }
    waiting = iter(tasks.values())
    progress.update(next(waiting), visible=True)
    reports: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    rows: dict[str, MethodResult] = {}
    for event in events:
        name = event["method"]
        if event["event"] == "step":
            if event["step"] == 1:
                progress.start_task(tasks[name])
            status = f"loss {event['loss']:.3f}"
            progress.update(tasks[name], completed=event["step"], status=status)
            continue
        reports[name].append(event)
        if len(reports[name]) == nodes:
            row = combine(name, sorted(reports[name], key=lambda report: report["rank"]))
            rows[name] = row
            status = f"{1000 * row.step_s:.0f} ms a step, accuracy {row.accuracy:.1%}"
            progress.update(tasks[name], status=status)
            progress.stop_task(tasks[name])
            if (following := next(waiting, None)) is not None:
                progress.update(following, visible=True)
    return Outcome([rows[name] for name in names], reports[names[0]][0]["parameters"])


def _command(network: Network, data: str, settings: DemoSettings) -> str:
    """Return the command that repeats a run, with the data's name instead of its path."""
    options = {
        "nodes": network.nodes,
        "rate": f"{network.link.rate_bits_per_s / 1e6:g}mbit" if network.link else "none",
        **({} if settings.data is None else {"data": data}),
        "steps": settings.steps,
        "seed": settings.seed,
        "schemes": ",".join(settings.schemes),
        "density": settings.density,
    }
    return " ".join(["sparcel demo", *(f"--{name} {value}" for name, value in options.items())])


def write_json(
    path: Path, network: Network, data: str, settings: DemoSettings, outcome: Outcome
) -> None:
    """Write a run's results, with everything needed to understand and to repeat them.

    ``data`` is the data's name. It replaces the path, which may reveal private information.
    """
    document = {
        "command": _command(network, data, settings),
        "versions": {name: version(name) for name in ("sparcel", "torch")},
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores,"
        f" Python {platform.python_version()}",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "network": network.description,
        "nodes": network.nodes,
        "rate_bits_per_s": network.link.rate_bits_per_s if network.link else None,
        "data": data,
        "settings": {key: value for key, value in asdict(settings).items() if key != "data"},
        "batch_per_rank": BATCH_PER_RANK,
        "warm_up_steps_not_timed": WARM_UP_STEPS,
        "compute_steps": COMPUTE_STEPS,
        "parameters": outcome.parameters,
        "methods": [asdict(row) for row in outcome.rows],
    }
    path.write_text(json.dumps(document, indent=2) + "\n")
