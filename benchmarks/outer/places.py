"""How long an outer step takes where islands meet at a port, and where they meet in a folder.

    python -m benchmarks.outer.places

Two islands with a model of 25 million parameters, as processes of one machine without a limit of
rates, exchange all by the default. They do it over links and by way of files in turns, so that a
load of the machine meets both. ``seconds`` is the median of a round's outer steps after the first;
``ratio`` is files by links, in the median of the rounds.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch

import sparcel.outer
from benchmarks.record import RESULTS, Row, machine, show, write
from sparcel.products.meeting import Server

LAYERS, WIDTH, STEPS, ROUNDS = 6, 2048, 6, 5


def island(place: str, number: int) -> None:
    """Take outer steps, and print how long each takes."""
    torch.set_num_threads(1)
    model = torch.nn.ParameterList(torch.zeros(WIDTH, WIDTH) for _ in range(LAYERS))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    outer = sparcel.outer.attach(model, optimizer, every=1, islands=place)
    noise = torch.Generator().manual_seed(number)
    while outer.steps < STEPS:
        for one in model:
            one.data.add_(torch.randn(one.shape, generator=noise), alpha=1e-3)
        start = time.perf_counter()
        optimizer.step()
        print(time.perf_counter() - start, flush=True)
    outer.close()


def measured(place: str) -> float:
    """Return the seconds of an outer step of two islands at a place."""
    argv = [sys.executable, "-m", "benchmarks.outer.places", "--island", place]
    islands = [
        subprocess.Popen([*argv, str(number)], stdout=subprocess.PIPE, text=True)
        for number in range(2)
    ]
    outputs = [one.communicate()[0] for one in islands]
    return median(float(line) for out in outputs for line in out.splitlines()[1:])


def main() -> None:
    if "--island" in sys.argv:
        island(sys.argv[-2], int(sys.argv[-1]))
        return
    rows: list[Row] = []
    for number in range(ROUNDS):
        with TemporaryDirectory() as name:
            server = Server(0, Path(name, "place"))
            links = measured(f"tcp://127.0.0.1:{server.port}/round{number}")
            server.close()
            rows.append({"links_s": links, "files_s": measured(str(Path(name, "bucket")))})
    ratio = median(row["files_s"] / row["links_s"] for row in rows)
    write(RESULTS / "outer_places.json", machine(), [*rows, {"ratio": ratio}])
    show(rows)
    print(f"files take {ratio:.2f} times as long as links")


if __name__ == "__main__":
    main()
