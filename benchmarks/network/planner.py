"""How well the planner predicts clusters and vectors that its model was not fitted to.

    python -m benchmarks.network.planner draw SETTINGS.json --set test --seed 1
    python -m benchmarks.network.planner measure SETTINGS.json RESULTS.json
    python -m benchmarks.network.planner judge RESULTS.json

``draw`` draws settings at random: 12 emulated networks, and 5 vectors on each. ``measure`` runs
`sparcel lab run` for each network, which must be alone on the machine: all ranks measure the
network's rates, as `sparcel plan --measure` does, and then every row of every setting. It skips the
networks that RESULTS.json holds already. ``judge`` compares the measured times with predictions:
in each setting it judges three choices: among the
lossless sums, among the schemes, and among what the scheme `auto` chooses from.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from itertools import islice, product
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch

from benchmarks.clock import Clock, Timed
from benchmarks.record import Row, grid, itself, machine
from benchmarks.streams.selection import digits_gradients
from sparcel.core.collectives import ALGORITHMS
from sparcel.core.comm import Communicator
from sparcel.core.cost import Problem, Rates, measure, predict
from sparcel.core.formats import RAW, format_named
from sparcel.core.ops import MAX
from sparcel.core.schemes.auto import CANDIDATES
from sparcel.tools.bench.contenders import STEP, BenchEngine, Contender, connected, contender, names
from sparcel.tools.bench.inputs import Case
from sparcel.tools.bench.timing import formula_of, predicted, problem_of

GRIDS: dict[str, dict[str, list[Any]]] = {
    "fit": {
        "layouts": [[4, 1], [6, 1], [7, 1], [2, 3]],
        "rates": ["250mbit", "1gbit", "5gbit"],
        "sizes": [2_000_000, 10_000_000],
        "densities": [0.001, 0.01],
        "distributions": ["uniform", "clustered", "real"],
    },
    "test": {
        "layouts": [[3, 1], [5, 1], [8, 1], [2, 4]],
        "rates": ["100mbit", "1gbit", "10gbit"],
        "sizes": [1_000_000, 4_000_000, 25_000_000],
        "densities": [0.0005, 0.003, 0.03],
        "distributions": ["uniform", "clustered", "real"],
    },
}
"""What the settings are drawn from; the test set shares no vector and no layout with the fit set.
A layout is nodes and ranks per node."""

FORMATS = {STEP + "bidirectional": "packed:4"}
"""How rows travel that are not plain: as `attach` sends 10 %, by compiled passes."""

EACH = 5
"""Vectors drawn for each network."""

BUDGET_SECONDS, LONG_SECONDS, ENOUGH_SECONDS, MOST = 1.5, 5.0, 2.0, 7
"""Seconds to time a row; seconds above which its first run, which touches new memory, counts too;
seconds above which one run is enough; and the most runs."""


def draw(which: str, seed: int) -> dict[str, Any]:
    """Draw settings for every network of a set."""
    values, generator = GRIDS[which], random.Random(seed)
    vectors = grid(
        size=values["sizes"],
        density=values["densities"],
        distribution=values["distributions"],
        engine=["gloo", "mpi"],
    )
    networks = []
    for (nodes, here), rate in product(values["layouts"], values["rates"]):
        cases = generator.sample(vectors, EACH)
        networks.append({"nodes": nodes, "ranks_per_node": here, "rate": rate, "cases": cases})
    return {"set": which, "seed": seed, "networks": networks}


def measure_all(settings: dict[str, Any], results: Path) -> None:
    """Measure the networks that ``results`` does not hold yet, one after the other."""
    found = json.loads(results.read_text()) if results.exists() else {**machine(), "networks": []}
    found |= {"set": settings["set"], "seed": settings["seed"]}
    for network in settings["networks"][len(found["networks"]) :]:
        with tempfile.TemporaryDirectory() as folder:
            job, output = Path(folder) / "job.json", Path(folder) / "rows.json"
            job.write_text(json.dumps(network))
            for size in {case["size"] for case in network["cases"]}:
                np.save(_file(Path(folder), size), _gradients(size, _ranks(network)))
            here = ["--nodes", network["nodes"], "--ranks-per-node", network["ranks_per_node"]]
            run = [sys.executable, *itself(), "rank", job, output]
            lab = ["lab", "run", "--mpi", *here, "--rate", network["rate"], "--", *run]
            begun = perf_counter()
            subprocess.run([sys.executable, "-m", "sparcel", *map(str, lab)], check=True)
            print(f"{network['nodes']} nodes: {perf_counter() - begun:.0f} s", flush=True)
            found["networks"].append({**network, **json.loads(output.read_text())})
        results.write_text(json.dumps(found, indent=1) + "\n")


def _ranks(network: dict[str, Any]) -> int:
    return network["nodes"] * network["ranks_per_node"]


def _file(folder: Path, size: int) -> Path:
    return folder / f"{size}.npy"


def _gradients(size: int, ranks: int) -> np.ndarray:
    """Return each rank's gradient of a network with about ``size`` parameters, ``[ranks, size]``.

    The network has learned handwritten digits for ten steps.
    """
    torch.manual_seed(size)
    hidden = int(((74 + 2) ** 2 + 4 * size) ** 0.5 - 76) // 2 + 1
    gradients = islice(digits_gradients(hidden, steps=10), 10, 10 + ranks)
    return np.stack([torch.cat([p.flatten() for p in one])[:size].numpy() for one in gradients])


def rank(job: Path, output: Path) -> None:
    """Measure one network, in every rank of the lab."""
    network = json.loads(job.read_text())
    torch.set_num_threads(1)
    with connected(("gloo", "mpi")) as engines:
        by_name = {engine.name: engine for engine in engines}
        for engine in engines:
            engine.comm.rates = measure(engine.comm, engine.name)
        rows = [
            row
            for case in network["cases"]
            for row in _rows(case, by_name[case["engine"]], network, job.parent)
        ]
        if engines[0].comm.rank == 0:
            rates = {name: json.loads(_rates(one).to_json()) for name, one in by_name.items()}
            output.write_text(json.dumps({"rates": rates, "rows": rows}))


def _rates(engine: BenchEngine) -> Rates:
    assert engine.comm.rates is not None, "rank() measured them"
    return engine.comm.rates


def _rows(
    drawn: dict[str, Any], engine: BenchEngine, network: dict[str, Any], folder: Path
) -> list[Row]:
    """Measure every row of a setting."""
    comm, here = engine.comm, network["ranks_per_node"]
    gradients = None
    if drawn["distribution"] == "real":
        shared = np.load(_file(folder, drawn["size"]), mmap_mode="c")
        gradients = torch.from_numpy(shared)
    kind = "file" if gradients is not None else drawn["distribution"]
    case = Case(drawn["size"], drawn["density"], kind, comm.size, gradients)
    rows = []
    for name in names("all", True, here):
        if predicted(name, case, here, _rates(engine)) is None:
            continue
        format = format_named(FORMATS.get(name, RAW.name))
        made = contender(name, case, engine, here, format)
        if made is None:
            continue
        seconds, wrong = _timed(made, comm)
        problem = problem_of(name, case, here, format)
        asked = {"size": problem.size, "k": problem.k, "ranks": problem.ranks}
        asked |= {"ranks_per_node": here, "spread": problem.spread, "format": format.name}
        rows.append({**drawn, "row": name, "seconds": seconds, "wrong": wrong, "problem": asked})
    return rows


def _timed(made: Contender, comm: Communicator) -> tuple[list[float], int]:
    """Return the slowest rank's seconds in each run, and the number of wrong coordinates."""
    clock = Clock(comm)

    def once() -> Timed:
        made.reset()
        return clock.timed(made.run)

    first = once()
    wrong = torch.tensor([made.wrong(first.result)])
    comm.run(lambda: comm.all_reduce(wrong, MAX))
    seconds = [1e-3 * (first if first.ms > 1e3 * LONG_SECONDS else once()).ms]
    fewest = 1 if seconds[0] > ENOUGH_SECONDS else 2
    runs = max(fewest, min(MOST, round(BUDGET_SECONDS / max(seconds[0], 1e-6))))
    while len(seconds) < runs:
        seconds.append(1e-3 * once().ms)
    return seconds, int(wrong)


