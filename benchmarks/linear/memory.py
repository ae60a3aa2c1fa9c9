"""Measure the memory that linear models take a rank, in the phases of a run.

    python -m benchmarks.linear.memory --output benchmarks/results/linear_memory.json

``--work`` has the URLs as `models.py` made them. Each run is one of real processes, whose memory is
read from /proc every few milliseconds: anonymous and shared pages, so that clean pages of a mapped
cache do not count. What the same run takes for two rows is subtracted: Python, torch and the
connections. ``budget_bytes`` is what a rank may take: 8 bytes an entry and 16 a row (its offset and
its label), and four vectors of the model's size, one of them AdaGrad's. The record has some more.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path

from benchmarks.linear.data import SETS, WORK, rows_of
from benchmarks.record import RESULTS, Row, grid, itself, options, run_here
from sparcel.products.linear import SparseLogisticRegression
from sparcel.products.rows import HashedNGrams, shard

INTERVAL = 0.003
"""Seconds between two looks at a process."""

ENDS = {"Data:": "arranging", "Rows read": "training", "Model:": "end"}
"""How lines of the command begin, and the phase after them; the last epoch begins ``saving``."""


ARMS = {"text": 1, "cache": 1, "text, sharded": 4, "cache, sharded": 4, "estimator": 1}
"""Ways to train, and ranks. An estimator's rows are mapped from a cache, too."""
URLS = SETS["urls"]
EPOCHS, VECTORS = 2, 4


def memory(process: int) -> int:
    """Return the bytes of a process that no file backs; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return 0
    names = ("RssAnon:", "RssShmem:")
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(names))


def run(command: list[str], ranks: int) -> dict[str, list[int]]:
    """Run a program on some ranks; return the peak of each rank in each phase."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    common = {**os.environ, "OMP_NUM_THREADS": "1"}
    if ranks > 1:
        common |= {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    processes = [
        subprocess.Popen(
            command,
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else common,
            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
            text=True,
        )
        for rank in range(ranks)
    ]
    phase, peaks = ["reading"], {"reading": [0] * ranks}

    def listen() -> None:
        assert processes[0].stdout is not None
        for line in processes[0].stdout:
            begun = next((name for start, name in ENDS.items() if line.startswith(start)), None)
            if begun is None and line.split()[:1] == [str(EPOCHS)]:
                begun = "saving"
            phase[0] = begun or phase[0]

    threading.Thread(target=listen, daemon=True).start()
    while any(process.poll() is None for process in processes):
        found = peaks.setdefault(phase[0], [0] * ranks)
        for rank, process in enumerate(processes):
            found[rank] = max(found[rank], memory(process.pid))
        time.sleep(INTERVAL)
    if any(process.returncode for process in processes):
        raise SystemExit(f"{command} failed")
    return peaks


def command_of(arm: str, work: Path, folder: Path, few: bool) -> list[str]:
    """Return the command that trains so, or in few dimensions with few rows."""
    if arm == "estimator":
        command = [sys.executable, *itself(), "--work", str(work), "--estimator"]
        return command + ["--few"] * few
    file = folder / "few.tsv" if few else URLS.file(work, "train")
    low, high = URLS.ngrams.ngram_range
    dimensions, out = 64 if few else URLS.ngrams.dimensions, folder / "model.npz"
    return [
        *(sys.executable, "-u", "-m", "sparcel", "linear", "fit", str(file)),
        *("--ngrams", f"{URLS.ngrams.analyzer}:{low}-{high}", "--dimensions", str(dimensions)),
        *("--epochs", str(EPOCHS), "--out", str(out)),
        *("--checkpoint", str(out.with_suffix(".state"))),
        *(("--cache", str(folder / f"{file.stem}.rows")) if arm.startswith("cache") else ()),
    ]


def measure(work: Path, folder: Path, label: str, set: str) -> Row:
    """Return the row of a run: its peaks beside its budget."""
    ranks, cache = ARMS[label], label.startswith(("cache", "estimator"))
    (folder / "few.tsv").write_text("label\ttext\na\tx\nb\ty\n")
    command = command_of(label, work, folder, few=False)
    if label.startswith("cache"):
        run(command, 1)  # makes the cache
    few = run(command_of(label, work, folder, few=True), ranks)
    bare = max(max(peaks) for peaks in few.values())
    peaks = {phase: max(0, max(own) - bare) for phase, own in run(command, ranks).items()}
    whole = rows_of(URLS, work, "train")
    parts = [shard(whole, rank, ranks) for rank in range(ranks)]
    parsed = max(8 * part.nnz + 16 * len(part) for part in parts)
    return {
        "ranks": ranks,
        "cache": cache,
        "estimator": label == "estimator",
        "options": "",
        "parsed_bytes": parsed,
        "vector_bytes": 4 * whole.dimensions,
        "vectors": VECTORS,
        "budget_bytes": parsed + VECTORS * 4 * whole.dimensions,
        "bare_bytes": bare,
        "peak_bytes": max(peaks.values()),
        "peaks": peaks,
    }


def estimate(work: Path, few: bool) -> None:
    """Fit an estimator to the rows."""
    rows = rows_of(URLS, work, "train")
    if few:
        rows = HashedNGrams(dimensions=64).rows(["a word", "another"], ["x", "y"])
    print("Data:", flush=True)
    SparseLogisticRegression(epochs=EPOCHS, tol=None, l2=1e-6).fit(rows)
    print("Model:", flush=True)


def main() -> None:
    """Measure the arms that the output lacks, or be a process of one."""
    told = options(
        __doc__,
        work=WORK,
        output=RESULTS / "linear_memory.json",
        estimator=False,  # these two tell a process what to do
        few=False,
    )
    if told.estimator:
        estimate(told.work, told.few)
        return
    with tempfile.TemporaryDirectory() as folder:
        jobs = grid(set=[URLS.name], label=ARMS)
        run_here(told.output, partial(measure, told.work, Path(folder)), jobs)


if __name__ == "__main__":
    main()
