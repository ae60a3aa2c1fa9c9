"""What `measure.py` demands of every result, computed with torch on the device itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sparcel import device, formats
from sparcel.stream import SparseStream

Pair = tuple[Tensor, Tensor]
"""Indices and values."""


class WrongResultError(AssertionError):
    """A result is not what it should be; the message names the check."""


def expect(holds: bool | Tensor, what: str) -> None:
    """Raise `WrongResultError` unless something holds."""
    if not bool(holds):
        raise WrongResultError(what)


def check_listed(x: Tensor, indices: Tensor, values: Tensor) -> None:
    """Check that indices are sorted and unique, and that the values are theirs."""
    expect((indices[1:] > indices[:-1]).all(), "indices are sorted and unique")
    expect(torch.equal(values, x.index_select(0, indices)), "values are those at the indices")


def check_largest(x: Tensor, k: int, indices: Tensor, values: Tensor) -> None:
    """Check that a selection has the min(k, nonzeros) largest magnitudes of a vector."""
    check_listed(x, indices, values)
    expect(values.numel() == min(k, int(torch.count_nonzero(x))), "min(k, nonzeros) are selected")
    left = x.abs().index_fill_(0, indices.long(), 0)
    expect(values.abs().min() >= left.max(), "no magnitude left out exceeds a selected one")


def check_in_any_order(x: Tensor, k: int, indices: Tensor, values: Tensor) -> None:
    """Check the selection of a method that does not sort by index."""
    order = indices.argsort()
    check_largest(x, k, indices[order], values[order])


def check_accumulated(
    total: Tensor, k: int, scratch: Tensor, selection: tuple[Tensor, Tensor, bool | Tensor]
) -> None:
    """Check that scratch and selection are parts of a sum, the selection its largest."""
    indices, values, finite = selection
    expect(finite, "the sum is finite")
    check_largest(total, k, indices, values)
    expect((scratch.index_select(0, indices) == 0).all(), "the scratch is 0 at what was selected")
    whole = scratch.index_copy(0, indices.long(), values)
    expect(torch.equal(whole, total), "scratch + selection = memory + gradient")


def check_scattered(dense: Tensor, indices: Tensor, values: Tensor) -> None:
    """Check what was written into a vector of zeros."""
    expected = torch.zeros_like(dense).index_copy_(0, indices.long(), values)
    expect(torch.equal(dense, expected), "scatter writes the values to their places alone")


def check_merged(size: int, streams: Sequence[Pair], indices: Tensor, values: Tensor) -> None:
    """Check a sum of streams whose values are small integers, so that any order is exact."""
    total = values.new_zeros(size)
    there = torch.zeros(size, dtype=torch.bool, device=values.device)
    for own, addends in streams:
        total.index_add_(0, own.long(), addends)
        there.index_fill_(0, own.long(), True)
    check_listed(total, indices, values)
    expect(indices.numel() == int(there.sum()), "merge keeps every index of the streams")
    expect(there.index_select(0, indices).all(), "merge has no index of its own")


def check_same(stream: SparseStream, other: SparseStream, what: str) -> None:
    """Check that two sparse streams have the same bits."""
    device.settle()
    assert stream.indices is not None and other.indices is not None, "selections are sparse"
    expect(torch.equal(stream.indices, other.indices), f"{what}: the indices")
    expect(torch.equal(stream.values, other.values), f"{what}: the values")


def check_packet(stream: SparseStream, packet: formats.Packet, format: formats.Format) -> None:
    """Check that a message decodes to what it says that it holds."""
    check_same(formats.decode(packet.message), packet.stream, f"{format.name} holds its stream")
    if not format.loses:
        check_same(packet.stream, stream, f"{format.name} loses nothing")
    nbytes = format.nbytes(stream.nnz, stream.size, stream.value_bytes)
    expect(formats.nbytes_of(packet.message) == nbytes, f"{format.name} has the length it predicts")
