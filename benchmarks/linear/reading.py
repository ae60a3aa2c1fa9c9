"""Time the reading of rows: SVMlight files, text, and a cache with its checksums.

    python -m benchmarks.linear.reading DATA --output benchmarks/results/linear_reading.json

``DATA`` holds the folder ``urls``. Files hold the first ``--rows`` URLs, as text and as n-grams of
3 and 4 characters in SVMlight's format; they are in the system's page cache. scikit-learn reads the
same SVMlight file. Contenders take turns, ``--rounds`` times, each on one thread. Where other
processes take the machine's cores, seconds of the processor tell more than those of the clock; a
row has both, and how many processes wanted to run.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from sklearn.datasets import load_svmlight_file

from benchmarks.linear.data import SETS, make, rows_of
from benchmarks.machine import machine
from benchmarks.record import Row, write
from sparcel.products.rows import Rows, SvmLight, Text, cached, make_cache, map_rows, read_svmlight


def write_svmlight(rows: Rows, file: Path) -> None:
    """Write rows as SVMlight text, values with six digits."""
    assert rows.labels is not None
    with file.open("w") as out:
        for i, label in enumerate(rows.labels):
            cut = slice(rows.offsets[i], rows.offsets[i + 1])
            pairs = zip(rows.columns[cut].tolist(), rows.values[cut].tolist(), strict=True)
            out.write(f"{label} {' '.join(f'{column + 1}:{value:.6g}' for column, value in pairs)}")
            out.write("\n")


def contenders(folder: Path, dimensions: int) -> dict[str, tuple[Path, Callable[[], object]]]:
    """Return what is timed by name: the file that is read, and the call."""
    svmlight, text = folder / "rows.svm", folder / "rows.tsv"
    cache, source = folder / "rows.cache", SvmLight(dimensions)
    make_cache(cache, svmlight, source)
    hashed = Text("tsv", SETS["urls"].ngrams)

    def written() -> None:
        (folder / "new.cache").unlink(missing_ok=True)
        make_cache(folder / "new.cache", svmlight, source)

    return {
        "SVMlight, scikit-learn": (
            svmlight,
            lambda: load_svmlight_file(str(svmlight), n_features=dimensions),
        ),
        "SVMlight, into memory": (svmlight, lambda: read_svmlight(svmlight, dimensions)),
        "SVMlight, into a mapped file": (svmlight, lambda: map_rows(svmlight, source)),
        "SVMlight, into a cache": (svmlight, written),
        "text, into a mapped file": (text, lambda: map_rows(text, hashed)),
        "a cache, mapped and its checksums compared": (
            cache,
            lambda: cached(cache, svmlight, source),
        ),
    }


def main() -> None:
    """Read in turns, and record each reading."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--work", type=Path, default=Path("build/linear"), help="for caches")
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    make(arguments.data, arguments.work, "urls")
    part = rows_of(SETS["urls"], arguments.work, "train").slice(0, arguments.rows)
    text = SETS["urls"].file(arguments.work, "train").read_text().splitlines(keepends=True)
    torch.set_num_threads(1)
    rows: list[Row] = []
    origin = machine()
    origin["command"] = origin["command"].replace(str(arguments.data), "DATA")
    with tempfile.TemporaryDirectory(dir=arguments.work) as name:
        folder = Path(name)
        write_svmlight(part, folder / "rows.svm")
        (folder / "rows.tsv").write_text("".join(text[: arguments.rows + 1]))
        found = contenders(folder, part.dimensions)
        for turn in range(arguments.rounds):
            for label, (file, read) in found.items():
                start, cpu = time.perf_counter(), time.process_time()
                kept = read()
                row = {
                    "contender": label,
                    "round": turn,
                    "seconds": time.perf_counter() - start,
                    "cpu_seconds": time.process_time() - cpu,
                    "bytes": file.stat().st_size,
                    "entries": part.nnz,
                    "load": os.getloadavg()[0],
                }
                del kept
                rows.append(row)
                print(row, flush=True)
                write(arguments.output, origin, rows)


if __name__ == "__main__":
    main()
