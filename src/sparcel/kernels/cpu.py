"""The compiled kernels for CPU tensors; `sparcel.kernels` documents arguments and results."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.dlpack import to_dlpack  # type: ignore[attr-defined]  # it is documented

from sparcel import _cpu
from sparcel.kernels import reference
from sparcel.kernels.addition import Addition
from sparcel.ops import Op


def topk(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Select the largest magnitudes of the whole vector."""
    return _cpu.topk(x.detach(), k, 0, torch.get_num_threads())


def topk_chunked(x: Tensor, k: int, chunk: int) -> tuple[Tensor, Tensor]:
    """Select the largest magnitudes of every ``chunk`` consecutive entries."""
    return _cpu.topk(x.detach(), k, chunk, torch.get_num_threads())


def accumulate_topk(
    addition: Addition, k: int, chunk: int | None = None
) -> tuple[Tensor, Tensor, bool]:
    """Add, select from the sum, and clear what was selected."""
    return _cpu.accumulate_topk(
        addition.memory,
        addition.gradient.detach(),
        addition.scratch,
        addition.scale,
        addition.momentum,
        addition.velocity,
        addition.entering,
        addition.clear,
        k,
        chunk or 0,
        torch.get_num_threads(),
    )


def threshold_select(x: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Select the entries of at least a given magnitude."""
    # torch rounds the threshold to the vector's dtype.
    limit = torch.tensor([threshold], dtype=x.dtype)
    return _cpu.threshold_select(x.detach(), limit, torch.get_num_threads())


def sums_of_squares(vectors: Sequence[Tensor]) -> Tensor:
    """Sum the squares chunk by chunk."""
    given = [to_dlpack(one.detach() if one.requires_grad else one) for one in vectors]
    return _cpu.sums_of_squares(given, reference.CHUNK, torch.get_num_threads())


def merge(streams: Sequence[tuple[Tensor, Tensor]], op: Op) -> tuple[Tensor, Tensor]:
    """Reduce sorted streams window by window."""
    if op.name is None:
        return reference.merge(streams, op)
    indices = [indices for indices, _ in streams]
    values = [values.detach() for _, values in streams]
    return _cpu.merge(indices, values, _columns(values[0]), op.name, torch.get_num_threads())


def scatter_reduce(dense: Tensor, indices: Tensor, values: Tensor, op: Op) -> None:
    """Apply ``dense[i] = op(dense[i], v)`` in place."""
    if op.name is None:
        reference.scatter_reduce(dense, indices, values, op)
    else:
        converted = values.detach().to(dense.dtype)
        _cpu.scatter_reduce(dense.detach(), indices, converted, _width(dense), op.name)


def scatter(dense: Tensor, indices: Tensor, values: Tensor) -> None:
    """Apply ``dense[i] = v`` in place."""
    converted = values.detach().to(dense.dtype)
    _cpu.scatter(dense.detach(), indices, converted, _width(dense))


def expand(dense: Tensor, indices: Tensor, values: Tensor, fill: float) -> None:
    """Fill ``dense``, then write the entries."""
    converted, filler = values.detach().to(dense.dtype), torch.tensor([fill], dtype=dense.dtype)
    _cpu.expand(dense.detach(), filler, indices, converted, _width(dense))


def add_saturated(dense: Tensor, indices: Tensor, values: Tensor) -> None:
    """Apply ``dense[i] += v`` in place, within the finite numbers."""
    _cpu.add_saturated(dense, indices, values)


def within(indices: Tensor, values: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """Walk through both lists in step, and keep what both have."""
    return _cpu.within(indices, values.detach(), others, _columns(values))


def without(indices: Tensor, values: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """Walk through both lists in step, and keep what only the first has."""
    return _cpu.without(indices, values.detach(), others, _columns(values))


def magnitude_histogram(x: Tensor, shift: int, bins: int, prefix: int | None = None) -> Tensor:
    """Count a field of the magnitudes' bits."""
    return _cpu.magnitude_histogram(x.detach(), shift, bins, prefix, torch.get_num_threads())


def quantize(
    x: Tensor, bits: int, bucket: int, seed: int, offset: int = 0
) -> tuple[Tensor, Tensor]:
    """Round each magnitude up or down to a level, at random, and pack the codes."""
    threads = torch.get_num_threads()
    return _cpu.quantize(x.detach(), bits, bucket, seed % 2**64, offset, threads)


def dequantize(packed: Tensor, scales: Tensor, size: int, bits: int, bucket: int) -> Tensor:
    """Turn codes back into float32 values."""
    return _cpu.dequantize(packed, scales, size, bits, bucket, torch.get_num_threads())


def check_indices(indices: Tensor, size: int) -> int:
    """Find the first index that is out of range or not above its predecessor."""
    return _cpu.check_indices(indices, size)


def pack_indices(indices: Tensor, size: int) -> Tensor:
    """Collect bits in registers, a word at a time."""
    return _cpu.pack_indices(to_dlpack(indices), size)


def unpack_indices(words: Tensor, count: int, size: int) -> Tensor | None:
    """Take the set bits out of the bitmap, a word at a time."""
    return _cpu.unpack_indices(to_dlpack(words), count, size)


def _width(dense: Tensor) -> int:
    columns = _columns(dense)
    return 1 if columns is None else columns


def _columns(values: Tensor) -> int | None:
    return values.shape[1] if values.dim() == 2 else None
