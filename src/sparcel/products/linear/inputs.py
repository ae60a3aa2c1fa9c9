"""From what users give, files or matrices and labels, to a rank's rows and targets."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self, TypeAlias

import numpy as np

from sparcel.core._checks import checked_number
from sparcel.core.comm import Communicator
from sparcel.errors import InputError, optional
from sparcel.products.linear.ranks import gathered, run_or_fail_everywhere
from sparcel.products.rows import Rows, Source, SvmLight, cached, check, make_cache, map_rows
from sparcel.products.rows.files import FilePiece, Paths, blocks, files_of, is_compressed
from sparcel.products.rows.rows import Array
from sparcel.products.rows.sources import Labels, TextLabelError

MOST_HELD = 2**31 - 1
"""A model of more dimensions is never held whole, but as the columns that occur."""


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


Data: TypeAlias = Any
"""An array, a sparse matrix, `Rows`, or the path of SVMlight files."""


def opened(data: Data, comm: Communicator | None, dimensions: int | None) -> Data:
    """Return the rows of a path, and anything else as it is.

    Of files each rank reads its own part; all ranks call, and get the same dimensions: those given,
    or what the highest index needs.
    """
    if isinstance(data, str | os.PathLike):
        return read(SvmLight(dimensions), data, comm)
    return data


def as_matrix(data: Data, y: Any = None) -> tuple[Any, Any]:
    """Return what scikit-learn takes: rows as a matrix, with their labels if they have some."""
    if not isinstance(data, Rows):
        return data, y
    check(data)
    return matrix_of(data), data.labels if y is None else y


def matrix_of(rows: Rows) -> Any:
    """Return rows as a CSR matrix that shares their memory where its types allow that.

    scipy's constructor copies arrays that are small parts of others, as those of a shard are.
    """
    with optional("sparcel.linear", "linear"):
        import scipy.sparse as sp
    matrix = sp.csr_matrix((len(rows), rows.dimensions), dtype=rows.values.dtype)
    index = np.int32 if max(rows.nnz, rows.dimensions) <= np.iinfo(np.int32).max else np.int64
    matrix.indptr = rows.offsets.astype(index, copy=False)
    matrix.indices = rows.columns.astype(index, copy=False)
    matrix.data = rows.values
    return matrix


def as_rows(matrix: Any) -> Rows:
    """Return a matrix's rows, which share its memory where its types and its order allow that.

    Entries of one row and one column become their sum: what coordinate descent squares is a sum.

    Parameters
    ----------
    matrix
        ``[rows, dimensions]``, an array or a CSR matrix of float32 or float64.
    """
    with optional("sparcel.linear", "linear"):
        import scipy.sparse as sp
    csr = matrix if sp.issparse(matrix) else sp.csr_matrix(matrix)
    if not csr.has_canonical_format:
        csr = csr.copy()
        csr.sum_duplicates()
    dimensions = int(csr.shape[1])
    index = np.int32 if dimensions <= np.iinfo(np.int32).max else np.int64
    return Rows(
        csr.indptr.astype(np.int64, copy=False),
        csr.indices.astype(index, copy=False),
        csr.data,
        dimensions,
    )


def product(matrix: Any, coefficients: Any) -> Array:
    """Return ``matrix @ coefficients.T`` as an array; either may be sparse."""
    with optional("sparcel.linear", "linear"):
        import scipy.sparse as sp
    if matrix.shape[1] > MOST_HELD:
        # scipy would take memory for each column.
        columns, places = np.unique(coefficients.indices, return_inverse=True)
        shape = coefficients.shape[0], len(columns)
        coefficients = sp.csr_matrix((coefficients.data, places, coefficients.indptr), shape)
        matrix = matrix_of(as_rows(matrix).among(columns))
    scores = matrix @ coefficients.T
    found: Array = scores.toarray() if sp.issparse(scores) else scores
    return found


def sample_weights(weights: Any, rows: int, dtype: Any) -> Array | None:
    """Return the weights of rows as an array of a model's dtype; None stays None."""
    if weights is None:
        return None
    with optional("sparcel.linear", "linear"):
        from sklearn.utils.validation import check_array
    if np.isscalar(weights) or getattr(weights, "ndim", 1) == 0:
        weights = np.full(rows, checked_number(weights, "sample_weight", at_least=0))
    if rows == 0 and np.size(weights) == 0:  # which check_array refuses
        return np.zeros(0, dtype)
    found = check_array(
        weights, ensure_2d=False, dtype=dtype, ensure_non_negative=True, input_name="sample_weight"
    )
    if found.shape != (rows,):
        raise ValueError(f"sample_weight must have one weight a row, {rows}, got {found.shape}")
    return np.ascontiguousarray(found)


