"""The layout of messages, executable: a decoder in plain Python, slow and short.

It is written from `docs/reference/wire.md` alone, and uses nothing of sparcel. The tests compare it
with sparcel's decoder, and both with the page's examples.
"""

from __future__ import annotations

import re
import struct
from ast import literal_eval
from collections import namedtuple
from itertools import accumulate, pairwise
from math import copysign, inf, isfinite, isnan
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparcel import SparseStream, formats
from sparcel.errors import FormatError
from sparcel.formats import FewBits, Format, format_named
from tests.strategies import dtypes, floats, index_sets, make_stream, sizes, streams, widths

# ---- the decoder

DTYPES = ["float16", "bfloat16", "float32", "float64", "int32", "int64"]
ITEM_BYTES = [2, 2, 4, 8, 4, 8]


class Refused(Exception):  # noqa: N818
    """A message that a reader refuses."""


# `values` are those of all rows, `parts` the bytes of each part, `few` the settings of few bits.
Decoded = namedtuple("Decoded", "size dtype width finite indices values")
Header = namedtuple("Header", "n k dtype width finite index_code value_code detail few parts")


def require(fact: bool) -> None:
    if not fact:
        raise Refused


def padded(nbytes: int) -> int:
    return -(-nbytes // 8) * 8


def read_header(data: bytes) -> Header:
    require(len(data) >= 40 and data[:5] == b"SPCL\x03")
    index_code, code, flags, width, value, n, k, length = struct.unpack_from("<BBBIIQQQ", data, 5)
    require(not flags & ~11)
    value_code, detail, dense, rows = value & 255, value >> 8, flags & 1, flags & 8
    require(index_code < 3 and code < 6 and value_code < 3)
    require(k <= n < 2**63 and (not dense or k == n))
    require(value_code == 0 or (code < 4 and not rows))
    few = (0, 0, 0, "")
    if value_code == 0:
        parts = [k * (width if rows else 1) * ITEM_BYTES[code]]
    elif value_code == 1:
        require(detail < 2)
        parts = [2 * k]
    else:
        bits, ways, block = detail & 15, detail >> 4 & 15, 8 * ((detail >> 8) + 1)
        require(bits in (8, 4, 2) and ways < 4 and block <= 8 * 8192)
        scales, scale = 1 + (bits == 2 and not ways & 1), "float32" if ways & 2 else "bfloat16"
        few = bits, block, scales, scale
        parts = [-(-k // block) * scales * (4 if ways & 2 else 2), -(-k * bits // 8)]
    if not dense:
        low_bits, bitmap_bits = packing(n, k)
        packed = 8 * -(-(bitmap_bits + k * low_bits) // 64)
        raw, chunked = raw_bytes(n, k), chunked_bytes(n, k)
        parts.append([raw, packed, min(raw, chunked)][index_code])
    require(length == 40 + sum(map(padded, parts)))
    kept, finite = width if rows else None, not flags & 2
    places = None if dense else index_code
    return Header(n, k, DTYPES[code], kept, finite, places, value_code, detail, few, parts)


def packing(n: int, k: int) -> tuple[int, int]:
    if k == 0 or k > n // 4:
        return 0, n if k else 0
    low_bits = min((n // k).bit_length() - 1, 57)
    return low_bits, k + (n - 1 >> low_bits)


def raw_bytes(n: int, k: int) -> int:
    return k * (4 if n < 2**31 else 8)


def chunked_bytes(n: int, k: int) -> int:
    return 2 * -(-n // 4096) + 3 * -(-k // 2)


def decode(data: bytes) -> Decoded:
    header = read_header(data)
    end = 40 + sum(map(padded, header.parts))
    require(len(data) >= end)
    return decode_payload(header, data[40:end])


def decode_several(data: bytes, count: int) -> list[Decoded]:
    headers = [read_header(data[40 * i :]) for i in range(count)]
    lengths = [sum(map(padded, header.parts)) for header in headers]
    ends = list(accumulate(lengths, initial=40 * count))
    require(ends[-1] == len(data))
    return [decode_payload(h, data[a:b]) for h, (a, b) in zip(headers, pairwise(ends), strict=True)]


def cut(header: Header, payload: bytes) -> list[tuple[bytes, bytes]]:
    """Return the parts, each with its padding."""
    starts = accumulate(map(padded, header.parts), initial=0)
    ranges = zip(pairwise(starts), header.parts, strict=True)
    return [(payload[a : a + used], payload[a + used : b]) for (a, b), used in ranges]


def decode_payload(header: Header, payload: bytes) -> Decoded:
    parts, dtype = [part for part, _ in cut(header, payload)], header.dtype
    if header.value_code == 0:
        values = numbers(dtype, parts[0])
    elif header.value_code == 1:
        values = [convert(x, dtype) for x in numbers(DTYPES[header.detail], parts[0])]
    else:
        values = [convert(x, dtype) for x in few_bits(header, *parts[:2])]
    indices = None if header.index_code is None else read_indices(header, parts[-1])
    require(indices is None or all(a < b for a, b in pairwise([-1, *indices, header.n])))
    return Decoded(header.n, dtype, header.width, header.finite, indices, values)


def numbers(dtype: str, data: bytes) -> list[Any]:
    if dtype == "bfloat16":
        return [float32_of(upper << 16) for (upper,) in struct.iter_unpack("<H", data)]
    return [x for (x,) in struct.iter_unpack("<" + "e?fdiq"[DTYPES.index(dtype)], data)]


def float32_of(bits: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])


def float32(x: float) -> float:
    """Round to float32."""
    try:
        return float(struct.unpack("<f", struct.pack("<f", x))[0])
    except OverflowError:
        return copysign(inf, x)


def convert(x: float, dtype: str) -> float:
    """Convert what float32 holds."""
    if not isfinite(x) or dtype not in ("float16", "bfloat16"):
        return x
    if dtype == "float16":
        return float(struct.unpack("<e", struct.pack("<e", max(-65504.0, min(65504.0, x))))[0])
    bits = int.from_bytes(struct.pack("<f", abs(x)), "little")
    return copysign(float32_of(min(bits + 0x7FFF + (bits >> 16 & 1), 0x7F7F0000) & ~0xFFFF), x)


def few_bits(header: Header, scale_part: bytes, code_part: bytes) -> list[float]:
    bits, block, per_block, scale = header.few
    scales, codes, values = numbers(scale, scale_part), int.from_bytes(code_part, "little"), []
    top = 2 ** (bits - 1) - 1
    for i in range(header.k):
        minus, level = divmod(codes >> i * bits & 2**bits - 1, top + 1)
        if per_block == 2:
            magnitude = scales[i // block * 2 + level]
        else:
            magnitude = float32(level * float32(scales[i // block] / top))
        values.append(-magnitude if minus else magnitude)
    return values


def read_indices(header: Header, part: bytes) -> list[int]:
    n, k, word = header.n, header.k, int.from_bytes(part, "little")
    if header.index_code == 1:
        low_bits, bitmap_bits = packing(n, k)
        ones = [bit for bit in range(bitmap_bits) if word >> bit & 1]
        require(len(ones) == k)
        if k > n // 4:
            return ones
        lows = (word >> bitmap_bits + i * low_bits & 2**low_bits - 1 for i in range(k))
        return [
            one - i << low_bits | low for i, (one, low) in enumerate(zip(ones, lows, strict=True))
        ]
    if header.index_code == 0 or chunked_bytes(n, k) >= raw_bytes(n, k):
        return numbers("int32" if n < 2**31 else "int64", part)
    start = 2 * -(-n // 4096)
    counts = [count for (count,) in struct.iter_unpack("<H", part[:start])]
    require(sum(counts) == k)
    chunks = [chunk for chunk, count in enumerate(counts) for _ in range(count)]
    places = int.from_bytes(part[start:], "little")  # pairs of 24 bits are singles of 12
    return [4096 * chunk + (places >> 12 * i & 4095) for i, chunk in enumerate(chunks)]


# ---- the page's examples

PAGE = Path(__file__).parents[2] / "docs/reference/wire.md"
EXAMPLES = PAGE.read_text().split("## Examples")[1].split("\n### ")[1:]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.splitlines()[0])
def test_the_examples_of_the_page(example):
    name = re.match("`(.*?)`", example)[1]
    size, dtype = re.search(r"(\d+) coordinates of (\w+)", example).groups()
    literals = [literal_eval(found) for found in re.findall(r"`([{[].*?[]}])`", example)]
    written, read = literals[0], literals[-1]
    lines = re.findall(r"^ *(\d+)  ((?:[0-9a-f]{2} ){8}) ", example, re.MULTILINE)
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
    *("plain", "float16", "bfloat16", 8, 4, 2),
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

bits_ = st.sampled_from([8, 4, 2])
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
