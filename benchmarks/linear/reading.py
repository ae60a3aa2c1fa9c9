"""Time the reading of rows: SVMlight files, text, and a cache with its checksums.

    python -m benchmarks.linear.reading DATA --output benchmarks/results/linear_reading.json

``DATA`` holds the folder ``urls``. Files hold the first ``--rows`` URLs, as text and as n-grams of
3 and 4 characters in SVMlight's format; they are in the system's page cache. scikit-learn reads the
same SVMlight file. Contenders take turns, ``--rounds`` times, each on one thread. Where other
processes take the machine's cores, seconds of the processor tell more than those of the clock; a
row has both, and how many processes wanted to run.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from sklearn.datasets import load_svmlight_file

from benchmarks.linear.data import SETS, WORK, texts, timed, urls
from benchmarks.record import NEEDED, Row, machine, options, write
from sparcel.products.rows import SvmLight, Text, cached, make_cache, map_rows, read_svmlight


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
    arguments = options(__doc__, "data", work=WORK, rows=100_000, rounds=7, output=NEEDED)
    part = urls(arguments.data, arguments.work)[0].slice(0, arguments.rows)
    text = SETS["urls"].file(arguments.work, "train").read_text().splitlines(keepends=True)
    torch.set_num_threads(1)
    rows: list[Row] = []
    origin = machine(DATA=arguments.data)
    with tempfile.TemporaryDirectory(dir=arguments.work) as name:
        folder = Path(name)
        svmlight = (f"{label} {row}\n" for label, row in texts(part, 1))
        (folder / "rows.svm").write_text("".join(svmlight))
        (folder / "rows.tsv").write_text("".join(text[: arguments.rows + 1]))
        found = contenders(folder, part.dimensions)
        for turn in range(arguments.rounds):
            for label, (file, read) in found.items():
                about = {"contender": label, "round": turn, "entries": part.nnz}
                row = about | timed(read) | {"bytes": file.stat().st_size}
                rows.append(row)
                print(row, flush=True)
                write(arguments.output, origin, rows)


if __name__ == "__main__":
    main()