@dataclass(frozen=True, eq=False)
class Classes:
    """The classes of a training.

    Attributes
    ----------
    labels
        ``[classes]``, sorted: numbers or strings.
    """

    labels: Array

    @classmethod
    def of(cls, y: Array, comm: Communicator | None = None) -> Self:
        """Return the classes that occur on any rank; all ranks call.

        Raises
        ------
        InputError
            On all ranks, when there are fewer than two.
        """
        own = np.unique(y)
        if comm is not None:
            parts = gathered(comm, [own.dtype.kind, own.tolist()], "classes")
            if len({kind for kind, labels in parts if labels}) > 1:
                raise InputError(
                    "ranks have labels of different kinds, such as numbers and strings; give all"
                    " the same"
                )
            own = np.unique(np.array([label for _, labels in parts for label in labels]))
        if len(own) == 0:
            raise InputError("there are no rows to fit a model to, on any rank")
        if len(own) < 2:
            raise InputError(
                f"a classifier needs labels of at least two classes, got {own.tolist()}: 1 class"
            )
        return cls(own)

    @property
    def width(self) -> int:
        """Number of classes that are told from the rest: one, where there are two classes."""
        return 1 if len(self.labels) == 2 else len(self.labels)

    def numbers(self, y: Array) -> Array:
        """Return the place of each label among the classes.

        Raises
        ------
        InputError
            When a label is none of the classes.
        """
        places = np.searchsorted(self.labels, y)
        places[places == len(self.labels)] = 0
        wrong = self.labels[places] != y
        if wrong.any():
            raise InputError(
                f"label {y[wrong].tolist()[0]!r} is none of the classes {self.labels.tolist()} that"
                " the model knows; the first rows, or classes=, must name all"
            )
        return places

    def check_same(self, given: Sequence[Any]) -> None:
        """Raise an `InputError` unless the labels that are given are these classes."""
        if set(np.asarray(given).tolist()) != set(self.labels.tolist()):
            raise InputError(
                f"classes must be those of the first call, {self.labels.tolist()}, got"
                f" {np.unique(given).tolist()}; leave them out, or begin with all"
            )

    def targets(self, numbers: Array, dtype: Any) -> Array:
        """Return what the kernels fit to: 1 and -1, or the numbers of classes."""
        return (2 * numbers - 1 if self.width == 1 else numbers).astype(dtype)

    def row_weights(
        self,
        numbers: Array,
        class_weight: Mapping[Any, float] | str | None,
        weights: Array | None,
        dtype: Any,
        comm: Communicator | None = None,
    ) -> Array | None:
        """Return each row's weight times that of its class; None where all are 1.

        All ranks call, because ``"balanced"`` counts the rows of all of them.

        Raises
        ------
        InputError
            On all ranks, when a class has another weight than a finite number of at least 0, there
            is no such class, or ranks have other weights.
        """
        given = run_or_fail_everywhere(comm, lambda: self._checked_weights(class_weight, dtype))
        if any(other != given for other in gathered(comm, given, "class_weight")):
            raise InputError("ranks must have the same class_weight; give all the same")
        if given is None:
            return weights
        own = np.ones(len(numbers), dtype) if weights is None else weights
        if isinstance(given, str):  # balanced
            counts = np.bincount(numbers, own, len(self.labels)).tolist()
            total = np.sum(gathered(comm, counts, "weights of classes"), axis=0)
            share = total.sum() / len(self.labels)
            given = np.divide(share, total, out=np.zeros(len(total)), where=total > 0).tolist()
        return np.asarray(own * np.array(given)[numbers], dtype)

    def _checked_weights(
        self, class_weight: Mapping[Any, float] | str | None, dtype: Any
    ) -> list[float] | str | None:
        """Return the weight of each class; None and "balanced" stay what they are."""
        if class_weight is None or (isinstance(class_weight, str) and class_weight == "balanced"):
            return class_weight
        if not isinstance(class_weight, Mapping):
            raise InputError(
                "class_weight must be None, 'balanced' or a dict of weights by label, got"
                f" {class_weight!r}"
            )
        known = self.labels.tolist()
        if unknown := class_weight.keys() - set(known):
            raise InputError(
                f"class_weight has {unknown.pop()!r}, which is none of the classes {known}"
            )
        most = float(np.finfo(dtype).max)
        each = {
            label: checked_number(weight, f"class_weight[{label!r}]", at_least=0, at_most=most)
            for label, weight in class_weight.items()
        }
        return [each.get(label, 1.0) for label in known]


def finite_numbers(labels: Array, dtype: Any) -> Array:
    """Return the labels of a regression as finite numbers.

    Raises
    ------
    InputError
        When one is no number, or too large for the dtype.
    """
    try:
        with np.errstate(over="ignore"):  # what is infinite is refused
            found = np.ascontiguousarray(labels, dtype)
    except ValueError as error:
        raise InputError(f"regression needs labels that are numbers: {error}") from None
    if not np.isfinite(found).all():
        wrong = labels[~np.isfinite(found)][0]
        raise InputError(f"regression needs labels that are finite in {found.dtype}, got {wrong!s}")
    return found
