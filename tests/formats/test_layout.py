"""Messages are laid out as `docs/reference/wire.md` says.

The decoder that is written from the page, sparcel's decoder and the page's examples agree.
"""

from __future__ import annotations

import re
import struct
from ast import literal_eval
from math import copysign, isfinite, isnan
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparcel import SparseStream
from sparcel.core import formats
from sparcel.core.formats import FewBits, Format, format_named
from sparcel.errors import FormatError
from tests.formats.layout import (
    DTYPES,
    Decoded,
    Refused,
    convert,
    cut,
    decode,
    decode_several,
    float32,
    float32_of,
    numbers,
    packing,
    padded,
    raw_bytes,
    read_header,
)
from tests.strategies import dtypes, floats, index_sets, make_stream, sizes, streams, widths

PAGE = Path(__file__).parents[2] / "docs/reference/wire.md"
EXAMPLES = PAGE.read_text().split("## Examples")[1].split("\n### ")[1:]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.splitlines()[0])
def test_the_examples_of_the_page(example):
    name = re.match("`(.*?)`", example)[1]
    size, dtype = re.search(r"(\d+) coordinates of (\w+)", example).groups()
    literals = [literal_eval(found) for found in re.findall(r"`([{[].*?[]}])`", example)]
    written, read = literals[0], literals[-1]
    lines = re.findall(r"^ *(\d+)  ([0-9a-f]{8} [0-9a-f]{8})  ", example, re.MULTILINE)
    assert [int(offset) for offset, _ in lines] == list(range(0, 8 * len(lines), 8))
    data = bytes.fromhex("".join(digits for _, digits in lines))

    dense = isinstance(read, list)
    values = torch.tensor(read if dense else list(read.values()))
    decoded = decode(data)
    assert decoded.values == values.flatten().tolist()
    assert decoded.indices == (None if dense else list(read))
    assert (decoded.size, decoded.dtype, decoded.finite) == (int(size), dtype, True)
    assert decoded.width == (None if values.ndim == 1 else values.shape[1])
    assert same(decoded, sparcels(data))

    indices = None if dense else torch.tensor(list(written))
    values = torch.tensor(written if dense else list(written.values()), dtype=getattr(torch, dtype))
    stream = SparseStream(indices, values, int(size))
    assert encode(stream, format_named(name)) == data


# ---- messages of the library

CODES = [
    *("plain", "float16", "bfloat16", *range(2, 9)),
    FewBits(8, 8, "float32"),
    FewBits(4, 16, stochastic=True),
    FewBits(2, 8, "float32"),
    FewBits(2, 24, "float32", stochastic=True),
]
INDICES = st.sampled_from(["raw", "packed", "chunked"])
LARGE = st.sampled_from([5000, 9000, 12288, 2**31 - 1, 2**31, 2**40, 2**63 - 1])


def encode(stream, format, key=0):
    return bytes(formats.whole(format.encode(stream, key).message).tolist())


def sparcels(data):
    """Return what sparcel decodes."""
    try:
        stream = formats.decode([torch.frombuffer(bytearray(data or b"0"), dtype=torch.uint8)])
    except FormatError:
        raise Refused from None
    return as_decoded(stream)


def as_decoded(stream):
    indices = None if stream.is_dense else stream.indices.tolist()
    dtype, values = str(stream.dtype).removeprefix("torch."), stream.values.flatten().tolist()
    return Decoded(stream.size, dtype, stream.width, stream.finite, indices, values)


def same(one, other):
    """Compare the bits of values, where any NaN is like any other."""
    return one[:5] == other[:5] and bits_of(one.values) == bits_of(other.values)


def bits_of(values):
    return [None if isnan(value) else (value, copysign(1, value)) for value in values]


@st.composite
def large(draw, size, dtype, width):
    width = None if width is None else draw(width)
    return make_stream(draw(index_sets(size, 40)), 0, size, draw(dtype), width=width)


