"""Reduction of many streams, and writing of entries into dense vectors."""

import threading
from contextlib import suppress
from functools import reduce as fold

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

from sparcel.core import kernels
from sparcel.core.kernels.definitions import reduce as reference
from sparcel.core.ops import MAX, MIN, PRODUCT, SUM, Op
from sparcel.errors import InputError
from tests.kernels.paths import using
from tests.strategies import CIRCLE, DTYPES, same_bits

BUILT_IN = (SUM, PRODUCT, MIN, MAX)
Pair = tuple[Tensor, Tensor]


def random_streams(
    count: int,
    most: int,
    size: int,
    dtype: torch.dtype,
    width: int | None = None,
    seed: int = 0,
) -> list[Pair]:
    """Make streams whose sums depend on their order; values are not small integers."""
    generator = torch.Generator().manual_seed(seed)
    streams = []
    for _ in range(count):
        nnz = int(torch.randint(0, most + 1, (), generator=generator))
        indices = torch.randint(0, size, (nnz,), generator=generator).unique()
        shape = (indices.numel(),) if width is None else (indices.numel(), width)
        values = torch.randn(shape, generator=generator) * 100
        streams.append((indices.to(kernels.index_dtype(size)), values.to(dtype)))
    return streams


@st.composite
def stream_lists(draw: st.DrawFn) -> list[Pair]:
    """Draw streams over index spaces from crowded to nearly empty."""
    return random_streams(
        draw(st.integers(1, 20)),
        draw(st.sampled_from([0, 1, 5, 200])),
        draw(st.sampled_from([1, 10, 64, 1000, 2**17 + 1, 10**6, 2**31 - 1, 2**40])),
        draw(st.sampled_from(DTYPES)),
        draw(st.sampled_from([None, None, 1, 3])),
        draw(st.integers(0, 99)),
    )


@given(stream_lists(), st.sampled_from(BUILT_IN))
def test_merge_is_the_reference(streams: list[Pair], op: Op) -> None:
    before = [(indices.clone(), values.clone()) for indices, values in streams]
    merged, expected = kernels.merge(streams, op), reference.merge(streams, op)
    assert same_bits(merged[0], expected[0])
    assert same_bits(merged[1], expected[1])
    for (indices, values), (old_indices, old_values) in zip(streams, before, strict=True):
        assert same_bits(indices, old_indices)
        assert same_bits(values, old_values)


@given(stream_lists(), st.sampled_from([*BUILT_IN, CIRCLE]))
def test_reference_folds_from_left_to_right(streams: list[Pair], op: Op) -> None:
    contributions: dict[int, list[Tensor]] = {}
    for indices, values in streams:
        for index, value in zip(indices.tolist(), values, strict=True):
            contributions.setdefault(index, []).append(reference.widen(value))
    dtype = streams[0][1].dtype
    indices, values = reference.merge(streams, op)
    assert indices.tolist() == sorted(contributions)
    for index, value in zip(indices.tolist(), values, strict=True):
        assert same_bits(value, fold(op.function, contributions[index]).to(dtype))


