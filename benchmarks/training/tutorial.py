"""examples/compare.py by each method: over its links, and with other learning rates.

    python -m benchmarks.training.tutorial

writes ``benchmarks/results/tutorial.json`` in eight minutes. Losses do not depend on the network,
so other learning rates are tried over loopback.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory

from benchmarks.record import RESULTS, Row, machine, write

SCRIPT = Path(__file__).parents[2] / "examples" / "compare.py"
METHODS = ("dense", "bf16", "powersgd", "sparcel")
RATE = "6e-3"
"""The learning rate of the page."""
TRAINING = re.compile(
    r"\[0\] (?P<method>\w+), seed (?P<seed>\d)\n"
    r"\[0\]   (?P<seconds>[\d.]+) s, at the end (?P<step_ms>[\d.]+) ms a step\n"
    r"(?:\[0\]   at the end (?P<kb>\d+) kB a step on the link\n)?"
    r"\[0\]   held-out loss (?P<loss>[\d.]+), accuracy (?P<percent>[\d.]+)%"
)


def trained(rate: str, network: str, *seeds: str) -> Iterator[Row]:
    """Train by all methods on four nodes, and yield a row for each training."""
    script = SCRIPT.read_text()
    with TemporaryDirectory() as folder:
        Path(folder, "compare.py").write_text(script.replace(f"lr={RATE}", f"lr={rate}"))
        lab = ["sparcel", "lab", "run", "--nodes", "4", "--rate", network, "--"]
        train = ["python", "compare.py", "--methods", *METHODS, "--seeds", *seeds]
        printed = subprocess.run(
            [*lab, *train], cwd=folder, capture_output=True, text=True, check=True
        ).stdout
    for found in TRAINING.finditer(printed):
        method, *numbers = found.groups()
        told = zip(list(TRAINING.groupindex)[1:], numbers, strict=True)
        figures = {name: float(number) for name, number in told if number}
        yield {"method": method, "network": network, "lr": float(rate), **figures}


def main() -> None:
    origin = machine()
    rows = [*trained(RATE, "100mbit", "0")]
    for rate in ("4e-3", RATE, "8e-3", "12e-3"):
        rows += trained(rate, "none", "0", "1", "2")
        for method in METHODS:
            losses = [
                row["loss"]
                for row in rows
                if (row["method"], row["lr"], row["network"]) == (method, float(rate), "none")
            ]
            print(f"{method:<9} {rate:>5}  mean loss {mean(losses):.4f}", flush=True)
    write(RESULTS / "tutorial.json", origin, rows)


if __name__ == "__main__":
    main()
