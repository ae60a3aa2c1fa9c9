"""Measure the memory that linear models take a rank, in the phases of a run.

    python -m benchmarks.linear.memory --output benchmarks/results/linear_memory.json

``--work`` is the folder of `linear_data.make`. Each run is one of real processes, whose memory is
read from /proc every few milliseconds: anonymous and shared pages, so that clean pages of a mapped
cache do not count. What the same run takes for two rows is subtracted: Python, torch and the
connections. ``budget_bytes`` is what a rank may take: 8 bytes an entry and 16 a row (its offset and
its label), three vectors of the model's size, and one more each for AdaGrad and averages.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.linear.data import SETS, WORK, place_of, rows_of
from benchmarks.record import RESULTS, Row, add, among, itself, machine, options, show
from benchmarks.record import rows_of as recorded
from sparcel.products.linear import SparseLogisticRegression
from sparcel.products.rows import HashedNGrams, shard

INTERVAL = 0.003
"""Seconds between two looks at a process."""

ENDS = {"Data:": "arranging", "Rows read": "training", "Model:": "end"}
"""How lines of the command begin, and the phase after them; the last epoch begins ``saving``."""


@dataclass(frozen=True)
class Arm:
    """One way to train."""

    label: str
    options: tuple[str, ...] = ()
    ranks: int = 1
    cache: bool = False
    estimator: bool = False


L1, AVERAGE = ("--l1", "1e-7"), ("--average",)
ARMS = [
    Arm("text"),
    Arm("cache", cache=True),
    Arm("cache, L1", L1, cache=True),
    Arm("cache, averaged", AVERAGE, cache=True),
    Arm("text, sharded", ranks=4),
    Arm("cache, sharded", ranks=4, cache=True),
    Arm("cache, sharded, L1", L1, 4, cache=True),
    Arm("cache, sharded, averaged", AVERAGE, 4, cache=True),
    Arm("cache, auto", ("--algorithm", "auto"), 4, cache=True),
    Arm("cache, auto, averaged", ("--algorithm", "auto", *AVERAGE), 4, cache=True),
    Arm("estimator", cache=True, estimator=True),
    Arm("estimator, sharded", ranks=4, cache=True, estimator=True),
]
EPOCHS = 2


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


def command_of(arm: Arm, name: str, work: Path, file: Path, cache: Path, out: Path) -> list[str]:
    """Return the command that trains so with a file, or its cache."""
    if arm.estimator:
        return [sys.executable, *itself(), "--work", str(work), "--estimator", name]
    ngrams = SETS[name].ngrams
    low, high = ngrams.ngram_range
    return [
        *(sys.executable, "-u", "-m", "sparcel", "linear", "fit", str(file)),
        *("--ngrams", f"{ngrams.analyzer}:{low}-{high}", "--dimensions", str(ngrams.dimensions)),
        *("--epochs", str(EPOCHS), "--out", str(out)),
        *("--checkpoint", str(out.with_suffix(".state"))),
        *(("--cache", str(cache)) if arm.cache else ()),
        *arm.options,
    ]


def measure(arm: Arm, name: str, work: Path, folder: Path) -> Row:
    """Return the row of a run: its peaks beside its budget."""
    one, whole, few = SETS[name], rows_of(SETS[name], work, "train"), folder / "few.tsv"
    few.write_text("label\ttext\na\tx\nb\ty\n")
    file, cache, out = one.file(work, "train"), folder / f"{name}.rows", folder / "model.npz"
    if arm.cache and not arm.estimator and not cache.exists():
        run(command_of(arm, name, work, file, cache, out), 1)  # makes the cache
    bare_command = command_of(arm, name, work, few, folder / "few.rows", out)
    if arm.estimator:
        bare_command = [*bare_command, "--few"]
    bare = max(max(peaks) for peaks in run(small(bare_command), arm.ranks).values())
    found = run(command_of(arm, name, work, file, cache, out), arm.ranks)
    parts = [shard(whole, rank, arm.ranks) for rank in range(arm.ranks)]
    parsed = max(8 * part.nnz + 16 * len(part) for part in parts)
    vectors = 4 + ("--average" in arm.options)
    peaks = {phase: max(0, max(own) - bare) for phase, own in found.items()}
    budget = parsed + vectors * 4 * whole.dimensions
    return {
        "set": name,
        **{key: value for key, value in asdict(arm).items() if key != "options"},
        "options": " ".join(arm.options),
        "parsed_bytes": parsed,
        "vector_bytes": 4 * whole.dimensions,
        "vectors": vectors,
        "budget_bytes": budget,
        "bare_bytes": bare,
        "peak_bytes": max(peaks.values()),
        "peaks": peaks,
    }


def small(command: list[str]) -> list[str]:
    """Return a command with few dimensions."""
    if "--dimensions" not in command:
        return command
    at = command.index("--dimensions") + 1
    return [*command[:at], "64", *command[at + 1 :]]


def estimate(name: str, work: Path, few: bool) -> None:
    """Fit an estimator to a rank's share of the rows."""
    from sparcel.core.comm import world

    comm, rows = world(), rows_of(SETS[name], work, "train")
    rows = shard(rows, *place_of(comm))
    if few:
        rows = HashedNGrams(dimensions=64).rows(["a word", "another"], ["x", "y"])
    print("Data:", flush=True)
    SparseLogisticRegression(epochs=EPOCHS, tol=None, l2=1e-6).fit(rows)
    print("Model:", flush=True)


def main() -> None:
    """Measure the arms that the output lacks, or be a process of one."""
    arguments = options(
        __doc__,
        work=WORK,
        sets=among(SETS),
        arms={"nargs": "+"},
        output=RESULTS / "linear_memory.json",
        estimator=str,  # these two tell a process what to do
        few=False,
    )
    if arguments.estimator:
        estimate(arguments.estimator, arguments.work, arguments.few)
        return
    rows, origin = recorded(arguments.output), machine()
    known = {(row["set"], row["label"]) for row in rows}
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.sets:
            for arm in ARMS:
                wanted = arguments.arms is None or arm.label in arguments.arms
                if not wanted or (name, arm.label) in known:
                    continue
                row = measure(arm, name, arguments.work, Path(folder))
                add(arguments.output, origin, rows, row)
                show([row | row["peaks"]])


if __name__ == "__main__":
    main()
