"""Messages and their header: round trips, joining, bounds, and messages that are not streams."""

import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparcel import SparseStream, _cpu
from sparcel.core import formats
from sparcel.core.formats import RAW, FewBits, Format, Lengths
from sparcel.core.formats.message import ALIGNMENT, HEADER_BYTES, Header, message_of
from sparcel.core.kernels.definitions.packing import join_message
from sparcel.errors import FormatError, InputError, MismatchError
from tests.kernels.test_packing import lists_of_indices
from tests.strategies import (
    DTYPES,
    full,
    make_stream,
    ops,
    same_stream,
    sizes,
    streams,
    values_at,
    widths,
)

PACKED = Format("packed")
CHUNKED = Format("chunked")
FORMATS = [
    RAW,
    PACKED,
    CHUNKED,
    Format("raw", "float16"),
    Format("packed", "bfloat16"),
    Format("packed", 8),
    Format("raw", 4),
    Format("packed", 2),
    Format("raw", FewBits(2, 24, "float32", stochastic=True, seed=2**60)),
]


def encode(stream, format=RAW):
    (message,) = format.encode(stream).message
    return message


def decode(message, like=None):
    return formats.decode([message], like)


@st.composite
def formatted(draw):
    """Draw a format, and a stream that it can hold."""
    format = draw(st.sampled_from(FORMATS))
    stream = draw(streams())
    if format.loses and (stream.width is not None or not stream.dtype.is_floating_point):
        format = format.exact
    return format, stream


def bytes_of(message):
    return bytes(message.tolist())


def tensor_of(data):
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0).byte()


def decodes_or_refuses(data):
    """Decode a message, and read the whole stream if decoding succeeds."""
    try:
        stream = decode(tensor_of(data))
    except FormatError:
        return
    SparseStream(stream.indices, stream.values, stream.size)
    assert stream.nnz <= stream.size
    if stream.size * (stream.width or 1) < 1000:  # a corrupt width may be huge
        assert full(stream).shape[0] == stream.size


@given(formatted(), st.booleans(), st.integers())
def test_a_message_holds_the_stream_of_its_packet(case, finite, key):
    format, stream = case
    stream.finite = finite
    (message,), held = format.encode(stream, key)
    assert same_stream(decode(message), held)
    assert same_stream(decode(message, like=stream), held)
    assert held is stream or format.loses
    nnz = None if stream.is_dense else stream.nnz
    assert message.numel() == format.nbytes(nnz, stream.size, stream.value_bytes)


def test_the_memory_of_a_large_message_returns_to_the_pool():
    message = encode(SparseStream.unchecked(None, torch.ones(9 << 20), 9 << 20))
    address, nbytes = message.data_ptr(), message.numel()
    del message
    assert _cpu.empty(nbytes).data_ptr() == address


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_a_stream_beyond_32_bits_round_trips(format):
    size = 2**40
    stream = SparseStream(torch.tensor([5, size - 1]), torch.tensor([1.0, 1.0]), size)
    assert same_stream(decode(encode(stream, format)), stream)


@pytest.mark.parametrize("format", [RAW, PACKED, CHUNKED], ids=str)
@pytest.mark.parametrize("special", [float("nan"), float("inf"), -0.0, 1e-45])
def test_exact_values_travel_bit_for_bit(special, format):
    stream = SparseStream(torch.tensor([2]), torch.tensor([special]), 9)
    assert same_stream(decode(encode(stream, format)), stream)


@given(
    lists_of_indices(),
    st.sampled_from([PACKED, CHUNKED]),
    st.sampled_from(DTYPES),
    st.sampled_from([None, 0, 1, 3]),
    ops,
)
def test_any_indices_round_trip(case, format, dtype, width, op):
    indices, size = case
    stream = SparseStream(indices, values_at(indices % 1000, 1, dtype, op, width), size)
    assert same_stream(decode(encode(stream, format)), stream)


def test_rows_that_no_header_can_tell_are_refused():
    rows = SparseStream(torch.empty(0, dtype=torch.int32), torch.empty(0, 2**32), 10)
    with pytest.raises(InputError, match="at most 4294967295 values"):
        Format().encode(rows)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("width", [None, 0, 1, 2])
