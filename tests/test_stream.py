"""Streams: construction, conversion, the switch δ, and every operation against plain torch."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import sparcel
from sparcel import SparseStream
from sparcel.core.ops import MAX, MIN, SUM
from sparcel.core.stream import concatenate, reduce
from sparcel.errors import InputError
from tests.strategies import (
    CIRCLE,
    DTYPES,
    FLOATS,
    dense_reference,
    dtypes,
    full,
    index_sets,
    make_stream,
    ops,
    parts_of,
    same_bits,
    same_stream,
    sizes,
    streams,
    values_at,
    widths,
)


@given(streams())
def test_properties_describe_the_stream(stream):
    rebuilt = SparseStream(stream.indices, stream.values, stream.size)
    assert same_stream(rebuilt, stream)
    assert rebuilt.nnz == rebuilt.values.shape[0]
    assert rebuilt.is_dense == (rebuilt.indices is None)
    assert rebuilt.density == (rebuilt.nnz / rebuilt.size if rebuilt.size else 0)
    assert rebuilt.dtype == rebuilt.values.dtype
    assert str(rebuilt.size) in repr(rebuilt)


@given(streams(dtype=st.sampled_from([torch.float16, torch.float32, torch.int64])), st.booleans())
def test_arrays_of_numpy_are_taken_as_tensors_are(stream, writeable):
    indices = None if stream.indices is None else stream.indices.numpy()
    values = stream.values.numpy().copy()
    values.flags.writeable = writeable
    made = SparseStream(indices, values, stream.size)
    assert same_stream(made, stream)
    assert np.shares_memory(np.asarray(made.values), values) == (writeable and values.size > 0)


def test_dense_arrays_are_taken_too():
    array = np.array([0.0, 3.0, 0.0, -4.0, 0.0, 0.0, 0.0, 0.0, 1.0])
    tensor = torch.from_numpy(array)
    assert same_stream(SparseStream.from_dense(array), SparseStream.from_dense(tensor))
    assert same_stream(sparcel.topk(array[::-1], 2), sparcel.topk(tensor.flip(0), 2))
    with pytest.raises(InputError, match="values must be of a dtype that torch has"):
        SparseStream(None, np.array(["a"]), 1)

    def summed(comm):
        own = array + comm.rank
        comm.all_reduce(own)
        with pytest.raises(InputError, match="contiguous and writeable"):
            comm.all_reduce(own[::2])
        return own

    for total in sparcel.simulate(3, summed).results:
        assert np.array_equal(total, 3 * array + 3)


@given(streams(), st.integers(-3, 3))
def test_to_dense_fills_absent_coordinates(stream, fill):
    dense = stream.to_dense(fill)
    assert dense.shape == (stream.size, *stream.values.shape[1:])
    if stream.indices is None:
        assert dense.data_ptr() == stream.values.data_ptr()
    else:
        absent = torch.ones(stream.size, dtype=torch.bool)
        absent[stream.indices.long()] = False
        assert torch.equal(dense[~absent], stream.values)
        assert bool((dense[absent] == fill).all())


@given(streams())
def test_from_dense_keeps_nonzeros_and_round_trips(stream):
    vector = full(stream)
    found = SparseStream.from_dense(vector)
    assert torch.equal(found.to_dense(), vector)
    occupied = vector.ne(0) if vector.ndim == 1 else vector.ne(0).any(dim=1)
    if found.indices is not None:
        assert torch.equal(found.indices.long(), occupied.nonzero().squeeze(1))
    else:
        assert found.values.data_ptr() == vector.data_ptr()


def test_explicit_zeros_stay_explicit():
    stream = SparseStream(torch.tensor([1, 4]), torch.tensor([0.0, 2.0]), 50)
    assert (stream + stream).nnz == 2
    assert reduce([stream, stream], "min").values.tolist() == [0.0, 2.0]
    assert stream.scale(3).nnz == 2
    assert stream.slice(0, 3).nnz == 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [None, 1, 3])
@pytest.mark.parametrize("size", [40, 64, 1000])
def test_a_sum_turns_dense_just_above_delta(dtype, width, size):
    """nnz entries cost nnz·(4 + v) bytes, the whole vector size·v."""
    value_bytes = dtype.itemsize * (width or 1)
    last_sparse = size * value_bytes // (4 + value_bytes)
    for nnz, is_dense in ((last_sparse, False), (last_sparse + 1, True)):
        stream = make_stream(range(nnz), 0, size, dtype, width=width)
        total = reduce([stream, stream])
        assert total.is_dense == is_dense
        assert stream.compact().is_dense == is_dense
        vector = torch.zeros(size, *([width] if width else []), dtype=dtype)
        vector[:nnz] = 1
        assert SparseStream.from_dense(vector).is_dense == is_dense


def test_the_switch_counts_merged_indices_not_the_sum_of_counts():
    stream = make_stream(range(20), 1, 64)
    assert not reduce([stream] * 5).is_dense


@given(streams(size=sizes, width=None), ops)
def test_compact_fills_with_the_neutral_element(stream, op):
    compact = stream.compact(op)
    assert torch.equal(full(compact, op), full(stream, op))
    if stream.is_dense:
        assert compact is stream


def test_indices_are_int64_only_if_the_size_needs_it():
    values = torch.ones(1)
    assert SparseStream(torch.tensor([3]), values, 2**31 - 1).indices.dtype == torch.int32
    assert SparseStream(torch.tensor([3]), values, 2**31).indices.dtype == torch.int64


def test_stream_beyond_32_bits_is_never_made_dense():
    size = 2**40
    far = SparseStream(torch.tensor([5, size - 1]), torch.tensor([1.0, 2.0]), size)
    near = SparseStream(torch.tensor([0, 5], dtype=torch.int32), torch.tensor([4.0, 8.0]), size)
    total = far + near
    assert total.indices.tolist() == [0, 5, size - 1]
    assert total.values.tolist() == [4.0, 9.0, 2.0]
    middle, tail = total.split([1, 2**33, size])
    assert (middle.indices.tolist(), middle.indices.dtype) == ([4], torch.int64)
    assert tail.indices.tolist() == [size - 1 - 2**33]
    small = total.slice(size - 10, size)
    assert (small.indices.tolist(), small.indices.dtype) == ([9], torch.int32)
    joined = concatenate(total.split([0, 2**33, size]))
    assert same_stream(joined, total)


ONE = torch.ones(1)


@pytest.mark.parametrize(
    ("indices", "values", "size", "message"),
    [
        ([3, 1], [1.0, 2.0], 9, r"strictly increasing, got 3 and then 1 at position 1"),
        ([1, 1], [1.0, 2.0], 9, r"strictly increasing, got 1 and then 1"),
        ([1, 9], [1.0, 2.0], 9, r"index 9 at position 1 is outside \[0, 9\)"),
        ([-1, 2], [1.0, 2.0], 9, r"index -1 at position 0 is outside \[0, 9\)"),
        ([1, 2], [1.0], 9, r"one per value: got shape \(2,\) for 1 values"),
        ([[1, 2]], [1.0, 2.0], 9, r"one-dimensional.* got shape \(1, 2\)"),
        ([], [], -1, r"size must lie in \[0, 9223372036854775807\], got -1"),
        ([1], [1.0], 2**63, r"size must lie in .*, got 9223372036854775808"),
        (None, [1.0, 2.0], 3, r"dense stream of size 3 needs 3 values, got 2"),
        (None, [[[1.0]]], 1, r"\[nnz, width\], got shape \(1, 1, 1\)"),
    ],
)
def test_errors_name_bad_indices_and_values(indices, values, size, message):
    indices = None if indices is None else torch.tensor(indices, dtype=torch.int64)
    with pytest.raises(InputError, match=message):
        SparseStream(indices, torch.tensor(values), size)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int16, torch.complex64], ids=str)
def test_unsupported_value_dtypes_are_refused(dtype):
    with pytest.raises(InputError, match=rf"float16, .*int64, got {dtype}"):
        SparseStream(torch.tensor([0]), torch.ones(1).to(dtype), 3)
    with pytest.raises(InputError, match="values must be one of"):
        SparseStream.from_dense(torch.ones(3).to(dtype))


def test_float_indices_are_refused():
    with pytest.raises(InputError, match=r"int32 or int64, got torch\.float32"):
        SparseStream(torch.tensor([0.0]), ONE, 3)


def test_from_dense_refuses_a_scalar():
    with pytest.raises(InputError, match=r"got shape \(\)"):
        SparseStream.from_dense(torch.tensor(1.0))


@given(st.lists(st.integers(-2, 12), max_size=8), st.integers(0, 10))
def test_exactly_sorted_unique_indices_in_range_are_accepted(indices, size):
    good = all(0 <= i < size for i in indices) and all(a < b for a, b in pairwise(indices))
    tensor, values = torch.tensor(indices, dtype=torch.int64), torch.ones(len(indices))
    if good:
        assert SparseStream(tensor, values, size).nnz == len(indices)
    else:
        with pytest.raises(InputError):
            SparseStream(tensor, values, size)


def test_strided_and_differentiable_tensors_are_accepted():
    values = torch.arange(12.0, requires_grad=True)
    strided = SparseStream(torch.arange(12)[::2], values[::2], 40)
    assert (strided + strided).values.tolist() == [0, 4, 8, 12, 16, 20]
    assert not (strided + strided).values.requires_grad
    columns = torch.arange(12.0).view(3, 4).t()
    assert torch.equal(
        (SparseStream.from_dense(columns) + SparseStream.from_dense(columns)).to_dense(),
        2 * columns,
    )
    assert sparcel.topk(values[::3], 2).indices.tolist() == [2, 3]
    assert not sparcel.topk(values, 2).values.requires_grad


@st.composite
def summands(draw, count=None):
    op, size, dtype, width = draw(ops), draw(sizes), draw(dtypes), draw(widths)
    drawn = [
        draw(streams(size, dtype, width, op, rank))
        for rank in range(count or draw(st.integers(1, 5)))
    ]
    return drawn, op


@given(summands())
def test_reduce_equals_the_dense_reference(case):
    drawn, op = case
    before = [parts_of(stream) for stream in drawn]
    total = reduce(drawn, op)
    assert torch.equal(full(total, op), dense_reference(drawn, op))
    assert total.dtype == drawn[0].dtype
    assert total.is_dense or total.nnz <= sum(stream.nnz for stream in drawn)
    for stream, (indices, values, _, _) in zip(drawn, before, strict=True):
        assert same_bits(stream.indices, indices)
        assert same_bits(stream.values, values)


@given(summands(count=2))
def test_plus_is_a_reduction_by_sum(case):
    (a, b), _ = case
    assert same_stream(a + b, reduce([a, b], "sum"))


def test_reduce_applies_the_operation_in_the_order_of_the_streams():
    """Sums are rounded after every step, so the order shows in float32."""
    sequence = [1e8, 1.0, -1e8, 1.0]
    streams_ = [SparseStream(torch.tensor([3]), torch.tensor([v]), 90) for v in sequence]
    assert reduce(streams_).values.tolist() == [1.0]
    assert reduce(streams_[::-1]).values.tolist() == [0.0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_summed_in_float32_and_rounded_once(dtype):
    """1 + ε + … + ε loses every ε if each partial sum is rounded."""
    epsilon = torch.finfo(dtype).eps / 4
    terms = [1.0] + [epsilon] * 8
    sparse = [SparseStream(torch.tensor([2]), torch.tensor([t], dtype=dtype), 90) for t in terms]
    dense = [SparseStream(None, torch.full((3,), t, dtype=dtype), 3) for t in terms]
    exact = torch.tensor([1 + 8 * epsilon], dtype=torch.float64).to(dtype)
    assert torch.equal(reduce(sparse).values, exact)
    assert torch.equal(reduce(dense).values, exact.expand(3))


@given(streams(), st.integers(0, 3))
def test_result_is_finite_only_if_all_streams_are(stream, voided):
    others = [make_stream([], 0, stream.size, stream.dtype, width=stream.width) for _ in range(3)]
    together = [stream, *others]
    together[voided].finite = False
    assert not reduce(together).finite
    assert not reduce(together[::-1]).finite
    cuts = sorted({0, stream.size // 2, stream.size})
    flagged = together[voided]
    parts = flagged.split(cuts)
    assert all(not part.finite for part in parts)
    if parts:
        assert not concatenate(parts).finite
    assert not flagged.scale(2).finite
    assert not flagged.compact().finite


@pytest.mark.parametrize(
    "other",
    [
        make_stream([1], 0, 11),
        make_stream([1], 0, 10, torch.float64),
        make_stream([1], 0, 10, width=2),
    ],
    ids=["size", "dtype", "width"],
)
def test_errors_name_streams_that_do_not_fit_together(other):
    with pytest.raises(InputError, match=r"agree in size, dtype and width.*size=10.*and"):
        reduce([make_stream([1], 0, 10), other])


def test_reduce_and_concatenate_refuse_no_streams():
    with pytest.raises(InputError, match="at least one stream"):
        reduce([])
    with pytest.raises(InputError, match="at least one stream"):
        concatenate([])


def test_an_unknown_operation_is_an_input_error():
    with pytest.raises(InputError, match="got 'avg'"):
        reduce([make_stream([1], 0, 10)] * 2, "avg")


@given(streams(), st.data())
def test_a_slice_is_the_dense_slice(stream, data):
    start = data.draw(st.integers(0, stream.size))
    stop = data.draw(st.integers(start, stream.size))
    part = stream.slice(start, stop)
    assert part.size == stop - start
    assert part.is_dense == stream.is_dense
    assert torch.equal(full(part), full(stream)[start:stop])


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (4, 3), (2, 11)])
def test_slice_out_of_range_is_refused(start, stop):
    with pytest.raises(InputError, match=rf"<= 10, got \[{start}, {stop}\)"):
        make_stream([1], 0, 10).slice(start, stop)


@given(streams(), ops, st.data())
def test_concatenate_inverts_split(stream, op, data):
    cuts = data.draw(st.lists(st.integers(0, stream.size), max_size=6))
    parts = stream.split([0, *sorted(cuts), stream.size])
    assert sum(part.size for part in parts) == stream.size
    joined = concatenate(parts, op)
    assert torch.equal(full(joined, op), full(stream, op))
    assert joined.size == stream.size


@given(st.data(), ops, dtypes, widths)
def test_concatenate_joins_sparse_and_dense_parts(data, op, dtype, width):
    parts = [
        data.draw(streams(st.integers(0, 20), dtype, width, op, rank))
        for rank in range(data.draw(st.integers(1, 4)))
    ]
    joined = concatenate(parts, op)
    assert torch.equal(full(joined, op), torch.cat([full(part, op) for part in parts]))


@given(streams(), st.sampled_from([-2, 0, 1, 3]))
def test_scale_multiplies_stored_values(stream, factor):
    scaled = stream.scale(factor)
    assert torch.equal(full(scaled), full(stream) * factor)
    assert (scaled.dtype, scaled.nnz) == (stream.dtype, stream.nnz)


@given(st.data(), st.sampled_from(FLOATS))
def test_topk_splits_a_stream_without_loss(data, dtype):
    stream = data.draw(streams(dtype=dtype, width=None, rank=data.draw(st.integers(0, 8))))
    k = data.draw(st.integers(0, 12))
    kept, rest = stream.topk(k)
    assert kept.nnz == min(k, int(stream.values.count_nonzero()))
    assert torch.equal(full(kept) + full(rest), full(stream))
    ranking = sorted(range(stream.size), key=lambda i: (-abs(float(full(stream)[i])), i))
    assert sorted(ranking[: kept.nnz]) == kept.indices.tolist()


@pytest.mark.parametrize(
    "stream", [make_stream([1], 0, 9, torch.int32), make_stream([1], 0, 9, width=2)], ids=str
)
def test_topk_of_a_stream_takes_scalar_floats(stream):
    with pytest.raises(InputError, match="scalar float"):
        stream.topk(1)


@given(st.data(), sizes)
def test_without_removes_the_other_streams_coordinates(data, size):
    a, b = (make_stream(data.draw(index_sets(size)), 0, size) for _ in range(2))
    assert a.without(b).indices.tolist() == sorted(
        set(a.indices.tolist()) - set(b.indices.tolist())
    )


@given(sizes, st.integers(1, 80), st.sampled_from(FLOATS), st.integers(0, 8))
def test_topk_selects_the_largest_magnitudes_lowest_index_first(size, k, dtype, rank):
    x = values_at(torch.arange(size), rank, dtype, SUM, None)
    chosen = sparcel.topk(x, k)
    ranking = sorted(range(size), key=lambda i: (-abs(float(x[i])), i))
    expected = sorted(ranking[: min(k, int(x.count_nonzero()))])
    assert chosen.indices.tolist() == expected
    assert torch.equal(chosen.values, x[expected])


@pytest.mark.parametrize(
    ("x", "k", "message"),
    [
        (torch.ones(4), 0, "k must be at least 1, got 0"),
        (torch.ones(2, 2), 1, r"one-dimensional float tensor, got torch.float32 of shape \(2, 2\)"),
        (torch.ones(4, dtype=torch.int32), 1, "float tensor, got torch.int32"),
    ],
)
def test_topk_refuses_bad_input(x, k, message):
    with pytest.raises(InputError, match=message):
        sparcel.topk(x, k)


@given(st.lists(st.sampled_from([MIN, MAX, CIRCLE]), min_size=1, max_size=1), sizes)
def test_reducing_one_stream_changes_nothing(chosen, size):
    stream = make_stream(range(0, size, 3), 2, size, op=chosen[0])
    assume(not stream.compact().is_dense)
    assert same_stream(reduce([stream], chosen[0]), stream)