@pytest.mark.parametrize("count", [1, 2, 3, 64, 1024])
def test_many_entries(count: int) -> None:
    # Small index spaces fill the windows, large ones leave most windows empty.
    for size in (60_000, 2_000_000, 2**31 - 1):
        streams = random_streams(count, 1_600_000 // count, size, torch.float32)
        expected = reference.merge(streams, SUM)
        for threads in (1, 3):
            with using("portable", threads):
                merged = kernels.merge(streams, SUM)
            assert same_bits(merged[0], expected[0])
            assert same_bits(merged[1], expected[1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("count", [2, 5])
def test_every_half_survives_conversion_to_float32_and_back(dtype: torch.dtype, count: int) -> None:
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    every = every[~every.isnan()]  # the payload of NaN is not guaranteed
    index = torch.arange(every.numel(), dtype=torch.int32)
    others = [(index[:0], every[:0])] * (count - 1)
    merged = kernels.merge([(index, every), *others], SUM)
    assert same_bits(merged[1], every)
    # Sums of all kinds of halves are rounded as in torch.
    streams = [(index, every.roll(17 * shift)) for shift in range(count)]
    kept = ~reference.merge(streams, SUM)[1].isnan()
    assert same_bits(kernels.merge(streams, SUM)[1][kept], reference.merge(streams, SUM)[1][kept])


def test_halves_are_rounded_once() -> None:
    index = torch.zeros(1, dtype=torch.int32)
    # 2048 + 1 + 1 in float16: rounding after each step would stay at 2048.
    streams = [(index, torch.tensor([v], dtype=torch.float16)) for v in (2048, 1, 1)]
    assert kernels.merge(streams, SUM)[1].item() == 2050


@pytest.mark.parametrize("op", [MIN, MAX])
def test_nan_wins_every_comparison(op: Op) -> None:
    index = torch.zeros(1, dtype=torch.int32)
    for values in ((1.0, torch.nan), (torch.nan, 1.0), (2.0, torch.nan, 1.0)):
        streams = [(index, torch.tensor([value])) for value in values]
        assert kernels.merge(streams, op)[1].isnan().all()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("op", [SUM, PRODUCT])
def test_integers_wrap(dtype: torch.dtype, op: Op) -> None:
    most = torch.tensor([torch.iinfo(dtype).max], dtype=dtype)
    index = torch.zeros(1, dtype=torch.int32)
    assert torch.equal(
        kernels.merge([(index, most)] * 3, op)[1], reference.merge([(index, most)] * 3, op)[1]
    )


def test_streams_must_agree() -> None:
    index = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(InputError, match="at least one stream"):
        kernels.merge([], SUM)
    with pytest.raises(ValueError, match="same dtypes"):
        kernels.merge([(index, torch.ones(1)), (index, torch.ones(1).double())], SUM)
    with pytest.raises(ValueError, match="one value"):
        kernels.merge([(index, torch.ones(2))], SUM)


@given(stream_lists(), st.sampled_from([*BUILT_IN, CIRCLE]), st.integers(0, 99))
def test_scatter_reduce_is_the_reference(streams: list[Pair], op: Op, seed: int) -> None:
    indices, values = streams[0]
    if indices.numel() and indices[-1] > 10**6:
        indices = indices % 10**6
        indices, values = indices.unique(), values[: indices.unique().numel()]
    size = int(indices.max()) + 1 if indices.numel() else 1
    generator = torch.Generator().manual_seed(seed)
    dense = (torch.randn((size, *values.shape[1:]), generator=generator) * 10).to(values.dtype)
    expected = dense.clone()
    kernels.scatter_reduce(dense, indices, values, op)
    reference.scatter_reduce(expected, indices, values, op)
    assert same_bits(dense, expected)


@given(st.sampled_from(DTYPES), st.sampled_from(DTYPES))
def test_scatter_is_the_reference(dense: torch.dtype, given: torch.dtype) -> None:
    indices = torch.tensor([0, 3, 4, 9], dtype=torch.int32)
    values = torch.tensor([1.5, -2.25, 100.0, 7.0]).to(given)
    vectors = torch.ones(10, dtype=dense), torch.ones(10, dtype=dense)
    kernels.scatter(vectors[0], indices, values)
    reference.scatter(vectors[1], indices, values)
    assert same_bits(*vectors)


def test_scatter_refuses_wrong_arguments() -> None:
    for bad in (4, -1):
        for kernel in (kernels.scatter, kernels.expand, kernels.add_saturated):
            with pytest.raises(IndexError):
                kernel(torch.zeros(4), torch.tensor([bad]), torch.ones(1))


@pytest.mark.parametrize("width", [None, 2])
def test_indices_that_change_meanwhile_write_nowhere_else(width: int | None) -> None:
    """Another thread makes them point behind the vector, where a guard shows what was written."""
    size, columns = 200_000, () if width is None else (width,)
    indices = torch.arange(size, dtype=torch.int32)
    good, values = indices.clone(), torch.ones(size, *columns)
    memory = torch.zeros(2 * size, *columns)
    vector, guard = memory[:size], memory[size:]
    done = threading.Event()

    def change() -> None:
        while not done.is_set():
            indices.add_(size)
            indices.copy_(good)

    changing = threading.Thread(target=change)
    changing.start()
    try:
        for _ in range(100):
            for kernel in (kernels.scatter, kernels.expand):
                with suppress(IndexError):
                    kernel(vector, indices, values)
            assert not guard.any()
    finally:
        done.set()
        changing.join()


@given(
    st.sampled_from(DTYPES),
    st.sampled_from([0, 1]),
    st.sampled_from([None, 0, 3]),
    st.sampled_from([torch.int32, torch.int64]),
)
def test_expand_is_the_reference(
    dtype: torch.dtype, fill: int, width: int | None, index: torch.dtype
) -> None:
    indices = torch.tensor([0, 3, 4, 9], dtype=index)
    columns = () if width is None else (width,)
    values = torch.ones(4, *columns).cumsum(0)
    vectors = [torch.full((10, *columns), 77, dtype=dtype) for _ in range(2)]
    kernels.expand(vectors[0], indices, values, fill)
    reference.expand(vectors[1], indices, values, fill)
    assert same_bits(*vectors)


@given(
    st.lists(st.sampled_from([0.0, 1.0, -2.5, 3e38, -3e38]), min_size=4, max_size=4),
    st.sampled_from([torch.float32, torch.float64]),
    st.sampled_from([torch.int32, torch.int64]),
)
def test_sums_saturate_as_in_the_reference(
    values: list[float], dtype: torch.dtype, index: torch.dtype
) -> None:
    indices = torch.tensor([0, 3, 4, 9], dtype=index)
    largest = torch.finfo(dtype).max
    vectors = [torch.tensor([largest, 1, -largest, 2, 0] * 2, dtype=dtype) for _ in range(2)]
    added = torch.tensor(values, dtype=torch.float64) * (largest / torch.finfo(torch.float32).max)
    kernels.add_saturated(vectors[0], indices, added.to(dtype))
    reference.add_saturated(vectors[1], indices, added.to(dtype))
    assert same_bits(*vectors)
    assert vectors[0].isfinite().all()


@given(st.lists(st.integers(-2, 12), max_size=8), st.sampled_from([torch.int32, torch.int64]))
def test_check_indices_finds_the_first_wrong_one(listed: list[int], dtype: torch.dtype) -> None:
    size = 10
    previous, expected = -1, -1
    for position, index in enumerate(listed):
        if not previous < index < size:
            expected = position
            break
        previous = index
    assert kernels.check_indices(torch.tensor(listed, dtype=dtype), size) == expected


@pytest.mark.parametrize("position", [0, 1, 1022, 1023, 1024, 1025, 2048, 4999])
def test_check_indices_checks_every_position(position: int) -> None:
    indices = torch.arange(5000, dtype=torch.int32) * 2
    assert kernels.check_indices(indices, 9999) == -1
    assert kernels.check_indices(indices, 9998) == 4999
    for wrong in (-1, 10**6, int(indices[position - 1]) if position else -5):
        changed = indices.clone()
        changed[position] = wrong
        found = kernels.check_indices(changed, 9999)
        assert found == reference.check_indices(changed, 9999)
        assert found == position