NEAR, GOOD = 0.25, 1.15
"""`NEAR` is the largest error of a close prediction, as a share of the measured time. `GOOD` is the
largest ratio of a good choice's time to the best time."""


def judge(results: dict[str, Any]) -> dict[str, Any]:
    """Compare the predictions of all rows with the measured times."""
    contests: defaultdict[tuple[Any, ...], list[tuple[float, float]]] = defaultdict(list)
    errors: defaultdict[str, list[float]] = defaultdict(list)
    repeats = []
    for place, network in enumerate(results["networks"]):
        rates = {name: Rates.from_json(json.dumps(one)) for name, one in network["rates"].items()}
        for row in network["rows"]:
            took, told = median(row["seconds"]), _predicted(row, rates[row["engine"]])
            errors[row["row"]].append(told / took - 1)
            if len(row["seconds"]) >= 4:
                repeats.append(_repeated(row["seconds"]))
            setting = tuple(row[key] for key in ("size", "density", "distribution", "engine"))
            for kind in _contests_of(row["row"]):
                contests[place, setting, kind].append((told, took))
    ratios = [min(c)[1] / min(took for _, took in c) for c in contests.values()]
    together = [error for row_errors in errors.values() for error in row_errors]
    return {
        "settings": len({key[:2] for key in contests}),
        "rows": len(together),
        "within 25 %": _near(together),
        "median error": median(together),
        "choices": len(ratios),
        "within 1.15 of the best": sum(ratio <= GOOD for ratio in ratios) / len(ratios),
        "worst choice": max(ratios),
        "repeated within 25 %": _near(repeats),
        "by row": {name: [_near(found), median(found)] for name, found in errors.items()},
    }


