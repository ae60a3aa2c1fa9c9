"""From files to a rank's part of their rows, which are mapped and not in memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from sparcel.comm import Communicator
from sparcel.errors import InputError
from sparcel.linear.ranks import gathered, together
from sparcel.rows import Rows, Source, cached, make_cache, map_rows
from sparcel.rows.pieces import Paths
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


def _parsed(source: Source, paths: Paths, comm: Communicator | None) -> Rows:
    rank, ranks = (0, 1) if comm is None else (comm.rank, comm.size)

    def parse(labels: Labels) -> Rows:
        return map_rows(paths, source, rank, ranks, labels)

    def with_numbers() -> Rows | None:
        try:
            return parse("numbers")
        except TextLabelError:
            return None

    rows = together(comm, with_numbers)
    if all(gathered(comm, rows is not None, "whether labels are numbers")):
        assert rows is not None
        return rows
    # Where one rank's labels are texts, all are, as they would be for one rank alone.
    return together(comm, lambda: parse("texts"))


def _cached(source: Source, paths: Paths, comm: Communicator | None, cache: Path) -> Rows:
    rank, ranks = (0, 1) if comm is None else (comm.rank, comm.size)
    nodes = [0] if comm is None else comm.run(comm.nodes)
    is_first = nodes.index(nodes[rank]) == rank  # of its machine
    together(comm, lambda: make_cache(cache, paths, source) if is_first else None)
    return together(comm, lambda: cached(cache, paths, source, rank, ranks))
