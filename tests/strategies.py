"""Hypothesis strategies and the dense reference that all tests share.

Values are small integers that depend on rank and index, so any order of summation is exact in
every dtype (totals up to 256, bfloat16's limit) and a misrouted message changes the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce as fold

import torch
from hypothesis import strategies as st
from torch import Tensor

from sparcel import Op, SparseStream
from sparcel.core.ops import MAX, MIN, PRODUCT, SUM

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
DTYPES = (*FLOATS, torch.int32, torch.int64)


def circle(a: Tensor, b: Tensor) -> Tensor:
    """Return (1 + a)(1 + b) − 1: associative, commutative, and like no built-in operation."""
    return a + b + a * b


CIRCLE = Op(circle, 0)
OPS = {"sum": SUM, "product": PRODUCT, "min": MIN, "max": MAX, "circle": CIRCLE}

LAYOUTS = (
    *("random", "uneven", "empty", "identical", "disjoint", "skewed", "crowded", "dense"),
    "one rank",
)

worlds = st.integers(1, 17)
sizes = st.integers(0, 70)
dtypes = st.sampled_from(DTYPES)
floats = st.sampled_from(FLOATS)
widths = st.sampled_from([None, None, 1, 3])
ops = st.sampled_from(list(OPS.values()))
layouts = st.sampled_from(LAYOUTS)


def values_at(indices: Tensor, rank: int, dtype: torch.dtype, op: Op, width: int | None) -> Tensor:
    """Return a rank's values at ``indices``, scalars or rows, on which ``op`` is exact."""
    mixed = 3 * indices.long() + 7 * rank + indices.long() * rank
    if width is not None:
        mixed = mixed[:, None] + 5 * torch.arange(width)
    if op in (PRODUCT, CIRCLE):
        # Factors are ±1, and 2 on every fourth rank, which bounds the product by 32.
        factors = torch.where(mixed % 3 == 0, -1, 1)
        if rank % 4 == 0:
            factors = torch.where(mixed % 5 == 0, 2, factors)
        return (factors - 1 if op == CIRCLE else factors).to(dtype)
    return (mixed % 9 - 4).to(dtype)


def make_stream(
    indices: Sequence[int] | Tensor,
    rank: int,
    size: int,
    dtype: torch.dtype = torch.float32,
    op: Op = SUM,
    width: int | None = None,
) -> SparseStream:
    """Return a sparse stream at ``indices`` with this rank's values."""
    indices = torch.as_tensor(indices, dtype=torch.int64)
    return SparseStream(indices, values_at(indices, rank, dtype, op, width), size)


@st.composite
def index_sets(draw: st.DrawFn, size: int, at_most: int | None = None) -> list[int]:
    """Draw sorted, unique indices below ``size``."""
    most = size if at_most is None else min(size, at_most)
    chosen = draw(st.sets(st.integers(0, max(size - 1, 0)), max_size=most))
    return sorted(chosen) if size else []


@st.composite
def streams(
    draw: st.DrawFn,
    size: st.SearchStrategy[int] | int = sizes,
    dtype: st.SearchStrategy[torch.dtype] | torch.dtype = dtypes,
    width: st.SearchStrategy[int | None] | int | None = widths,
    op: Op = SUM,
    rank: int = 0,
) -> SparseStream:
    """Draw a stream, sparse or dense."""
    size = draw(size) if isinstance(size, st.SearchStrategy) else size
    dtype = draw(dtype) if isinstance(dtype, st.SearchStrategy) else dtype
    width = draw(width) if isinstance(width, st.SearchStrategy) else width
    stream = make_stream(draw(index_sets(size)), rank, size, dtype, op, width)
    if draw(st.booleans()):
        return stream
    return SparseStream(None, stream.to_dense(op.neutral_for(dtype)), size)


@dataclass(frozen=True)
class Case:
    """The inputs of a collective: ``streams`` by rank."""

    size: int
    op: Op
    layout: str
    streams: list[SparseStream]

    @property
    def world(self) -> int:
        """The number of ranks."""
        return len(self.streams)

    @property
    def max_nnz(self) -> int:
        """The most entries of any rank."""
        return max(stream.nnz for stream in self.streams)


