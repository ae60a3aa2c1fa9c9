"""`merge_messages` equals decoding and reducing, and refuses unreadable messages."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from sparcel import SparseStream
from sparcel.core import formats
from sparcel.core.formats import RAW, Format, merge_messages
from sparcel.core.formats.message import HEADER_BYTES
from sparcel.core.ops import SUM
from sparcel.core.stream import reduce
from sparcel.errors import SparcelError
from tests.strategies import DTYPES, OPS, index_sets, make_stream, same_stream

NAMED = [op for name, op in OPS.items() if name != "circle"]


@st.composite
def alike(draw):
    """Draw an operation, and sparse streams that it can reduce."""
    size, dtype, op = draw(st.integers(1, 300)), draw(st.sampled_from(DTYPES)), None
    op = draw(st.sampled_from(NAMED))
    count = draw(st.integers(2, 9))
    streams = [make_stream(draw(index_sets(size)), rank, size, dtype, op) for rank in range(count)]
    for stream in streams:
        stream.finite = draw(st.sampled_from([True, True, True, False]))
    return op, streams


def encoded(streams):
    return [RAW.encode(stream).message for stream in streams]


@given(alike(), st.booleans())
def test_merging_messages_equals_decoding_and_reducing(case, apart):
    op, streams = case
    messages = encoded(streams)
    if apart:  # as headers and payloads
        messages = formats.cut(formats.joined(messages), len(messages))
    total = merge_messages(messages, streams[0], op)
    assert total is not None
    expected = reduce([formats.decode(message) for message in messages], op)
    assert total.finite == expected.finite
    assert same_stream(total.compact(op), expected)


@given(alike(), st.booleans(), st.integers(0, 10**6), st.integers(1, 255))
def test_a_corrupt_message_is_refused_or_harmless(case, apart, position, flip):
    """A wrong byte never causes a read out of bounds; decoding says what is wrong."""
    op, streams = case
    *messages, (last,) = encoded(streams)
    last = last.clone()
    last[position % last.numel()] ^= flip
    corrupt = [last[:HEADER_BYTES], last[HEADER_BYTES:]] if apart else [last]
    total = merge_messages([*messages, corrupt], streams[0], op)
    try:
        decoded = formats.decode(corrupt, streams[0])
    except SparcelError:
        assert total is None
        return
    if total is not None:
        assert not decoded.is_dense
        assert total.size == streams[0].size


@given(alike(), st.sampled_from([8, 12]), st.integers(1, 255))
def test_a_message_of_rows_or_of_another_format_is_refused(case, field, number):
    """The header's width or detail tells that the message is of another kind."""
    op, streams = case
    messages = encoded(streams)
    messages[0][0][field] = number
    assert merge_messages(messages, streams[0], op) is None


@given(alike(), st.integers(1, 20))
def test_message_followed_by_more_bytes_is_refused(case, count):
    op, streams = case
    (message,), *others = encoded(streams)
    longer = torch.cat((message, torch.zeros(count, dtype=torch.uint8)))
    assert merge_messages([[longer], *others], streams[0], op) is None


@given(alike(), st.data())
def test_a_truncated_message_is_refused(case, data):
    op, streams = case
    (message,), *others = encoded(streams)
    short = message[: data.draw(st.integers(0, message.numel() - 1))].clone()
    for parts in ([short], [short[:HEADER_BYTES], short[HEADER_BYTES:]], [], [short] * 3):
        assert merge_messages([*others, parts], streams[0], op) is None


def test_messages_that_need_decoding_are_left_to_the_caller():
    sparse = make_stream([1, 3], 0, 40)
    rows = make_stream([1, 3], 0, 40, width=2)
    dense = SparseStream(None, torch.ones(40), 40)
    other = make_stream([1, 3], 0, 41)
    double = make_stream([1, 3], 0, 40, torch.float64)
    message = RAW.encode(sparse).message
    for stream in (rows, dense, other, double):
        pair = [message, RAW.encode(stream).message]
        assert merge_messages(pair, sparse, SUM) is None
    assert merge_messages([message], sparse, SUM) is None
    assert merge_messages([message, message], sparse, OPS["circle"]) is None
    for format in (Format("packed"), Format("raw", 4)):
        pair = [message, format.encode(sparse).message]
        assert merge_messages(pair, sparse, SUM) is None
    unaligned = torch.cat((torch.zeros(1, dtype=torch.uint8), message[0]))[1:]
    assert merge_messages([message, [unaligned]], sparse, SUM) is None
    assert message[0].numel() == HEADER_BYTES + 16
