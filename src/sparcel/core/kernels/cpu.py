"""The compiled kernels for CPU tensors; `sparcel.core.kernels.definitions` describes them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.dlpack import to_dlpack  # type: ignore[attr-defined]  # it is documented

from sparcel import _cpu
from sparcel.core.kernels.definitions import few_bits, optim, packing, reduce, regions
from sparcel.core.kernels.definitions.select import Addition, index_dtype
from sparcel.core.kernels.regions import Leg
from sparcel.core.ops import Op


def topk(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    return _cpu.topk(x.detach(), k, 0, torch.get_num_threads())


def topk_chunked(x: Tensor, k: int, chunk: int) -> tuple[Tensor, Tensor]:
    return _cpu.topk(x.detach(), k, chunk, torch.get_num_threads())


def accumulate_topk(
    addition: Addition, k: int, chunk: int | None = None
) -> tuple[Tensor, Tensor, bool]:
    it = addition
    summed = it.memory, it.gradient.detach(), it.scratch, it.scale, it.momentum, it.velocity
    threads = torch.get_num_threads()
    return _cpu.accumulate_topk(*summed, it.entering, it.clear, k, chunk or 0, threads)


def threshold_select(x: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    # torch rounds the threshold to the vector's dtype.
    limit = torch.tensor([threshold], dtype=x.dtype, device="cpu")
    return _cpu.threshold_select(x.detach(), limit, torch.get_num_threads())


def sums_of_squares(vectors: Sequence[Tensor]) -> Tensor:
    given = [to_dlpack(one.detach() if one.requires_grad else one) for one in vectors]
    return _cpu.sums_of_squares(given, optim.CHUNK, torch.get_num_threads())


def merge(streams: Sequence[tuple[Tensor, Tensor]], op: Op) -> tuple[Tensor, Tensor]:
    if op.name is None:
        return reduce.merge(streams, op)
    indices = [indices for indices, _ in streams]
    values = [values.detach() for _, values in streams]
    return _cpu.merge(indices, values, _columns(values[0]), op.name, torch.get_num_threads())


def merge_messages(
    messages: Sequence[Sequence[Tensor]], size: int, dtype: int, op: Op
) -> tuple[Tensor, Tensor, bool] | None:
    assert op.name is not None, "only torch computes the others"
    arrays = [[to_dlpack(part) for part in message] for message in messages]
    return _cpu.merge_messages(arrays, size, dtype, op.name, torch.get_num_threads())


def scatter_reduce(dense: Tensor, indices: Tensor, values: Tensor, op: Op) -> None:
    if op.name is None:
        reduce.scatter_reduce(dense, indices, values, op)
    else:
        converted = values.detach().to(dense.dtype)
        _cpu.scatter_reduce(dense.detach(), indices, converted, _width(dense), op.name)


def scatter(dense: Tensor, indices: Tensor, values: Tensor) -> None:
    converted = values.detach().to(dense.dtype)
    _cpu.scatter(dense.detach(), indices, converted, _width(dense))


def expand(dense: Tensor, indices: Tensor, values: Tensor, fill: float = 0) -> None:
    converted = values.detach().to(dense.dtype)
    filler = torch.tensor([fill], dtype=dense.dtype, device="cpu")
    _cpu.expand(dense.detach(), filler, indices, converted, _width(dense))


def check_indices(indices: Tensor, size: int) -> int:
    return _cpu.check_indices(to_dlpack(indices), size)


def indices_fault(indices: Tensor, size: int) -> bool:
    return check_indices(indices, size) >= 0


def saturate(dense: Tensor) -> None:
    if not math.isfinite(dense.sum().item()):  # mostly, reading is enough
        reduce.saturate(dense)


def within(indices: Tensor, values: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    return _cpu.within(indices, values.detach(), others, _columns(values))


def without(
    indices: Tensor, values: Tensor, others: Tensor, left: int | None = None
) -> tuple[Tensor, Tensor]:
    return _cpu.without(indices, values.detach(), others, _columns(values))


def magnitude_histogram(x: Tensor, shift: int, bins: int, prefix: int | None = None) -> Tensor:
    return _cpu.magnitude_histogram(x.detach(), shift, bins, prefix, torch.get_num_threads())


def magnitude_ends(x: Tensor) -> Tensor:
    return _cpu.magnitude_ends(x.detach(), torch.get_num_threads())


def bracket(x: Tensor, thresholds: Tensor, k: int) -> Tensor:
    return _cpu.bracket(x.detach(), thresholds, k, torch.get_num_threads())


def limited(x: Tensor, dtype: torch.dtype) -> Tensor:
    if x.dtype != torch.float32 or dtype not in (torch.float16, torch.bfloat16):
        return few_bits.limited(x, dtype)
    return _cpu.limited(to_dlpack(x), dtype == torch.bfloat16, torch.get_num_threads())


def quantize(
    x: Tensor,
    bits: int,
    block: int,
    seed: int | None = None,
    offset: int = 0,
    scale: torch.dtype = torch.bfloat16,
) -> few_bits.Quantized:
    key = None if seed is None else seed % 2**64
    narrow, threads = scale == torch.bfloat16, torch.get_num_threads()
    wide = limited(x.detach(), torch.float32)
    codes, scales, values = _cpu.quantize(
        to_dlpack(wide), bits, block, key, offset, narrow, threads
    )
    return few_bits.Quantized(codes, scales, limited(values, x.dtype))


def dequantize(codes: Tensor, scales: Tensor, size: int, bits: int, block: int) -> Tensor:
    threads = torch.get_num_threads()
    return _cpu.dequantize(to_dlpack(codes), to_dlpack(scales), size, bits, block, threads)


def join_message(
    parts: Sequence[Tensor], header: bytes, finite: Tensor | None = None, void: int = 0
) -> tuple[Tensor, ...]:
    if finite is not None:
        return packing.join_message(parts, header, finite, void)
    return (_cpu.join_message(header, [to_dlpack(part) for part in parts]),)


def pack_indices(indices: Tensor, size: int) -> Tensor:
    return _cpu.pack_indices(to_dlpack(indices), size)


def unpack_indices(words: Tensor, count: int, size: int) -> tuple[Tensor, bool]:
    indices = _cpu.unpack_indices(to_dlpack(words), count, size)
    if indices is None:
        return words.new_zeros(count, dtype=index_dtype(size)), True
    return indices, indices_fault(indices, size)


def enter(addition: Addition, up: Leg, rank: int, step: int) -> regions.Entered:
    it = addition
    wide = it.gradient.dtype == torch.float64
    if not up.group or wide or it.entering is not None or it.clear:
        return regions.enter(addition, up, rank, step)
    summed = it.memory, it.gradient, it.scratch, it.scale
    owned = rank, up.regions.ranks, up.regions.block, up.shares
    kind, threads = (up.dense, up.bits, up.group), torch.get_num_threads()
    made = _cpu.enter(*summed, *owned, up.most, *kind, step, up.headers, threads)
    return regions.Entered(*made)


def collect(
    addition: Addition,
    arrived: Sequence[Tensor] | Tensor,
    up: Leg,
    down: Leg,
    rank: int,
    step: int,
) -> regions.Collected:
    if not (up.group and down.group) or addition.entering is not None:
        return regions.collect(addition, arrived, up, down, rank, step)
    came = addition.scratch, arrived, up.headers[rank], (up.bits, up.group)
    owned = rank, down.regions.ranks, down.regions.block, down.shares
    kind, threads = (down.dense, down.bits, down.group), torch.get_num_threads()
    made = _cpu.collect(*came, *owned, down.most[rank], *kind, step, down.headers[rank], threads)
    return regions.Collected(*made)


def deliver(
    out: Tensor, returned: Sequence[Tensor] | Tensor, down: Leg, divisor: float
) -> regions.Delivered:
    if not down.group or out.dtype == torch.float64:
        return regions.deliver(out, returned, down, divisor)
    threads = torch.get_num_threads()
    made = _cpu.deliver(
        returned, down.headers, down.regions.block, down.bits, down.group, divisor, out, threads
    )
    return regions.Delivered(*made)


def moved(tensors: Sequence[Tensor], moves: Sequence[optim.Along | optim.AsAdam]) -> list[Tensor]:
    jobs = [_job(one, move) for one, move in zip(tensors, moves, strict=True)]
    given = [job.given for job in jobs if job is not None]
    made = iter(_cpu.moved(given, torch.get_num_threads()))
    return [
        optim.moved([one], [move])[0] if job is None else job.arranged(next(made))
        for job, one, move in zip(jobs, tensors, moves, strict=True)
    ]


class _Job(NamedTuple):
    """A tensor to move: what the pass takes, and how its dimensions lie in memory."""

    given: tuple[Any, ...]
    shape: torch.Size
    order: list[int] | None

    def arranged(self, flat: Tensor) -> Tensor:
        """Return the result of the pass in the shape and the order of the tensor."""
        values = flat.view(self.shape)
        if self.order is None:
            return values
        return values.permute(sorted(range(len(self.order)), key=self.order.__getitem__))


def _job(tensor: Tensor, move: optim.Along | optim.AsAdam) -> _Job | None:
    """Return what the pass takes, None unless all are of float32 and fill memory in one order."""
    scale = None if isinstance(move, optim.Along) else move.scale
    parts = [tensor, move.direction if isinstance(move, optim.Along) else move.gradient]
    if scale is not None:
        parts += [scale.squares] if scale.largest is None else [scale.squares, scale.largest]
    if any(one.dtype != torch.float32 or type(one) not in (Tensor, nn.Parameter) for one in parts):
        return None
    parts, order = [one.detach() if one.requires_grad else one for one in parts], None
    if not all(one.is_contiguous() for one in parts):
        order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
        parts = [one.permute(order) for one in parts]
        if not all(one.is_contiguous() for one in parts):
            return None
    values, direction, *squares = map(to_dlpack, parts)
    scaled = None
    if scale is not None:
        largest = squares[1] if scale.largest is not None else None
        scaled = squares[0], largest, scale.beta, 1 - scale.beta, 1 / scale.bias, scale.eps
    return _Job((values, direction, move.rate, scaled), parts[0].shape, order)


def _width(dense: Tensor) -> int:
    return dense.shape[1] if dense.dim() == 2 else 1


def _columns(values: Tensor) -> int | None:
    return values.shape[1] if values.dim() == 2 else None
