"""From files to a rank's part of their rows, which are mapped and not in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from sparcel.comm import Communicator
from sparcel.errors import InputError
from sparcel.linear.ranks import gathered, run_or_fail_everywhere
from sparcel.rows import Rows, Source, cached, make_cache, map_rows
from sparcel.rows.files import blocks
from sparcel.rows.pieces import FilePiece, Paths, files_of, is_compressed
from sparcel.rows.rows import Array
from sparcel.rows.svmlight import Labels, TextLabelError


def read(
    source: Source, paths: Paths, comm: Communicator | None, cache: Path | None = None
) -> Rows:
    """Return this rank's part of the rows of files; all ranks call.

    Parameters
    ----------
    source
        What the files hold.
    cache
        Where all ranks of a machine find the rows, or put them for later trainings; None for a file
        of each rank's own, which goes with the rows.

    Returns
    -------
    Rows
        With the same dimensions on all ranks, and labels of one kind: numbers if all are numbers.

    Raises
    ------
    InputError
        On all ranks, with what is wrong on one.
    """
    rows = _parsed(source, paths, comm) if cache is None else _cached(source, paths, comm, cache)
    kind = None if rows.labels is None or not len(rows) else rows.labels.dtype.kind
    kinds = set(gathered(comm, kind, "kind of labels")) - {None}
    if len(kinds) > 1:
        raise InputError("some labels are numbers and some are not; make all of one kind")
    if not len(rows):
        rows = replace(rows, labels=np.empty(0, np.str_ if kinds == {"U"} else np.float64))
    return replace(rows, dimensions=max(gathered(comm, rows.dimensions, "dimensions")))


def read_weights(
    file: Path, rows: Rows, paths: Sequence[Path], cache: Path | None, comm: Communicator | None
) -> Array:
    """Return the weights of this rank's rows, which `read` returned; all ranks call.

    Parameters
    ----------
    file
        A number on each line, for each row of all files in turn.

    Raises
    ------
    InputError
        On all ranks, when the file cannot be read, has a line that is no number of at least 0, or
        not as many as there are rows.
    """
    counts = gathered(comm, len(rows), "number of rows")
    rank, dtype = 0 if comm is None else comm.rank, rows.values.dtype

    def own() -> Array:
        if comm is not None and cache is None and any(map(is_compressed, paths)):
            raise InputError(
                "several processes do not read compressed files in turn, so weights would go to"
                " other rows; give --cache, or files that are not compressed"
            )
        weights = _numbers(file, dtype)
        if len(weights) != sum(counts):
            raise InputError(f"{file} has {len(weights)} weights, and there are {sum(counts)} rows")
        start = sum(counts[:rank])
        return weights[start : start + len(rows)]

    return run_or_fail_everywhere(comm, own)


def _numbers(file: Path, dtype: np.dtype[Any]) -> Array:
    """Read the numbers of a file, one a line, that are finite and not negative."""
    found = []
    for block in blocks(FilePiece(files_of(file)[0], 0, file.stat().st_size)):
        for line, text in enumerate(block.lines.split(b"\n")[:-1]):
            try:
                found.append(float(text) if b"_" not in text else np.nan)
            except ValueError:
                found.append(np.nan)
            if not 0 <= found[-1] <= np.finfo(dtype).max:
                shown = text.decode(errors="backslashreplace")
                raise block.error(line, f"a weight must be a number of at least 0, got {shown!r}")
    return np.array(found, dtype)


def _parsed(source: Source, paths: Paths, comm: Communicator | None) -> Rows:
    rank, ranks = (0, 1) if comm is None else (comm.rank, comm.size)

    def parse(labels: Labels) -> Rows:
        return map_rows(paths, source, rank, ranks, labels)

    def with_numbers() -> Rows | None:
        try:
            return parse("numbers")
        except TextLabelError:
            return None

    rows = run_or_fail_everywhere(comm, with_numbers)
    if all(gathered(comm, rows is not None, "whether labels are numbers")):
        assert rows is not None
        return rows
    # One rank alone would take all labels for texts; so do all ranks.
    return run_or_fail_everywhere(comm, lambda: parse("texts"))


def _cached(source: Source, paths: Paths, comm: Communicator | None, cache: Path) -> Rows:
    rank, ranks = (0, 1) if comm is None else (comm.rank, comm.size)
    nodes = [0] if comm is None else comm.run(comm.nodes)
    is_first = nodes.index(nodes[rank]) == rank  # of its machine
    run_or_fail_everywhere(comm, lambda: make_cache(cache, paths, source) if is_first else None)
    return run_or_fail_everywhere(comm, lambda: cached(cache, paths, source, rank, ranks))
