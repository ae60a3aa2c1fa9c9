"""QSGD: dense values as 8, 4 or 2 bits each with one scale a bucket (SparCML, section 6)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparcel import kernels
from sparcel.errors import FormatError, InputError
from sparcel.formats.header import HEADER_BYTES, Header, padded
from sparcel.stream import SparseStream

KIND = 1


@dataclass(frozen=True)
class Qsgd:
    """Writes dense float streams in few bits, stochastically and without bias.

    Parameters
    ----------
    bits
        8, 4 or 2 bits a value, the sign among them.
    bucket
        Values that share one float32 scale; the paper has them in the order of 1024.

    Raises
    ------
    InputError
        When ``bits`` or ``bucket`` is not supported.
    """

    bits: int
    bucket: int = 1024

    def __post_init__(self) -> None:
        if self.bits not in (2, 4, 8):
            raise InputError(f"bits must be 8, 4 or 2, got {self.bits}")
        if not 8 <= self.bucket < 1 << 16 or self.bucket % 8:
            raise InputError(f"bucket must be a multiple of 8 from 8 to 65528, got {self.bucket}")

    def encode(self, stream: SparseStream, seed: int, offset: int) -> Tensor:
        """Return the message that holds dense ``stream``, quantised.

        ``seed`` and ``offset``, the place of the first value in the whole vector, alone decide
        the random numbers: they are the same on every machine.
        """
        packed_bytes, scale_bytes = _part_bytes(stream.size, self.bits, self.bucket)
        header = Header(
            kind=KIND,
            dtype=stream.dtype,
            size=stream.size,
            nnz=stream.size,
            width=None,
            dense=True,
            finite=stream.finite,
            wide_indices=False,
            length=HEADER_BYTES + padded(scale_bytes) + padded(packed_bytes),
            detail=self.bits << 16 | self.bucket,
        )
        message = torch.zeros(header.length, dtype=torch.uint8, device=stream.device)
        header.pack_into(message)
        packed, scales = kernels.quantize(stream.values, self.bits, self.bucket, seed, offset)
        message[HEADER_BYTES : HEADER_BYTES + scale_bytes].view(torch.float32).copy_(scales)
        start = HEADER_BYTES + padded(scale_bytes)
        message[start : start + packed_bytes] = packed
        return message


def decode(message: Tensor, header: Header) -> SparseStream:
    """Return the dense stream in ``message``, with the dtype it was quantised from.

    Raises
    ------
    FormatError
        When the header's settings or length are impossible.
    """
    bits, bucket = header.detail >> 16, header.detail & 0xFFFF
    scalar_floats = header.dtype.is_floating_point and header.width is None
    if bits not in (2, 4, 8) or not bucket or not header.dense or not scalar_floats:
        raise FormatError(f"impossible qsgd header: bits={bits}, bucket={bucket}, {header.dtype}")
    packed_bytes, scale_bytes = _part_bytes(header.size, bits, bucket)
    start = HEADER_BYTES + padded(scale_bytes)
    if header.length != start + padded(packed_bytes):
        raise FormatError(
            f"a qsgd message of {header.size} values takes {start + padded(packed_bytes)} bytes,"
            f" its header says {header.length}"
        )
    scales = message[HEADER_BYTES : HEADER_BYTES + scale_bytes].view(torch.float32)
    packed = message[start : start + packed_bytes]
    values = kernels.dequantize(packed, scales, header.size, bits, bucket).to(header.dtype)
    return SparseStream.unchecked(None, values, header.size, header.finite)


def _part_bytes(size: int, bits: int, bucket: int) -> tuple[int, int]:
    """Return the bytes of the packed values and of the scales."""
    return -(-size * bits // 8), 4 * -(-size // bucket)
