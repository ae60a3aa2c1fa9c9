"""The plain format and the header: round trips, bounds, and messages that are not streams."""

import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparcel import SparseStream, _cpu, formats
from sparcel.errors import FormatError, MismatchError
from sparcel.formats import COO
from sparcel.formats.header import ALIGNMENT, HEADER_BYTES, Header
from sparcel.formats.parts import join_by_torch
from sparcel.stages import most_bytes
from tests.strategies import DTYPES, full, make_stream, ops, same_stream, sizes, streams, widths


def encode(stream):
    message, error = COO.encode(stream)
    assert error is None
    return message


def bytes_of(message):
    return bytes(message.tolist())


def tensor_of(data):
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0).byte()


def decodes_or_refuses(data):
    """Decode a message, and read the whole stream if decoding succeeds."""
    try:
        stream = formats.decode(tensor_of(data))
    except FormatError:
        return
    SparseStream(stream.indices, stream.values, stream.size)
    assert stream.nnz <= stream.size
    if stream.size * (stream.width or 1) < 1000:  # a corrupt width may be huge
        assert full(stream).shape[0] == stream.size


@given(streams(), st.booleans())
def test_a_message_round_trips(stream, finite):
    stream.finite = finite
    message = encode(stream)
    assert same_stream(formats.decode(message), stream)
    assert same_stream(formats.decode(message, like=stream), stream)


def test_the_memory_of_a_large_message_returns_to_the_pool():
    message = encode(SparseStream.unchecked(None, torch.ones(9 << 20), 9 << 20))
    address, nbytes = message.data_ptr(), message.numel()
    del message
    assert _cpu.empty(nbytes).data_ptr() == address


def test_a_stream_beyond_32_bits_round_trips():
    size = 2**40
    stream = SparseStream(torch.tensor([5, size - 1]), torch.tensor([1.0, 2.0]), size)
    assert same_stream(formats.decode(encode(stream)), stream)


@pytest.mark.parametrize("special", [float("nan"), float("inf"), -0.0, 1e-45])
def test_values_travel_bit_for_bit(special):
    stream = SparseStream(torch.tensor([2]), torch.tensor([special]), 9)
    assert same_stream(formats.decode(encode(stream)), stream)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("width", [None, 0, 1, 2])
def test_any_stride_is_encoded(count, width):
    shape = (count,) if width is None else (count, width)
    wide = torch.arange(7.0 * 3 * 8).view(7, 3, 8)
    values = wide[:count, 0, 5] if width is None else wide[:count, :width, 5]
    indices = torch.arange(20, dtype=torch.int32)[::7][:count]
    stream = SparseStream.unchecked(indices, values, 40)
    decoded = formats.decode(encode(stream))
    assert decoded.values.shape == shape
    assert torch.equal(decoded.values, values)
    assert torch.equal(decoded.indices, indices)


@given(streams())
def test_other_devices_join_the_same_message(stream):
    message = encode(stream)
    parts = [part for part in (stream.values, stream.indices) if part is not None]
    assert torch.equal(join_by_torch(Header.parse(message), parts), message)


def test_indices_of_another_dtype_are_not_sent():
    stream = SparseStream.unchecked(torch.tensor([3, 5]), torch.tensor([1.0, 2.0]), 40)
    with pytest.raises(ValueError, match="take up the message"):
        encode(stream)


@given(streams())
def test_message_has_the_documented_length(stream):
    columns = 1 if stream.width is None else stream.width

    def padded(count):
        return (count + 7) // 8 * 8

    expected = 40 + padded(stream.nnz * columns * stream.dtype.itemsize)
    if not stream.is_dense:
        expected += padded(4 * stream.nnz)
    assert encode(stream).numel() == expected


@given(sizes, st.sampled_from(DTYPES), widths, ops, st.integers(0, 70), st.integers(0, 10))
def test_most_bytes_bounds_every_compact_stream(size, dtype, width, op, nnz, slack):
    nnz = min(nnz, size)
    stream = make_stream(range(nnz), 1, size, dtype, op, width).compact(op)
    length = encode(stream).numel()
    assert length <= most_bytes(COO, None, size, stream.value_bytes)
    assert length <= most_bytes(COO, nnz + slack, size, stream.value_bytes)


@given(st.lists(streams(), max_size=5))
def test_decode_all_cuts_joined_messages(several):
    buffer = torch.cat([torch.empty(0).byte(), *map(encode, several)])
    decoded = [formats.decode(message) for message in formats.decode_all(buffer)]
    assert len(decoded) == len(several)
    assert all(map(same_stream, decoded, several))


def test_decoding_makes_views():
    stream = make_stream([1, 4], 0, 30)
    message = encode(stream)
    decoded = formats.decode(message)
    assert decoded.values.untyped_storage().data_ptr() == message.untyped_storage().data_ptr()
    assert decoded.indices.untyped_storage().data_ptr() == message.untyped_storage().data_ptr()


@given(streams())
def test_decode_ignores_bytes_after_a_message(stream):
    message = encode(stream)
    longer = torch.cat([message, torch.full((13,), 255, dtype=torch.uint8)])
    assert same_stream(formats.decode(longer), stream)