def test_any_stride_is_encoded(count, width):
    shape = (count,) if width is None else (count, width)
    wide = torch.arange(7.0 * 3 * 8).view(7, 3, 8)
    values = wide[:count, 0, 5] if width is None else wide[:count, :width, 5]
    indices = torch.arange(20, dtype=torch.int32)[::7][:count]
    stream = SparseStream.unchecked(indices, values, 40)
    decoded = decode(encode(stream))
    assert decoded.values.shape == shape
    assert torch.equal(decoded.values, values)
    assert torch.equal(decoded.indices, indices)


@given(streams())
def test_other_devices_join_the_same_message(stream):
    message = encode(stream)
    parts = [part for part in (stream.values, stream.indices) if part is not None]
    (joined,) = join_message(parts, Header.parse(message).pack())
    assert torch.equal(joined, message)
    apart = [joined[:HEADER_BYTES], joined[HEADER_BYTES:]]
    assert same_stream(formats.decode(apart), stream)


def test_indices_of_another_dtype_are_not_sent():
    stream = SparseStream.unchecked(torch.tensor([3, 5]), torch.tensor([1.0, 2.0]), 40)
    with pytest.raises(ValueError, match="take up the message"):
        encode(stream)


@given(sizes, st.sampled_from(DTYPES), widths, ops, st.integers(0, 70), st.integers(0, 10))
def test_most_bytes_bounds_every_compact_stream(size, dtype, width, op, nnz, slack):
    nnz = min(nnz, size)
    stream = make_stream(range(nnz), 1, size, dtype, op, width).compact(op)
    length = encode(stream).numel()
    lengths = Lengths(RAW, size, stream.value_bytes)
    assert length <= lengths.most_bytes(None)
    assert length <= lengths.most_bytes(nnz + slack)


def in_parts(parts, count):
    """Return a message as communicators return it: whole, in two parts, or in those sent."""
    whole = torch.cat(list(parts))
    return [whole], [whole[: 40 * count], whole[40 * count :]], parts


@given(st.lists(streams(), min_size=1, max_size=5), st.integers(0, 2))
def test_joined_messages_are_cut_apart_and_joined_anew(several, way):
    messages, count = [RAW.encode(stream).message for stream in several], len(several)
    parts = in_parts(formats.joined(messages), count)[way]
    for _ in range(2):
        messages = formats.cut(parts, count)
        assert len(messages) == count
        assert all(map(same_stream, map(formats.decode, messages), several))
        parts = formats.joined(messages)


@given(st.lists(streams(), min_size=2, max_size=4), st.integers(0, 1), st.data())
def test_a_message_of_fewer_or_more_messages_is_not_cut(several, way, data):
    count = len(several)
    parts = formats.joined([RAW.encode(stream).message for stream in several])
    for other in {2, count - 1, count + 1, count + 2} - {1, count}:
        with pytest.raises(FormatError):
            formats.cut(in_parts(parts, count)[way], other)
    buffer = torch.cat(list(parts))
    cut = data.draw(st.integers(0, buffer.numel() - 1))
    with pytest.raises(FormatError):
        formats.cut([buffer[:cut]], count)
    with pytest.raises(FormatError, match="which announce"):
        formats.cut([torch.cat([buffer, buffer[:8]])], count)


def test_control_alone_tells_what_a_message_holds():
    """On torch's meta device tensors have no bytes, so nothing can have read any."""
    values = torch.ones(5, device="meta")
    messages = [RAW.encode(SparseStream(None, values[:n], n)).message for n in (5, 0, 3)]
    parts = formats.joined(messages)
    assert [part.device.type for part in parts] == ["cpu"] * 3 + ["meta"] * 3
    parts = [torch.cat(list(parts[:3])), torch.cat(list(parts[3:]))]  # as an engine returns them
    for message, size in zip(formats.cut(parts, 3), (5, 0, 3), strict=True):
        stream = formats.decode(message)
        assert stream.device.type == "meta"
        assert stream.values.shape == (size,)


@pytest.mark.parametrize("finite", [True, False])
def test_finite_may_be_a_tensor_until_the_header_is_parsed(finite):
    stream = make_stream([1, 4], 0, 30)
    plain = Header.parse(encode(stream))._replace(finite=finite)
    header = plain._replace(finite=torch.tensor(finite))
    (message,) = message_of(header, [stream.values, stream.indices])
    assert message[:HEADER_BYTES].tolist() == list(plain.pack())
    assert Header.parse(message) == plain


