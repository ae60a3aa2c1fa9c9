"""Streams: sparse vectors that turn dense when the dense form is smaller (SparCML, section 5.1)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from sparcel.core import device, kernels
from sparcel.core._checks import (
    Array,
    as_tensor,
    check_like,
    check_type,
    check_values,
    checked_indices,
    checked_number,
    checked_whole,
)
from sparcel.core.device import all_of
from sparcel.core.ops import SUM, Op, resolve
from sparcel.core.profiling import timed
from sparcel.errors import InputError

_Filter = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]

MOST_SIZE = (1 << 63) - 1
"""An index has at most 64 bits, one of them for its sign."""


class SparseStream:
    """A vector of known size, stored as sorted indices with values, or densely.

    Indices and values are tensors, or arrays of NumPy.

    Parameters
    ----------
    indices
        ``[nnz]`` int32 or int64, strictly increasing, in ``[0, size)``. They are stored as int32,
        or as int64 if the size needs it. ``None`` for a dense stream.
    values
        ``[nnz]``, or one row per index: ``[nnz, width]``; ``[size]`` or ``[size, width]`` for a
        dense stream. One of float16, bfloat16, float32, float64, int32, int64.
    size
        Number of coordinates of the vector (of rows, when values are rows).

    Raises
    ------
    InputError
        When indices are unsorted, repeated or out of range, when lengths differ, or when a dtype
        is not supported.

    Notes
    -----
    An absent coordinate stands for the neutral element of the operation that reduces the stream.
    An explicit zero stays an explicit zero. Contiguous tensors are not copied, and neither are
    arrays of NumPy, unless they are read-only. ``numpy.asarray(stream.values)`` is the way back.
    """

    __slots__ = ("finite", "indices", "size", "values")

    indices: Tensor | None
    values: Tensor
    size: int
    finite: bool | Tensor
    """False if a vector that entered the stream held NaN or Inf; the values are then meaningless.
    Every reduction passes the flag on, so all ranks learn of it without an extra message. A stream
    on a device may have it there, as a 0-dimensional tensor, until somebody needs to know."""

    def __init__(self, indices: Array | None, values: Array, size: int) -> None:
        size = checked_whole(size, "size", at_least=0, at_most=MOST_SIZE)
        values = as_tensor(values, "values")
        check_values(values, size, dense=indices is None)
        if indices is not None:
            indices = checked_indices(as_tensor(indices, "indices"), values, size)
        self.indices, self.values = indices, values.detach().contiguous()
        self.size, self.finite = size, True

    @classmethod
    def unchecked(
        cls, indices: Tensor | None, values: Tensor, size: int, finite: bool | Tensor = True
    ) -> SparseStream:
        """Make a stream without checking its parts; the caller guarantees that they are valid."""
        stream = cls.__new__(cls)
        stream.indices, stream.values, stream.size, stream.finite = indices, values, size, finite
        return stream

    @classmethod
    def from_dense(cls, vector: Array) -> SparseStream:
        """Store the nonzero coordinates (rows) of ``vector``, or all of them if that is smaller.

        Parameters
        ----------
        vector
            ``[size]`` or ``[size, width]``, a tensor or an array of NumPy. A stream that stays
            dense shares its memory.
        """
        vector = as_tensor(vector, "vector")
        size = vector.shape[0] if vector.ndim else 0
        check_values(vector, size, dense=True)
        vector = vector.detach().contiguous()
        dense = cls.unchecked(None, vector, size)
        occupied = vector if vector.ndim == 1 else vector.ne(0).any(dim=1)
        indices = occupied.nonzero().squeeze(1).to(kernels.index_dtype(size))
        if indices.numel() >= dense_from(size, dense.value_bytes):
            return dense
        return cls.unchecked(indices, vector[indices], size)

    def empty_like(self) -> SparseStream:
        """Return a sparse stream without entries, of the same size, dtype and width."""
        indices = torch.empty(0, dtype=kernels.index_dtype(self.size), device=self.device)
        values = self.values.new_empty((0, *self.values.shape[1:]))
        return SparseStream.unchecked(indices, values, self.size, self.finite)

    def void_like(self) -> SparseStream:
        """Return what stands for a sum that is not finite: `empty_like`, and not ``finite``."""
        void = self.empty_like()
        void.finite = False
        return void

    @property
    def is_dense(self) -> bool:
        """Whether every coordinate is stored."""
        return self.indices is None

    @property
    def nnz(self) -> int:
        """Number of stored coordinates (rows), explicit zeros included."""
        return int(self.values.shape[0])

    @property
    def density(self) -> float:
        """Share of the coordinates that are stored, in [0, 1]."""
        return self.nnz / self.size if self.size else 0.0

    @property
    def width(self) -> int | None:
        """Number of columns of a row stream, None for scalar values."""
        return int(self.values.shape[1]) if self.values.ndim == 2 else None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the values."""
        return self.values.dtype

    @property
    def value_bytes(self) -> int:
        """Bytes of one coordinate's value, or of its row of values."""
        return value_bytes(self.dtype, self.width)

    @property
    def device(self) -> torch.device:
        """The device that holds the stream."""
        return self.values.device

    def __repr__(self) -> str:
        rows = f", width={self.width}" if self.width is not None else ""
        kind = "dense" if self.is_dense else f"nnz={self.nnz}"
        return f"SparseStream({kind}, size={self.size}{rows}, dtype={self.dtype})"

    def to_dense(self, fill: float = 0, out: Tensor | None = None) -> Tensor:
        """Return the vector, ``[size]`` or ``[size, width]``, absent coordinates set to ``fill``.

        It is written to ``out`` if that is given. Otherwise a dense stream returns its own storage,
        not a copy.
        """
        checked_number(fill, "fill")
        if out is not None:
            check_like(out, self.values, (self.size, *self.values.shape[1:]))
        if self.indices is None:
            return self.values if out is None else out.copy_(self.values)
        if out is None:
            out = self.values.new_empty((self.size, *self.values.shape[1:]))
        kernels.expand(out, self.indices, self.values, fill)
        return out

    def compact(self, op: Op = SUM, dense_at: int | None = None) -> SparseStream:
        """Return the stream, converted to dense if the dense form is smaller.

        Parameters
        ----------
        op
            Its neutral element fills the absent coordinates.
        dense_at
            The count of entries from which the dense form is smaller. A format knows this count
            for its messages; the default, `dense_from`, is that of tensors in memory.
        """
        if dense_at is None:
            dense_at = dense_from(self.size, self.value_bytes)
        if self.is_dense or self.nnz < dense_at:
            return self
        dense = self.to_dense(op.neutral_for(self.dtype))
        return SparseStream.unchecked(None, dense, self.size, self.finite)

    def scale(self, factor: float) -> SparseStream:
        """Return a stream whose stored values are multiplied by ``factor``; the dtype stays."""
        checked_number(factor, "factor")
        values = (self.values * factor).to(self.dtype)
        return SparseStream.unchecked(self.indices, values, self.size, self.finite)

    def slice(self, start: int, stop: int) -> SparseStream:
        """Return the coordinates in ``[start, stop)``, numbered from 0; dense values are views."""
        start, stop = checked_whole(start, "start"), checked_whole(stop, "stop")
        if not 0 <= start <= stop <= self.size:
            raise InputError(
                f"slice must satisfy 0 <= start <= stop <= {self.size}, got [{start}, {stop})"
            )
        return self.split([start, stop])[0]

    def split(self, boundaries: Sequence[int]) -> list[SparseStream]:
        """Return the slices between consecutive ``boundaries``, which must not decrease."""
        ranges = list(pairwise(boundaries))
        if self.indices is None:
            return [
                SparseStream.unchecked(None, self.values[lo:hi], hi - lo, self.finite)
                for lo, hi in ranges
            ]
        bounds = device.put(boundaries, self.device, self.indices.dtype)
        cuts = device.read(torch.searchsorted(self.indices, bounds)).tolist()
        counts = [last - first for first, last in pairwise(cuts)]
        indices = self.indices[cuts[0] : cuts[-1]].split(counts)
        values = self.values[cuts[0] : cuts[-1]].split(counts)
        return [
            SparseStream.unchecked(
                (part - lo).to(kernels.index_dtype(hi - lo)), stored, hi - lo, self.finite
            )
            for (lo, hi), part, stored in zip(ranges, indices, values, strict=True)
        ]

    def placed(self, start: int, size: int) -> SparseStream:
        """Return the nonzero coordinates as those of a vector of ``size`` from ``start`` on.

        The result is sparse, and its indices count from the beginning of that vector. Scalar float
        values only.
        """
        part = self.largest(self.size) if self.is_dense else self
        indices = _stored_indices(part).to(kernels.index_dtype(size)) + start
        return SparseStream.unchecked(indices, part.values, size, part.finite)

    @timed("select")
    def topk(self, k: int) -> tuple[SparseStream, SparseStream]:
        """Split the stream into its ``k`` largest magnitudes and the rest, both sparse.

        Ties go to the lowest index; zeros are never selected. Scalar float values only.
        """
        largest = self.largest(k)
        indices, values = kernels.without(
            _stored_indices(self),
            self.values,
            _stored_indices(largest),
            left=self.nnz - largest.nnz,
        )
        return largest, SparseStream.unchecked(indices, values, self.size, self.finite)

    @timed("select")
    def largest(self, k: int) -> SparseStream:
        """Return only the first stream of `topk`, the ``k`` largest magnitudes."""
        if self.width is not None or not self.dtype.is_floating_point:
            raise InputError(f"topk selects among scalar float values, got {self}")
        positions, values = kernels.topk(self.values, checked_whole(k, "k", at_least=0))
        if self.indices is not None:
            positions = self.indices.index_select(0, positions)
        return SparseStream.unchecked(positions, values, self.size, self.finite)

    def within(self, other: SparseStream) -> SparseStream:
        """Return the stored coordinates that ``other`` stores too, as a sparse stream."""
        return self._filtered(kernels.within, other)

    def without(self, other: SparseStream) -> SparseStream:
        """Return the stored coordinates that ``other`` does not store, as a sparse stream."""
        return self._filtered(kernels.without, other)

    def _filtered(self, keep: _Filter, other: SparseStream) -> SparseStream:
        check_type(other, SparseStream, "other")
        indices, values = keep(_stored_indices(self), self.values, _stored_indices(other))
        return SparseStream.unchecked(indices, values, self.size, self.finite)

    def __add__(self, other: SparseStream) -> SparseStream:
        if not isinstance(other, SparseStream):
            return NotImplemented
        return reduce([self, other], SUM)


