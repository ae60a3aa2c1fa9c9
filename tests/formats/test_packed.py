"""Packed messages: exact, never much longer than plain ones, and refused where they are corrupt."""

from __future__ import annotations

import re
from math import log2

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sparcel
from sparcel import SparseStream, formats, simulate
from sparcel.errors import FormatError, MismatchError
from sparcel.formats import COO, HEADER_BYTES, Header, Packed
from tests.kernels.test_packing import lists_of_indices
from tests.strategies import DTYPES, full, make_stream, same_stream, streams, values_at
from tests.strategies import ops as operations

PACKED = Packed()
VALUE_BYTES = st.sampled_from([0, 2, 4, 8, 12, 400])
SIZES = st.integers(0, 2**63 - 1) | st.integers(0, 3000)


def encode(stream):
    message, error = PACKED.encode(stream)
    assert error is None
    return message


@given(streams(), st.booleans())
def test_a_message_round_trips(stream, finite):
    stream.finite = finite
    message = encode(stream)
    nnz = None if stream.is_dense else stream.nnz
    assert message.numel() == PACKED.max_bytes(nnz, stream.size, stream.value_bytes)
    assert same_stream(formats.decode(message, like=stream), stream)


@given(lists_of_indices(), st.sampled_from(DTYPES), st.sampled_from([None, 0, 1, 3]), operations)
def test_any_indices_round_trip(case, dtype, width, op):
    indices, size = case
    values = values_at(indices % 1000, 1, dtype, op, width)
    stream = SparseStream(indices, values, size)
    message = encode(stream)
    assert same_stream(formats.decode(message), stream)
    assert message.numel() <= COO.encode(stream).message.numel() + 16


@pytest.mark.parametrize("special", [float("nan"), float("inf"), -0.0, 1e-45])
def test_values_travel_bit_for_bit(special):
    stream = SparseStream(torch.tensor([2]), torch.tensor([special]), 9)
    assert same_stream(formats.decode(encode(stream)), stream)


def test_dense_streams_travel_as_in_coo():
    stream = SparseStream(None, torch.arange(5.0), 5)
    assert torch.equal(encode(stream), COO.encode(stream).message)


@given(SIZES, st.data())
def test_indices_take_few_bits_more_than_their_entropy(size, data):
    """0.6 bits an index, and padding, beyond what sparse indices anywhere hold at least."""
    nnz = data.draw(st.integers(0, size))
    index_bits = 8 * (PACKED.max_bytes(nnz, size, 0) - HEADER_BYTES)
    entropy = nnz * (log2(size / nnz) + log2(2.718281828)) if nnz else 0
    widest = 64 if size >= 2**57 else 0  # the bitmap of few indices in such a vector
    assert index_bits <= entropy + 0.6 * nnz + 64 + widest + 1e-9 * entropy


@given(SIZES, VALUE_BYTES, st.data())
def test_no_message_is_much_longer_than_a_plain_one(size, value_bytes, data):
    nnz = data.draw(st.integers(0, size))
    most = PACKED.max_bytes(nnz, size, value_bytes)
    assert most <= COO.max_bytes(nnz, size, value_bytes) + 16
    fewer = data.draw(st.integers(0, nnz))
    assert PACKED.max_bytes(fewer, size, value_bytes) <= most


@given(SIZES, VALUE_BYTES)
def test_a_stream_turns_dense_where_that_takes_fewer_bytes(size, value_bytes):
    least, dense = PACKED.dense_from(size, value_bytes), PACKED.max_bytes(None, size, value_bytes)
    assert PACKED.max_bytes(least - 1, size, value_bytes) <= dense
    assert least > size or PACKED.max_bytes(least, size, value_bytes) > dense


@pytest.mark.parametrize(("value_bytes", "share"), [(2, 0.88), (4, 0.94)])
def test_packed_streams_turn_dense_late(value_bytes, share):
    assert PACKED.dense_from(10**6, value_bytes) == pytest.approx(share * 10**6, rel=0.01)


def test_packed_formats_are_equal_so_that_choices_are_cached():
    assert Packed() == Packed()
    assert hash(Packed()) == hash(Packed())


@given(streams())
def test_a_message_truncated_at_any_byte_is_refused(stream):
    message = encode(stream)
    for length in range(message.numel()):
        with pytest.raises(FormatError, match=r"shorter than a header|truncated"):
            formats.decode(message[:length])


@given(st.data(), lists_of_indices())
def test_overwritten_messages_are_refused_or_harmless(data, case):
    indices, size = case
    message = encode(SparseStream(indices, torch.arange(indices.numel()), size))
    for _ in range(data.draw(st.integers(1, 4))):
        message[data.draw(st.integers(0, message.numel() - 1))] = data.draw(st.integers(0, 255))
    try:
        stream = formats.decode(message)
    except FormatError:
        return
    assert stream.nnz == stream.values.shape[0] <= stream.size
    SparseStream(stream.indices, stream.values, stream.size)  # checks the indices


BASE = make_stream([1, 2, 5], 0, 40)


def forged(**changes):
    """Return a message of `BASE` whose header was changed, in a buffer with room after it."""
    message = encode(BASE)
    header = Header.parse(message)
    message = torch.cat((message, torch.zeros(1000, dtype=torch.uint8)))
    header._replace(**changes).pack_into(message)
    return message


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"nnz": 5}, "a packed message of 5 coordinates takes 72 bytes, its header says 64"),
        ({"length": 72}, "a packed message of 3 coordinates takes 64 bytes, its header says 72"),
        ({"dense": True, "size": 3}, "impossible packed header: dense=True"),
        ({"wide_indices": True}, "torch.int64 indices do not belong to a stream of size 40"),
        ({"size": 2**40}, "torch.int32 indices do not belong to a stream of size 1099511627776"),
        ({"size": 2**63 - 1, "nnz": 2**62, "wide_indices": True}, "its header says 64"),
    ],
)
def test_decode_says_what_is_wrong_with_a_message(changes, said):
    with pytest.raises(FormatError, match=re.escape(said)):
        formats.decode(forged(**changes))


def test_indices_out_of_range_or_order_are_refused():
    message = encode(BASE)  # three low bits an index, in a bitmap of 7 bits
    words = message[56:].view(torch.int64)
    assert int(words[0]) == 0b101_010_001_0000111
    words[0] = 0b111_010_001_1000011
    assert formats.decode(message).indices.tolist() == [1, 2, 39]
    words[0] = 0b101_010_010_0000111
    with pytest.raises(FormatError, match="index 2 at position 1 is out of order"):
        formats.decode(message)
    words[0] = 0b101_010_001_0000011
    with pytest.raises(FormatError, match="it does not hold 3 packed indices"):
        formats.decode(message)


def test_all_reduce_takes_a_format_by_name():
    given = [make_stream([rank, 20, 300], rank, 4000) for rank in range(4)]

    def on_rank(comm, format):
        total = sparcel.all_reduce(given[comm.rank], group=comm, format=format)
        return total, comm.traffic.bytes_sent

    plain, packed = (
        simulate(4, lambda comm, f=f: on_rank(comm, f)).results for f in ("coo", "packed")
    )
    for (one, more), (two, fewer) in zip(plain, packed, strict=True):
        assert torch.equal(full(one), full(two))
        assert fewer < more


def test_ranks_with_different_formats_are_told_so():
    def on_rank(comm):
        format = ("coo", "packed")[comm.rank]
        sparcel.all_reduce(BASE, "sum", "allgather", comm, format=format)

    with pytest.raises(MismatchError, match=r"format=Coo.*format=Packed\(\)"):
        simulate(2, on_rank)