def _contests_of(name: str) -> list[str]:
    """Name the choices in which a row takes part."""
    if not name.startswith(STEP):
        return ["sum"] if name in ALGORITHMS else []
    scheme = name.removeprefix(STEP)
    return ["step"] * (scheme != "auto") + ["auto"] * (scheme in CANDIDATES)


def _near(errors: Sequence[float]) -> float:
    return sum(abs(error) <= NEAR for error in errors) / len(errors)


def _repeated(seconds: Sequence[float]) -> float:
    """Return how far the first half of a row's runs is from the second, by their medians."""
    half = len(seconds) // 2
    return median(seconds[:half]) / median(seconds[-half:]) - 1


def _predicted(row: Row, rates: Rates) -> float:
    """Return the predicted seconds of a row; the model knows no clusters any more."""
    formula = formula_of(row["row"])
    assert formula is not None, "only rows with a prediction were measured"
    known = {name: value for name, value in row["problem"].items() if name != "clusters"}
    format = format_named(known.pop("format", RAW.name))
    return predict(formula, Problem(**known, format=format), rates).seconds


COMMANDS = {
    "draw": ["settings"],
    "measure": ["settings", "results"],
    "rank": ["job", "output"],
    "judge": ["results"],
}
"""And the files that each takes."""


def main() -> None:
    """Run a subcommand."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for command, paths in COMMANDS.items():
        one = commands.add_parser(command)
        for path in paths:
            one.add_argument(path, type=Path)
    commands.choices["draw"].add_argument("--set", choices=GRIDS, required=True)
    commands.choices["draw"].add_argument("--seed", type=int, required=True)
    told = parser.parse_args()
    if told.command == "draw":
        told.settings.write_text(json.dumps(draw(told.set, told.seed), indent=1) + "\n")
    elif told.command == "measure":
        measure_all(json.loads(told.settings.read_text()), told.results)
    elif told.command == "rank":
        rank(told.job, told.output)
    else:
        print(json.dumps(judge(json.loads(told.results.read_text())), indent=1))


if __name__ == "__main__":
    main()