def reduce(
    streams: Sequence[SparseStream],
    op: str | Op = SUM,
    dense_at: int | None = None,
) -> SparseStream:
    """Reduce streams of one size and dtype, in the order given (SparCML, section 5.1).

    Parameters
    ----------
    dense_at
        As for `SparseStream.compact`, which is applied to the result.

    Returns
    -------
    SparseStream
        Dense if an input is dense, or if the dense form of the result is smaller. The true count
        of the merged indices decides.

    Raises
    ------
    InputError
        When there is no stream, or sizes, dtypes or widths differ.
    """
    op = resolve(op)
    if not streams:
        raise InputError("reduce needs at least one stream, got none")
    first = streams[0]
    for other in streams[1:]:
        if (other.size, other.dtype, other.width) != (first.size, first.dtype, first.width):
            raise InputError(f"streams must agree in size, dtype and width: {first} and {other}")
    if len(streams) == 1:
        return first
    finite = all_of([stream.finite for stream in streams])
    pairs = [(s.indices, s.values) for s in streams if s.indices is not None]
    if len(pairs) == len(streams):
        indices, values = kernels.merge(pairs, op)
        return SparseStream.unchecked(indices, values, first.size, finite).compact(op, dense_at)
    # Half precision is summed in float32 and rounded once, at the end, as `kernels.merge` does.
    total = first.to_dense(op.neutral_for(first.dtype))
    total = total.to(kernels.widen(total[:0]).dtype, copy=first.is_dense)
    for other in streams[1:]:
        if other.indices is None:
            total = op.apply(total, kernels.widen(other.values))
        else:
            kernels.scatter_reduce(total, other.indices, other.values, op)
    return SparseStream.unchecked(None, total.to(first.dtype), first.size, finite)


