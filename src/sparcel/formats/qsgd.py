"""QSGD: dense values as 8, 4 or 2 bits each with one scale a bucket (SparCML, section 6)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparcel import kernels
from sparcel._checks import whole_number
from sparcel.errors import FormatError, InputError
from sparcel.formats.base import Encoded
from sparcel.formats.coo import COO
from sparcel.formats.header import HEADER_BYTES, Header, padded
from sparcel.ops import Op
from sparcel.stream import SparseStream

_BITS = (2, 4, 8)


@dataclass(frozen=True)
class Qsgd:
    """Writes dense float streams in few bits, stochastically and without bias.

    Parameters
    ----------
    bits
        8, 4 or 2 bits a value, sign included.
    bucket
        How many values share one float32 scale; the paper uses about 1024.
    seed
        Decides the random rounding, together with the coordinate's position. Use a new seed for
        every call.

    Raises
    ------
    InputError
        When ``bits`` or ``bucket`` is not supported.
    """

    bits: int
    bucket: int = 1024
    seed: int = 0

    def __post_init__(self) -> None:
        if whole_number(self.bits, "bits") not in _BITS:
            raise InputError(f"bits must be 8, 4 or 2, got {self.bits}")
        whole_number(self.seed, "seed")
        if not 8 <= whole_number(self.bucket, "bucket") < 1 << 16 or self.bucket % 8:
            raise InputError(f"bucket must be a multiple of 8 from 8 to 65528, got {self.bucket}")

    @property
    def kind(self) -> int:
        """See `Format.kind`."""
        return 1

    def encode(self, stream: SparseStream, start: int = 0) -> Encoded:
        """See `Format.encode`; dense scalar floats are quantised, all other streams use `COO`.

        Only the seed and ``start`` decide the random numbers, so every machine gets the same ones.
        """
        if not (stream.is_dense and stream.finite and stream.size) or stream.width is not None:
            return COO.encode(stream)
        packed_bytes, scale_bytes = _part_bytes(stream.size, self.bits, self.bucket)
        header = Header(
            kind=self.kind,
            dtype=stream.dtype,
            size=stream.size,
            nnz=stream.size,
            width=None,
            dense=True,
            finite=stream.finite,
            wide_indices=False,
            length=int(self.expected_bytes(None, stream.size, 0)),
            detail=self.bits << 16 | self.bucket,
        )
        message = torch.zeros(header.length, dtype=torch.uint8, device=stream.device)
        header.pack_into(message)
        packed, scales = kernels.quantize(stream.values, self.bits, self.bucket, self.seed, start)
        message[HEADER_BYTES : HEADER_BYTES + scale_bytes].view(torch.float32).copy_(scales)
        packed_at = HEADER_BYTES + padded(scale_bytes)
        message[packed_at : packed_at + packed_bytes] = packed
        return Encoded(message, stream.values - self.decode(message, header).values)

    def decode(self, message: Tensor, header: Header) -> SparseStream:
        """See `Format.decode`; the header gives bits, bucket and the dtype of the result."""
        bits, bucket = header.detail >> 16, header.detail & 0xFFFF
        scalar_floats = header.dtype.is_floating_point and header.width is None
        if bits not in _BITS or not bucket or not header.dense or not scalar_floats:
            raise FormatError(
                f"impossible qsgd header: bits={bits}, bucket={bucket}, {header.dtype}"
            )
        packed_bytes, scale_bytes = _part_bytes(header.size, bits, bucket)
        start = HEADER_BYTES + padded(scale_bytes)
        if header.length != start + padded(packed_bytes):
            raise FormatError(
                f"a qsgd message of {header.size} values takes {start + padded(packed_bytes)}"
                f" bytes, its header says {header.length}"
            )
        scales = message[HEADER_BYTES : HEADER_BYTES + scale_bytes].view(torch.float32)
        packed = message[start : start + packed_bytes]
        values = kernels.dequantize(packed, scales, header.size, bits, bucket).to(header.dtype)
        return SparseStream.unchecked(None, values, header.size, header.finite)

    def expected_bytes(self, nnz: float | None, size: float, value_bytes: int) -> float:
        """See `Format.expected_bytes`."""
        if nnz is not None:
            return COO.expected_bytes(nnz, size, value_bytes)
        return HEADER_BYTES + sum(map(padded, _part_bytes(round(size), self.bits, self.bucket)))

    def max_bytes(self, nnz: int | None, size: int, value_bytes: int) -> int:
        """See `Format.max_bytes`; non-finite streams use `COO`, so its length is an upper bound."""
        plain = COO.max_bytes(nnz, size, value_bytes)
        if nnz is not None:
            return plain
        return max(plain, int(self.expected_bytes(None, size, value_bytes)))

    def dense_from(self, size: int, value_bytes: int) -> int:
        """See `Format.dense_from`: that of `COO`, so sparse streams that are smaller stay exact."""
        return COO.dense_from(size, value_bytes)

    def reduce_messages(
        self, messages: Sequence[Tensor], like: SparseStream, op: Op
    ) -> SparseStream | None:
        """See `Format.reduce_messages`; sparse messages are in the format `COO`."""
        return COO.reduce_messages(messages, like, op)


def _part_bytes(size: int, bits: int, bucket: int) -> tuple[int, int]:
    """Return the bytes of the packed values and of the scales."""
    return -(-size * bits // 8), 4 * -(-size // bucket)