@st.composite
def messages(draw, code=None):
    """Draw a message of the library, and the stream that it holds."""
    format = Format(draw(INDICES), draw(st.sampled_from(CODES)) if code is None else code)
    kind = (floats, None) if format.loses else (dtypes, widths)
    stream = draw(streams(sizes, *kind) | LARGE.flatmap(lambda size: large(size, *kind)))
    if stream.dtype.is_floating_point:
        stream = draw(noisy(stream))
    stream.finite = draw(st.booleans())
    message, held = format.encode(stream, draw(st.integers(0, 9)))
    return bytes(formats.whole(message).tolist()), as_decoded(held)


@st.composite
def noisy(draw, stream):
    """Draw other values for a stream of floats: tiny, huge, infinite, halfway between others."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    scale = draw(st.sampled_from([1.0, 1e-6, 1e-30, 1e-39, 1e5, 1e38, 1e39]))
    noise = torch.randn(stream.values.shape, generator=generator, dtype=torch.float64)
    grain = draw(st.sampled_from([256, 2048]))
    values = (noise * grain).round() / grain * scale
    return SparseStream.unchecked(stream.indices, values.to(stream.dtype), stream.size)


@pytest.mark.parametrize("code", CODES, ids=str)
@given(st.data())
def test_messages_are_laid_out_as_the_page_says(code, data):
    message, held = data.draw(messages(code))
    assert same(decode(message), held)
    assert same(sparcels(message), held)
    header = read_header(message)
    assert len(message) == 40 + sum(map(padded, header.parts))
    assert not any(unread(header, message[40:]))
    assert same(decode(message + b"more"), held)


def unread(header, payload):
    """Yield the bits of each part that nobody reads, as a number."""
    used = [8 * nbytes for nbytes in header.parts]
    if header.value_code == 2:
        used[1] = header.k * header.few[0]
    if header.index_code == 1:
        low_bits, bitmap_bits = packing(header.n, header.k)
        used[-1] = bitmap_bits + header.k * low_bits
    if header.index_code == 2 and header.parts[-1] < raw_bytes(header.n, header.k):
        used[-1] = 16 * -(-header.n // 4096) + 12 * header.k
    for bits, (part, padding) in zip(used, cut(header, payload), strict=True):
        yield int.from_bytes(part + padding, "little") >> bits


@given(st.lists(streams(), min_size=1, max_size=4), st.binary(max_size=8))
def test_several_messages_in_one(several, more):
    parts = formats.joined([Format("packed").encode(stream).message for stream in several])
    data = bytes(torch.cat(list(parts)).tolist())
    assert all(map(same, decode_several(data, len(several)), map(as_decoded, several)))
    if more:
        with pytest.raises(Refused):
            decode_several(data + more, len(several))


# ---- messages that the library did not write


def outcome(decoder, data):
    try:
        return decoder(data)
    except Refused:
        return None


def agrees(data):
    mine, theirs = outcome(decode, data), outcome(sparcels, data)
    assert (mine is None) == (theirs is None)
    assert mine is None or same(mine, theirs)


BASES = [
    (make_stream([1, 5, 9], 0, 12), "raw"),
    (make_stream([1, 5], 0, 12, torch.int64), "raw"),
    (make_stream([1, 2**40 - 1], 0, 2**40, torch.float16), "raw:bfloat16"),
    (make_stream([1, 5, 9], 0, 40, width=2), "packed"),
    (make_stream([1, 5, 9], 0, 10), "packed:8"),
    (make_stream([1, 4095, 4096, 9000, 9001], 0, 9002, torch.float64), "chunked:4"),
    (make_stream([1, 5000, 9000, 20479], 0, 20480), "chunked:2"),  # as long as raw indices
    (
        SparseStream(None, torch.tensor([3.39e38, -1.0]).bfloat16(), 2),
        Format("raw", FewBits(8, 8, "float32")),
    ),
    (SparseStream(None, torch.zeros(3, 0), 3), "packed"),
]


@pytest.mark.parametrize(("stream", "format"), BASES, ids=str)
def test_every_changed_byte_is_read_or_refused_alike(stream, format):
    message = bytearray(encode(stream, format_named(format)))
    for place, byte in enumerate(message):
        for other in {*range(10), 0x1F, 0x20, 0x44, 0xFF, *(byte ^ 1 << bit for bit in range(8))}:
            message[place] = other
            agrees(message)
        message[place] = byte
    for length in range(len(message)):
        agrees(message[:length])


@given(messages(), st.data())
def test_changed_messages_are_read_or_refused_alike(message, data):
    changed, places = bytearray(message[0]), st.integers(0, len(message[0]) - 1)
    for _ in range(5):
        if data.draw(st.booleans()):
            changed[data.draw(places)] ^= 1 << data.draw(st.integers(0, 7))
        else:
            changed[data.draw(places)] = data.draw(st.integers(0, 255))
        agrees(changed)
    agrees(changed[: data.draw(places)])


# ---- how values are rounded

bits_ = st.integers(2, 8)
blocks = st.sampled_from([8, 24, 64])


def in_float32(x):
    most = float32_of(0x7F7FFFFF)
    return x if not isfinite(x) else float32(max(-most, min(most, x)))


@given(streams(dtype=floats, width=None).flatmap(noisy), st.sampled_from(DTYPES[:2]))
def test_values_in_16_bits_are_rounded_as_the_page_says(stream, dtype):
    data = encode(stream, Format("raw", dtype))
    stored = numbers(dtype, cut(read_header(data), data[40:])[0][0])
    expected = [convert(in_float32(x), dtype) for x in stream.values.tolist()]
    assert bits_of(stored) == bits_of(expected)


@given(
    streams(dtype=floats, width=None).flatmap(noisy),
    st.sampled_from(["bfloat16", "float32"]),
    st.booleans(),
    *(bits_, blocks),
)
def test_few_bits_are_rounded_as_the_page_says(stream, scale, at_random, bits, block):
    data = encode(stream, Format("raw", FewBits(bits, block, scale, at_random)), key=1)
    (scales, _), (codes, _) = cut(read_header(data), data[40:])[:2]
    scales, codes, top = numbers(scale, scales), int.from_bytes(codes, "little"), 2 ** (bits - 1)
    values = [in_float32(x) for x in stream.values.tolist()]
    for start in range(0, len(values), block):
        x = values[start : start + block]
        code = [codes >> bits * (start + i) & 2**bits - 1 for i in range(len(x))]
        signs, levels = [c // top for c in code], [c % top for c in code]
        found = [scales.pop(0) for _ in range(2 if bits == 2 and not at_random else 1)]
        if not all(map(isfinite, x)):
            assert all(map(isnan, found)) and not any(code)
        elif len(found) == 2:
            means, above = two_means([abs(v) for v in x])
            assert (found, levels) == ([convert(float32(m), scale) for m in means], above)
            assert signs == [copysign(1, v) < 0 for v in x]
        else:
            assert signs == [v < 0 < level for v, level in zip(x, levels, strict=True)]
            assert found == [scale_of(max(map(abs, x)), scale, at_random)]
            for v, level in zip(x, levels, strict=True):
                assert level in levels_of(abs(v), found[0], top - 1, at_random)
    assert not scales


def scale_of(largest, scale, at_random):
    if largest < 2**-100 and not at_random:
        return 0.0
    limited = min(largest, float32(3.4e38))
    if at_random and scale == "bfloat16":
        bits = int.from_bytes(struct.pack("<f", limited), "little")
        return float32_of(min(bits + 0xFFFF, 0x7F7F0000) & ~0xFFFF)
    return convert(limited, scale)


def levels_of(magnitude, scale, top, at_random):
    """Return the levels that a magnitude may get."""
    if scale == 0:
        return [0]
    if at_random:
        lower = int(float32(float32(magnitude / scale) * top))
        return [min(top, lower), min(top, lower + 1)]
    return [min(top, int(float32(float32(magnitude * float32(top / scale)) + 0.5)))]


def two_means(magnitudes):
    above = [x > sum(magnitudes) / len(magnitudes) for x in magnitudes]
    lower, upper = ([x for x, a in zip(magnitudes, above, strict=True) if a == b] for b in (0, 1))
    return [sum(lower) / len(lower), sum(upper) / max(len(upper), 1)], above