def concatenate(
    streams: Sequence[SparseStream],
    op: Op = SUM,
    dense_at: int | None = None,
    out: Tensor | None = None,
) -> SparseStream:
    """Join streams of consecutive index ranges, the inverse of `SparseStream.split`.

    The count of entries alone decides whether the result is dense; ``dense_at`` is that of
    `SparseStream.compact`. A dense one is written to ``out``, if given.

    Raises
    ------
    InputError
        When there is no stream, or ``out`` is not like the result.
    """
    if not streams:
        raise InputError("concatenate needs at least one stream, got none")
    size = sum(stream.size for stream in streams)
    finite = all_of([stream.finite for stream in streams])
    nnz = sum(stream.nnz for stream in streams)
    if nnz >= (dense_from(size, streams[0].value_bytes) if dense_at is None else dense_at):
        fill = op.neutral_for(streams[0].dtype)
        dense = out
        if dense is None:
            dense = streams[0].values.new_empty((size, *streams[0].values.shape[1:]))
        for stream, part in zip(streams, dense.split([s.size for s in streams]), strict=True):
            stream.to_dense(fill, out=part)
        return SparseStream.unchecked(None, dense, size, finite)
    dtype, start, indices = kernels.index_dtype(size), 0, []
    for stream in streams:
        indices.append(_stored_indices(stream).to(dtype) + start)
        start += stream.size
    values = torch.cat([stream.values for stream in streams])
    return SparseStream.unchecked(torch.cat(indices), values, size, finite)


WRITTEN = SparseStream.unchecked(None, torch.empty(0, device="cpu"), 0)
"""Stands for a stream whose entries are in their place already."""


def value_bytes(dtype: torch.dtype, width: int | None) -> int:
    """Return the bytes of one coordinate's value, or of its row of ``width`` values."""
    return dtype.itemsize * (1 if width is None else width)


def dense_from(size: int, value_bytes: int) -> int:
    """Return the smallest count of entries with which the dense form takes fewer bytes.

    This is SparCML's switch: nnz > δ = size · isize / (c + isize), with c bytes an index. In memory
    an index takes four bytes, or eight if the size needs it; a format may pack it better.
    """
    return size * value_bytes // (kernels.index_dtype(size).itemsize + value_bytes) + 1


def _stored_indices(stream: SparseStream) -> Tensor:
    if stream.indices is not None:
        return stream.indices
    return torch.arange(stream.size, dtype=kernels.index_dtype(stream.size), device=stream.device)