def test_decoding_makes_views():
    stream = make_stream([1, 4], 0, 30)
    message = encode(stream)
    decoded = decode(message)
    assert decoded.values.untyped_storage().data_ptr() == message.untyped_storage().data_ptr()
    assert decoded.indices.untyped_storage().data_ptr() == message.untyped_storage().data_ptr()


@given(streams())
def test_decode_ignores_bytes_after_a_message(stream):
    message = encode(stream)
    longer = torch.cat([message, torch.full((13,), 255, dtype=torch.uint8)])
    assert same_stream(decode(longer), stream)


@pytest.mark.parametrize("shift", range(1, ALIGNMENT))
def test_decode_reads_a_misaligned_message(shift):
    stream = make_stream([1, 4, 5], 0, 30, torch.float64)
    askew = torch.cat([torch.zeros(shift, dtype=torch.uint8), encode(stream)])[shift:]
    assert same_stream(decode(askew), stream)


@given(formatted())
def test_a_message_truncated_at_any_byte_is_refused(case):
    format, stream = case
    message = encode(stream, format)
    for length in range(message.numel()):
        with pytest.raises(FormatError, match=r"shorter than a header|truncated"):
            decode(message[:length])


@pytest.mark.parametrize("position", range(HEADER_BYTES))
def test_a_flipped_bit_of_the_header_is_refused_or_harmless(position):
    for stream, format in (
        (make_stream([0, 3, 8], 1, 12), RAW),
        (make_stream([0, 3, 8], 1, 12), CHUNKED),
        (make_stream([0, 3], 1, 12, torch.float16, width=3), PACKED),
        (make_stream([0, 3], 1, 2**33), Format("packed", 4)),
        (SparseStream(None, torch.arange(5.0), 5), Format("raw", 2)),
    ):
        data = bytearray(bytes_of(encode(stream, format)))
        for bit in range(8):
            data[position] ^= 1 << bit
            decodes_or_refuses(data)
            data[position] ^= 1 << bit


@given(st.data(), formatted())
def test_overwritten_bytes_are_refused_or_harmless(data, case):
    format, stream = case
    message = bytearray(bytes_of(encode(stream, format)))
    for _ in range(data.draw(st.integers(1, 4))):
        message[data.draw(st.integers(0, len(message) - 1))] = data.draw(st.integers(0, 255))
    decodes_or_refuses(message)


@given(st.binary(max_size=200))
def test_garbage_is_refused(data):
    decodes_or_refuses(data)
    decodes_or_refuses(b"SPCL" + data)
    decodes_or_refuses(b"SPCL\x03" + data)


EXTREMES = st.sampled_from([0, 1, 2, 3, 7, 8, 40, 48, 56, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1])


@given(
    kind=st.integers(0, 3),
    code=st.integers(0, 6),
    flags=st.integers(0, 31),
    width=EXTREMES.filter(lambda number: number < 2**32),
    detail=st.sampled_from([0, 1, 257, 513, 4 << 8 | 2, 0x36 << 8 | 2, 3 << 8 | 2, 2**32 - 1]),
    counts=st.tuples(EXTREMES, EXTREMES, EXTREMES),
    body=st.binary(max_size=64),
)
def test_forged_headers_are_refused_or_harmless(kind, code, flags, width, detail, counts, body):
    header = struct.pack("<4sBBBBIIQQQ", b"SPCL", 3, kind, code, flags, width, detail, *counts)
    decodes_or_refuses(header + body)
    fitting = struct.pack(
        "<4sBBBBIIQQQ", b"SPCL", 3, kind, code, flags, width, detail, *counts[:2], 40 + len(body)
    )
    decodes_or_refuses(fitting + body)


@given(st.integers(-60, 60), st.integers(-60, 60), st.integers(0, 40), st.integers(0, 2))
def test_joined_messages_with_forged_lengths_are_cut_or_refused(first, second, more, way):
    messages = [encode(make_stream([1, 5], 0, 20)), encode(make_stream([2], 1, 20))]
    for message, change in zip(messages, (first, second), strict=True):
        message[32:40].view(torch.int64).add_(change)
    parts = formats.joined([[message] for message in messages])
    parts = [*parts[:-1], torch.cat([parts[-1], torch.zeros(more, dtype=torch.uint8)])]
    try:
        for message in formats.cut(in_parts(parts, 2)[way], 2):
            formats.decode(message)
    except FormatError:
        assert first or second or more
    else:
        assert not (first or second)
        assert not more or way == 2  # a part may be longer than its message


