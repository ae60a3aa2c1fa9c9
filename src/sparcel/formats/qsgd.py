"""QSGD: values as 8, 4 or 2 bits each with one scale a bucket (SparCML, sections 6 and 8.3)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple, Self

import torch
from torch import Tensor

from sparcel import kernels
from sparcel._checks import all_finite, flag, whole_number
from sparcel.errors import FormatError, InputError
from sparcel.formats.base import Encoded
from sparcel.formats.coo import COO, checked
from sparcel.formats.header import HEADER_BYTES, Header, padded
from sparcel.formats.parts import join
from sparcel.ops import Op
from sparcel.stream import SparseStream

_BITS = (2, 4, 8)
_FLOAT_BYTES = (2, 4, 8)
_PACKED = 1 << 8
"""Beside the bits in a header's detail: whether indices are packed."""


@dataclass(frozen=True)
class Qsgd:
    """Writes the values of float streams in few bits, stochastically and without bias.

    A message holds the scales, the packed values and, if it is sparse, the indices as `COO` or
    `Packed` has them. Streams that `COO` writes in no more bytes, as those of up to three values,
    use `COO`.

    Parameters
    ----------
    bits
        8, 4 or 2 bits a value, sign included.
    bucket
        How many values share one float32 scale: consecutive ones among those that are stored, so
        the buckets of a sparse stream cover more coordinates than those of a dense one. SparCML's
        experiments have buckets of 512, its section 6 about 1024.
    seed
        Decides the random rounding, together with the value's position. Use a new seed for every
        call.
    packed
        Whether indices travel in few bits too, as `Packed` has them.

    Raises
    ------
    InputError
        When ``bits`` or ``bucket`` is not supported.
    """

    bits: int
    bucket: int = 512
    seed: int = 0
    packed: bool = False

    def __post_init__(self) -> None:
        if whole_number(self.bits, "bits") not in _BITS:
            raise InputError(f"bits must be 8, 4 or 2, got {self.bits}")
        whole_number(self.seed, "seed")
        flag(self.packed, "packed")
        if not 8 <= whole_number(self.bucket, "bucket") < 1 << 16 or self.bucket % 8:
            raise InputError(f"bucket must be a multiple of 8 from 8 to 65528, got {self.bucket}")

    @property
    def kind(self) -> int:
        """See `Format.kind`."""
        return 1

    def at_step(self, step: int) -> Self:
        """Return the same with the random numbers of a step, which no other step has."""
        return replace(self, seed=self.seed + (step << 32))

    def encode(self, stream: SparseStream, start: int = 0) -> Encoded:
        """See `Format.encode`; scalar floats are quantised, all other streams use `COO`.

        The j-th stored value is rounded by random number ``start`` + j of the seed, so every
        machine rounds alike. Values beyond float32, which scales cannot hold, use `COO` too.
        """
        nnz = None if stream.is_dense else stream.nnz
        layout = _Layout(self.bits, self.bucket, self.packed)
        length = layout.message_bytes(nnz, stream.size)
        scalar_floats = stream.dtype.is_floating_point and stream.width is None
        saves = length < COO.max_bytes(nnz, stream.size, stream.value_bytes)
        if not (stream.finite and scalar_floats and saves):
            return COO.encode(stream)
        values = stream.values.contiguous()
        packed, scales = kernels.quantize(values, self.bits, self.bucket, self.seed, start)
        if not all_finite(scales):
            return COO.encode(stream)
        parts = [scales, packed]
        if stream.indices is not None:
            indices = stream.indices.contiguous()
            parts.append(kernels.pack_indices(indices, stream.size) if self.packed else indices)
        message = join(Header.of(stream, self.kind, length, layout.detail()), parts)
        decoded = kernels.dequantize(packed, scales, stream.nnz, self.bits, self.bucket)
        lost = values - decoded.to(stream.dtype)
        return Encoded(message, SparseStream.unchecked(stream.indices, lost, stream.size))

    def decode(self, message: Tensor, header: Header) -> SparseStream:
        """See `Format.decode`; the header gives bits, bucket and the dtype of the result."""
        layout = _Layout.of(header)
        bits, bucket, packed = layout
        scalar_floats = header.dtype.is_floating_point and header.width is None
        if bits not in _BITS or not bucket or not scalar_floats:
            raise FormatError(
                f"impossible qsgd header: bits={bits}, bucket={bucket}, {header.dtype}"
            )
        header.check("qsgd", layout.message_bytes(header.sparse_nnz, header.size))
        scales, codes, rest = _parts(message, header, layout)
        values = kernels.dequantize(codes, scales, header.nnz, bits, bucket).to(header.dtype)
        if header.dense:
            return SparseStream.unchecked(None, values, header.size, header.finite)
        indices = kernels.unpack_indices(rest, header.nnz, header.size) if packed else rest
        return SparseStream.unchecked(checked(indices, header), values, header.size, header.finite)

    def expected_bytes(self, nnz: float | None, size: float, value_bytes: int) -> float:
        """See `Format.expected_bytes`; the length of scalar floats, which the counts decide."""
        stored, whole = None if nnz is None else round(nnz), round(size)
        plain = COO.max_bytes(stored, whole, value_bytes)
        if value_bytes not in _FLOAT_BYTES:
            return plain
        layout = _Layout(self.bits, self.bucket, self.packed)
        return min(plain, layout.message_bytes(stored, whole))

    def max_bytes(self, nnz: int | None, size: int, value_bytes: int) -> int:
        """See `Format.max_bytes`; `COO` is the longest, and what non-finite streams use."""
        return COO.max_bytes(nnz, size, value_bytes)

    def dense_from(self, size: int, value_bytes: int) -> int:
        """See `Format.dense_from`: the smallest count of entries whose sparse message is longer.

        In large streams of float32 these are 20, 11 or 6 % of the coordinates with 8, 4 or 2 bits,
        and more where indices are packed.
        A dense message is also more exact there, because the same values have more scales.
        """
        if value_bytes not in _FLOAT_BYTES:
            return COO.dense_from(size, value_bytes)
        return _dense_from(self.bits, self.bucket, self.packed, size, value_bytes)

    def reduce_messages(
        self, messages: Sequence[Tensor], like: SparseStream, op: Op
    ) -> SparseStream | None:
        """See `Format.reduce_messages`; only messages in the format `COO` are reduced."""
        return COO.reduce_messages(messages, like, op)


