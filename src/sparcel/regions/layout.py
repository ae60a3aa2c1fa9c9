"""The phases of the two exchanges: how much of each region travels, and in which messages."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from sparcel import formats
from sparcel.formats import Expected, FewBits, Format
from sparcel.kernels import Phase, Regions, Shares
from sparcel.stream import SparseStream
from sparcel.units import share_of

_ROOM, _SPARE = 2, 64
"""A message has room for so many times the entries that are expected, and some more: a threshold
from a sample lets a few more through, and ties may let all through."""

_LONGEST = 2**31 - 1
"""The longest vector of compiled passes, whose indices are int32."""

_GROUPS = (8, 16, 32, 64)
"""How many values may share a scale in compiled passes: blocks of a region have whole scales."""


@dataclass(frozen=True)
class _Code:
    """See `sparcel.kernels.phase.Code`."""

    format: Format

    def encode(
        self,
        size: int,
        indices: Tensor | None,
        values: Tensor,
        finite: bool | Tensor,
        turn: tuple[int, ...],
    ) -> tuple[Tensor, Tensor]:
        # Python hashes whole numbers alike everywhere.
        key = hash((self.format.seed, *turn))
        packet = self.format.encode(SparseStream.unchecked(indices, values, size, finite), key)
        return formats.whole(packet.message), packet.stream.values

    def decode(
        self, size: int, dtype: torch.dtype, message: Tensor
    ) -> tuple[Tensor | None, Tensor, bool | Tensor]:
        stream = formats.decode([message], Expected(size, dtype, None))
        return stream.indices, stream.values, stream.finite


@lru_cache(maxsize=1024)
def phase(regions: Regions, shares: Shares, format: Format, dtype: torch.dtype) -> Phase:
    """Return the phase in which shares of the regions travel, in values of a dtype."""
    value_bytes = dtype.itemsize
    expected, most = [], []
    for rank in range(regions.ranks):
        asked, room, first = 0, 0, 0
        for stop, density in shares:
            last = regions.before(rank, stop)
            wanted = share_of(density, last - first)
            asked += wanted
            room += min(last - first, _ROOM * wanted + _SPARE)
            first = last
        expected.append(asked)
        most.append(room)
    lengths = [regions.length(rank) for rank in range(regions.ranks)]
    dense = sum(expected) >= format.dense_from(max(1, regions.size), value_bytes)
    if dense:
        expected = most = lengths
    bounds = [
        format.nbytes(None if dense else nnz, length, value_bytes)
        for nnz, length in zip(most, lengths, strict=True)
    ]
    headers = [format.blank_header(length, dtype, dense).pack() for length in lengths]
    compiled = dtype == torch.float32 and regions.size <= _LONGEST
    bits, group = few_bits(format, dense) if compiled else (0, 0)
    return Phase(
        regions,
        shares,
        dense,
        tuple(most),
        tuple(expected),
        tuple(bounds),
        tuple(headers),
        dtype,
        bits,
        group,
        _Code(format),
    )


def few_bits(format: Format, dense: bool) -> tuple[int, int]:
    """Return a format's bits and the values that share a scale, where compiled passes know it."""
    code = format.value_code
    known = (
        isinstance(code, FewBits)
        and not code.stochastic
        and code.scale == "bfloat16"
        and code.block in _GROUPS
        and (dense or format.indices == "packed")
    )
    return (code.bits, code.block) if known and isinstance(code, FewBits) else (0, 0)