BASE = make_stream([1, 2, 5], 0, 40)


def forged(format=RAW, **changes):
    """Return a message of `BASE` with other header fields, in a buffer with room after it."""
    message = encode(BASE, format)
    header = Header.parse(message)
    message = torch.cat((message, torch.zeros(1000, dtype=torch.uint8)))
    message[:HEADER_BYTES] = torch.tensor(list(header._replace(**changes).pack()))
    return message


FOUR = Format("raw", 4)


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (torch.zeros(39, dtype=torch.uint8), "39 bytes is shorter than a header"),
        (torch.zeros(80, dtype=torch.uint8), "not a sparcel message"),
        (forged(index_code=9), "unknown index code 9"),
        (forged(value_code=9), "unknown value code 9"),
        (forged(nnz=41), "41 stored coordinates of 40"),
        (forged(dense=True), "dense=True"),
        (encode(BASE)[:-8], "truncated message: its header says 72 bytes, 64"),
        (forged(nnz=2), "a raw message of 2 coordinates takes 56 bytes, its header says 72"),
        (forged(length=HEADER_BYTES + 4), "44 bytes, not a multiple of 8"),
        (forged(size=2**63), "3 stored coordinates of 9223372036854775808"),
        (forged(size=2**40), "takes 80 bytes, its header says 72"),
        (forged(size=4), "index 5 at position 2"),
        (forged(PACKED, nnz=5), "a packed message of 5 coordinates takes 72 bytes"),
        (forged(PACKED, length=72), "takes 64 bytes, its header says 72"),
        (forged(PACKED, size=2**63 - 1, nnz=2**62), "its header says 64"),
        (forged(FOUR, nnz=17), "a raw:4 message of 17 coordinates takes"),
        (forged(FOUR, width=2), "a raw:4 message cannot hold torch.float32, width 2"),
        (forged(FOUR, dtype=torch.int32), "cannot hold torch.int32, width None"),
        (forged(FOUR, detail=9), "bits must lie in .2, 8., got 9"),
        (forged(FOUR, detail=4 | 4 << 4), "unknown flags 4"),
        (forged(FOUR, detail=4 | 2**13 << 8), "block must be a multiple of 8"),
        (forged(Format("raw", "float16"), detail=2), "there is no 16-bit dtype 2"),
    ],
)
def test_decode_says_what_is_wrong_with_a_message(message, error):
    with pytest.raises(FormatError, match=error):
        decode(message)


def test_decode_refuses_another_version_and_asks_for_one_release():
    message = encode(BASE)
    message[4] = 1
    with pytest.raises(FormatError, match=r"version 1, .* reads version 3; install the same"):
        decode(message)


@pytest.mark.parametrize(
    "like",
    [
        make_stream([], 0, 41),
        make_stream([], 0, 40, torch.float64),
        make_stream([], 0, 40, width=2),
    ],
    ids=str,
)
def test_decode_refuses_a_stream_unlike_the_expected_one(like):
    with pytest.raises(MismatchError, match=r"size 40, torch\.float32, width None, but one of"):
        decode(encode(BASE), like)


def test_packed_indices_out_of_range_or_order_are_refused():
    message = encode(BASE, PACKED)  # three low bits an index, in a bitmap of 7 bits
    words = message[56:].view(torch.int64)
    assert int(words[0]) == 0b101_010_001_0000111
    words[0] = 0b111_010_001_1000011
    assert decode(message).indices.tolist() == [1, 2, 39]
    for word in (0b101_010_010_0000111, 0b101_010_001_0000011):  # two alike; two in all
        words[0] = word
        with pytest.raises(FormatError, match="not hold 3 packed indices, sorted, below 40"):
            decode(message)


def test_chunked_indices_of_wrong_counts_or_order_are_refused():
    stream = make_stream([1, 4095, 4096, 9000], 0, 3 * 4096)
    message = encode(stream, CHUNKED)
    counts, places = message[56:62].view(torch.int16), message[62:68]
    assert counts.tolist() == [2, 1, 1]
    assert places.tolist() == [0x01, 0xF0, 0xFF, 0x00, 0x80, 0x32]
    counts[0], counts[1] = 1, 2
    with pytest.raises(FormatError, match="index 4096 at position 2 is out of order"):
        decode(message)
    counts[0] = -1
    with pytest.raises(FormatError, match="its chunks do not hold 4 indices"):
        decode(message)