@pytest.mark.parametrize("shift", range(1, ALIGNMENT))
def test_decode_reads_a_misaligned_message(shift):
    stream = make_stream([1, 4, 5], 0, 30, torch.float64)
    askew = torch.cat([torch.zeros(shift, dtype=torch.uint8), encode(stream)])[shift:]
    assert same_stream(formats.decode(askew), stream)


@given(streams())
def test_a_message_truncated_at_any_byte_is_refused(stream):
    message = encode(stream)
    for length in range(message.numel()):
        with pytest.raises(FormatError, match=r"shorter than a header|truncated"):
            formats.decode(message[:length])


@pytest.mark.parametrize("position", range(HEADER_BYTES))
def test_a_flipped_bit_of_the_header_is_refused_or_harmless(position):
    for stream in (
        make_stream([0, 3, 8], 1, 12),
        make_stream([0, 3], 1, 12, torch.float16, width=3),
        make_stream([0, 3], 1, 2**33),
        SparseStream(None, torch.arange(5.0), 5),
    ):
        data = bytearray(bytes_of(encode(stream)))
        for bit in range(8):
            data[position] ^= 1 << bit
            decodes_or_refuses(data)
            data[position] ^= 1 << bit


@given(st.data(), streams())
def test_overwritten_bytes_are_refused_or_harmless(data, stream):
    message = bytearray(bytes_of(encode(stream)))
    for _ in range(data.draw(st.integers(1, 4))):
        message[data.draw(st.integers(0, len(message) - 1))] = data.draw(st.integers(0, 255))
    decodes_or_refuses(message)


@given(st.binary(max_size=200))
def test_garbage_is_refused(data):
    decodes_or_refuses(data)
    decodes_or_refuses(b"SPCL" + data)
    decodes_or_refuses(b"SPCL\x01" + data)


EXTREMES = st.sampled_from([0, 1, 2, 3, 7, 8, 40, 48, 56, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1])


@given(
    kind=st.integers(0, 3),
    code=st.integers(0, 6),
    flags=st.integers(0, 31),
    width=EXTREMES.filter(lambda number: number < 2**32),
    detail=st.sampled_from([0, 2 << 16 | 8, 8 << 16 | 1, 4 << 16, 3 << 16 | 8, 2**32 - 1]),
    counts=st.tuples(EXTREMES, EXTREMES, EXTREMES),
    body=st.binary(max_size=64),
)
def test_forged_headers_are_refused_or_harmless(kind, code, flags, width, detail, counts, body):
    header = struct.pack("<4sBBBBIIQQQ", b"SPCL", 1, kind, code, flags, width, detail, *counts)
    decodes_or_refuses(header + body)
    fitting = struct.pack(
        "<4sBBBBIIQQQ", b"SPCL", 1, kind, code, flags, width, detail, *counts[:2], 40 + len(body)
    )
    decodes_or_refuses(fitting + body)


@given(st.data())
def test_joined_messages_with_a_forged_length_are_cut_or_refused(data):
    first = bytearray(bytes_of(encode(make_stream([1, 5], 0, 20))))
    second = bytes_of(encode(make_stream([2], 1, 20)))
    gap = data.draw(st.integers(0, 12))
    struct.pack_into("<Q", first, 32, len(first) + gap)
    try:
        messages = formats.decode_all(tensor_of(bytes(first) + bytes(gap) + second))
        for message in messages:
            formats.decode(message)
    except FormatError:
        assert gap
    else:
        assert not gap


def forged(stream, **changes):
    """Return the stream's message with other header fields."""
    message = encode(stream)
    header = Header.parse(message)
    header._replace(**changes).pack_into(message)
    return message


BASE = make_stream([1, 2, 5], 0, 40)


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (torch.zeros(39, dtype=torch.uint8), "39 bytes is shorter than a header"),
        (torch.zeros(80, dtype=torch.uint8), "not a sparcel message"),
        (forged(BASE, kind=9), "unknown format 9"),
        (forged(BASE, nnz=41), "41 stored coordinates of 40"),
        (forged(BASE, dense=True), "dense=True"),
        (forged(BASE, length=1000), "truncated message: its header says 1000 bytes"),
        (forged(BASE, nnz=2), "a coo message of 2 coordinates takes 56 bytes"),
        (forged(BASE, length=HEADER_BYTES + 4), "44 bytes, not a multiple of 8"),
        (forged(BASE, wide_indices=True), "int64 indices do not belong to a stream of size 40"),
        (forged(BASE, size=2**63), "3 stored coordinates of 9223372036854775808"),
        (forged(BASE, size=4), "index 5 at position 2"),
    ],
)
def test_decode_says_what_is_wrong_with_a_message(message, error):
    with pytest.raises(FormatError, match=error):
        formats.decode(message)


def test_decode_refuses_another_version_and_asks_for_one_release():
    message = encode(BASE)
    message[4] = 2
    with pytest.raises(FormatError, match=r"version 2, .* reads version 1; install the same"):
        formats.decode(message)


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
        formats.decode(encode(BASE), like)