def case_of(
    layout: str,
    world: int,
    size: int,
    dtype: torch.dtype = torch.float32,
    op: Op = SUM,
    width: int | None = None,
    count: int | None = None,
    seed: int = 0,
) -> Case:
    """Return a case with about ``count`` indices a rank, arranged by ``layout``.

    How many are "crowded" depends on the size alone.
    """
    generator = torch.Generator().manual_seed(seed)
    count = min(size, max(1, size // 8) if count is None else count)

    def picked(how_many: int) -> Tensor:
        return torch.randperm(size, generator=generator)[:how_many].sort().values

    def indices_of(rank: int) -> Tensor:
        match layout:
            case "empty":
                return picked(0)
            case "identical":
                return torch.arange(count) * size // max(count, 1)
            case "disjoint":
                return torch.arange(size)[rank::world][:count]
            case "skewed":
                return torch.arange(size)[-max(1, size // world) :][:count]
            case "crowded":  # most of one region, so that it is smaller dense and the rest is not
                region = torch.arange(size)[-max(1, size // world) :]
                return region[(region + rank // 2) % 4 > 0]
            case "uneven":
                return picked(min(size, rank * count // 2))
            case "one rank":
                return picked(count if rank == world // 2 else 0)
            case _:
                return picked(count)

    streams = [make_stream(indices_of(r), r, size, dtype, op, width) for r in range(world)]
    if layout == "dense":
        # Every other rank is dense, so that dense and sparse streams are mixed.
        fill = op.neutral_for(dtype)
        streams[::2] = [SparseStream(None, s.to_dense(fill), size) for s in streams[::2]]
    return Case(size, op, layout, streams)


@st.composite
def cases(draw: st.DrawFn, world: st.SearchStrategy[int] = worlds) -> Case:
    """Draw the inputs of a collective."""
    size = draw(sizes)
    return case_of(
        draw(layouts),
        draw(world),
        size,
        draw(dtypes),
        draw(ops),
        draw(widths),
        draw(st.none() | st.integers(0, size)),
        draw(st.integers(0, 99)),
    )


def stored_by(streams: Sequence[SparseStream]) -> Tensor:
    """Return the sorted coordinates that some stream stores."""
    everything = torch.arange(streams[0].size)
    return torch.cat([everything if s.is_dense else s.indices.long() for s in streams]).unique()


def check_stored(result: SparseStream, stored: Tensor, dense_from: int) -> None:
    """Check that a result is dense if there are so many ``stored`` coordinates, or has these."""
    assert result.is_dense == (stored.numel() >= dense_from)
    assert result.is_dense or torch.equal(result.indices.long(), stored)


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which a reference is computed."""
    return torch.float64 if dtype.is_floating_point else torch.int64


def dense_reference(streams: Sequence[SparseStream], op: Op) -> Tensor:
    """Reduce the streams as dense vectors, in float64 or int64, and round to their dtype."""
    dtype = streams[0].dtype
    vectors = [full(stream, op).to(wide(dtype)) for stream in streams]
    return fold(op.function, vectors).to(dtype)


def full(stream: SparseStream, op: Op = SUM) -> Tensor:
    """Return the stream's vector in plain torch, absent coordinates neutral."""
    if stream.indices is None:
        return stream.values
    fill = op.neutral_for(stream.dtype)
    vector = torch.full((stream.size, *stream.values.shape[1:]), fill, dtype=stream.dtype)
    vector[stream.indices.long()] = stream.values
    return vector


def parts_of(stream: SparseStream) -> tuple[Tensor | None, Tensor, int, bool]:
    """Return copies of a stream's tensors and fields, to compare with later."""
    indices = None if stream.indices is None else stream.indices.clone()
    return indices, stream.values.clone(), stream.size, stream.finite


def same_bits(a: Tensor | None, b: Tensor | None) -> bool:
    """Tell whether two tensors hold the same bits, NaN and the sign of zeros included."""
    if a is None or b is None:
        return a is b
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    return torch.equal(_bytes(a), _bytes(b))


def _bytes(tensor: Tensor) -> Tensor:
    # Copy, because a tensor of at most one element may have strides that `view` refuses.
    packed = torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.reshape(-1))
    return packed.view(torch.uint8)


def same_stream(a: SparseStream, b: SparseStream) -> bool:
    """Tell whether two streams are bit-identical."""
    return (
        (a.size, a.finite) == (b.size, b.finite)
        and same_bits(a.indices, b.indices)
        and same_bits(a.values, b.values)
    )