@lru_cache(maxsize=4096)
def _dense_from(bits: int, bucket: int, packed: bool, size: int, value_bytes: int) -> int:
    """Return `Qsgd.dense_from`, whatever the seed."""
    quantizer = Qsgd(bits, bucket, packed=packed)
    return bisect_right(
        range(size + 1),
        quantizer.expected_bytes(None, size, value_bytes),
        key=lambda nnz: quantizer.expected_bytes(nnz, size, value_bytes),
    )


class _Layout(NamedTuple):
    """What a message's header tells of its parts, as its detail."""

    bits: int
    bucket: int
    packed: bool

    @classmethod
    def of(cls, header: Header) -> Self:
        """Read the layout; bits that no layout has are refused as a wrong count of bits."""
        bits, packed = header.detail >> 16 & ~_PACKED, bool(header.detail >> 16 & _PACKED)
        return cls(bits, header.detail & 0xFFFF, packed)

    def detail(self) -> int:
        """Return what `of` reads."""
        return (self.packed * _PACKED | self.bits) << 16 | self.bucket

    def message_bytes(self, nnz: int | None, size: int) -> int:
        """Return the bytes of a quantised message; dense if ``nnz`` is None."""
        return HEADER_BYTES + sum(map(padded, self.part_bytes(nnz, size)))

    def part_bytes(self, nnz: int | None, size: int) -> tuple[int, int, int]:
        """Return the bytes of the scales, of the values' codes, and of the indices."""
        count = size if nnz is None else nnz
        index_bytes = 0 if nnz is None else kernels.index_dtype(size).itemsize * count
        if nnz is not None and self.packed:
            index_bytes = 8 * kernels.packed_words(min(count, size), size)
        return 4 * -(-count // self.bucket), -(-count * self.bits // 8), index_bytes


def _parts(message: Tensor, header: Header, layout: _Layout) -> tuple[Tensor, Tensor, Tensor]:
    """Return the views of ``message`` that hold the scales, the codes and the indices."""
    sizes = layout.part_bytes(header.sparse_nnz, header.size)
    starts = accumulate(map(padded, sizes), initial=HEADER_BYTES)
    scales, codes, indices = (
        message[start : start + size] for start, size in zip(starts, sizes, strict=False)
    )
    dtype = torch.int64 if layout.packed else header.index_dtype
    return scales.view(torch.float32), codes, indices.view(dtype)
