"""The layout of a chunk, executable: a decoder in plain Python, slow and short.

`read` takes a chunk apart, `decode` says which elements change, and to what. Bits are plain
integers here, without a sign. Everything that a decoder must know is in this file; it uses nothing
of sparcel. Numbers of several bytes are little-endian.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from math import prod
from pathlib import Path
from typing import Any

# Bytes of an element, and bits of the fraction of a float; None means that the bits are counted as
# those of an unsigned integer.
DTYPES = {
    "float64": (8, 52),
    "float32": (4, 23),
    "float16": (2, 10),
    "bfloat16": (2, 7),
    "float8_e4m3fn": (1, 3),
    "float8_e4m3fnuz": (1, 3),
    "float8_e5m2": (1, 2),
    "float8_e5m2fnuz": (1, 2),
    **dict.fromkeys(["bool", "uint8", "int8", "float8_e8m0fnu"], (1, None)),
    **dict.fromkeys(["uint16", "int16"], (2, None)),
    **dict.fromkeys(["uint32", "int32", "complex32"], (4, None)),
    **dict.fromkeys(["uint64", "int64", "complex64"], (8, None)),
}

# ---- a chunk: a start of 28 bytes, three streams, a header

PAGE = Path(__file__).parents[2] / "docs/reference/deltas-layout.md"
DICTIONARY = PAGE.read_bytes().split(b"```text\n")[1].split(b"```")[0].replace(b"\n", b"")


def read(chunk: bytes) -> tuple[dict[str, Any], list[bytes]]:
    """Return a chunk's header and three streams: symbols of places and of values, plain bits."""
    magic, length, checksum, _base, _sum = struct.unpack_from("<4sIIQQ", chunk)
    assert magic == b"SPD2"
    assert checksum == zlib.crc32(chunk[12:])
    unpacker = zlib.decompressobj(-15, zdict=DICTIONARY)
    header = json.loads(unpacker.decompress(chunk[-length:]))
    rest, streams = chunk[28:-length], []
    for size in header["streams"]:
        streams.append(rest[:size])
        rest = rest[size:]
    assert not rest
    return header, streams


def pieces_of(header: Mapping[str, Any]) -> list[tuple[str, list[int]]]:
    """Return of each piece its tensor's name, and which of that tensor's elements it has."""
    found, cuts = [], iter(header["cuts"])
    for count, template, shape, columns in header["tensors"]:
        for i in range(count):
            numbers = [str(column[i]) for column in columns]
            name = "".join(a + b for a, b in zip_longest(template, numbers, fillvalue=""))
            found.append((name, numbers_of(shape, *next(cuts, []))))
    return found


def numbers_of(
    shape: Sequence[int], first: int = 0, count: int | None = None, row: int = 0, stride: int = 0
) -> list[int]:
    """Return which elements of a tensor, counted row by row, a piece consists of, in order."""
    count = prod(shape) if count is None else count
    row, stride = row or count, stride or count  # without these, they follow one another
    return [first + i // row * stride + i % row for i in range(count)]


def decode(
    chunk: bytes, base: Mapping[str, Sequence[int]] | None = None
) -> dict[str, dict[int, int]]:
    """Return the new bits of the elements that a chunk names, by tensor and number.

    ``base`` has the bits of the old tensors, flat. New values in one class do not need it.
    """
    header, streams = read(chunk)
    pieces = pieces_of(header)
    elements = [(name, number) for name, numbers in pieces for number in numbers]
    itemsize, _ = DTYPES[header["dtype"]]
    changed: dict[str, dict[int, int]] = {name: {} for name, _ in pieces}
    if header["code"] == "removed":
        return {}
    if header["code"] == "dense":  # all new values as they are
        for i, (name, number) in enumerate(elements):
            bits = streams[2][itemsize * i : itemsize * (i + 1)]
            changed[name][number] = int.from_bytes(bits, "little")
        return changed
    old = [base[name][number] if base else 0 for name, number in elements]
    if header["code"] == "xor":
        found = xored(old, zlib.decompress(streams[2]))
    elif header["code"] == "nibbles":
        found = nibbles(header, itemsize, old, *streams)
    else:
        found = changes(header, [len(numbers) for _, numbers in pieces], old, *streams)
    for place, bits in found:
        name, number = elements[place]
        changed[name][number] = bits
    return changed


def xored(old: list[int], planes: bytes) -> Iterator[tuple[int, int]]:
    """Yield what changes: first come the lowest bytes of all elements, then the next ones."""
    for place, before in enumerate(old):
        xor = int.from_bytes(planes[place :: len(old)], "little")
        if xor:
            yield place, before ^ xor


def nibbles(
    header: Mapping[str, Any], itemsize: int, old: list[int], *streams: bytes
) -> Iterator[tuple[int, int]]:
    """Yield what changes, where gaps and steps are those of nibbles, the lowest one first."""
    places, values, bits = Symbols(streams[0]), Symbols(streams[1]), Bits(streams[2])
    gaps, lowest, highest, others = Gaps(), Model(), Model(), Model()
    new, after_last = dict[int, int](), 0
    for _ in range(header["nibbles"]):
        number = after_last + gaps.read(places, bits)
        place, which = divmod(number, 2 * itemsize)
        before = old[place] >> 4 * which & 15
        model = {0: lowest, 7: highest}.get(before % 8, others)
        after = (before + values.read(model)) % 16
        new[place] = new.get(place, old[place]) ^ (before ^ after) << 4 * which
        after_last = number + 1
    assert places.finished()
    assert values.finished()
    yield from new.items()


# ---- which elements change

BLOCK = 2048  # elements


def changes(
    header: Mapping[str, Any], sizes: list[int], old: list[int], *streams: bytes
) -> Iterator[tuple[int, int]]:
    """Yield the place among all elements and the new bits of each change, in order of coding.

    Each class has gaps of its own: how many of its elements lie before the next one that changes.
    The first gap of every class comes before everything else, in the order of classes; each other
    one comes right after the change before it in its class.
    """
    places, values, bits = Symbols(streams[0]), Symbols(streams[1]), Bits(streams[2])
    itemsize, fraction = DTYPES[header["dtype"]]
    left = list(header["changes"])  # changes of each class that are still to come
    gaps = [Gaps() for _ in left]
    steps = [Steps() for _ in left]
    whole = Values(itemsize)
    to_skip = [0 for _ in left]

    def next_gap(c: int) -> None:
        if left[c]:
            to_skip[c] = gaps[c].read(places, bits)
            left[c] -= 1
        else:
            to_skip[c] = len(old)  # no more changes

    for c in range(len(left)):
        next_gap(c)
    for c, place in in_order(header["limits"], sizes, old, itemsize, fraction):
        if to_skip[c]:
            to_skip[c] -= 1
            continue
        if header["code"] == "steps":
            step = steps[c].read(values, bits)
            yield place, stepped(old[place], step, itemsize, fraction, header["shift"])
        else:
            yield place, whole.read(values, bits)
        next_gap(c)
    assert places.finished()
    assert values.finished()


def in_order(
    limits: list[int], sizes: list[int], old: list[int], itemsize: int, fraction: int | None
) -> Iterator[tuple[int, int]]:
    """Yield class and place of all elements: by blocks of each piece, by class, then by place."""
    first = 0
    for size in sizes:
        for begin in range(0, size, BLOCK):
            block = range(first + begin, first + min(begin + BLOCK, size))
            of = {place: class_of(old[place], limits, itemsize, fraction) for place in block}
            for c in range(len(limits) + 1):
                yield from ((c, place) for place in block if of[place] == c)
        first += size


def class_of(bits: int, limits: list[int], itemsize: int, fraction: int | None) -> int:
    """Return the first class whose limit an element's exponent reaches, or else the last class."""
    sign = 1 << (8 * itemsize - 1)
    shift = 55 if fraction == 52 else fraction or 0  # an exponent's first eight bits count
    exponent = 0 if fraction is None else (bits & (sign - 1)) >> shift
    return next((c for c, limit in enumerate(limits) if exponent >= limit), len(limits))


# ---- steps: floats are counted in the order of their values, in which −0 comes right before 0


def stepped(old: int, step: int, itemsize: int, fraction: int | None, shift: int) -> int:
    """Return the bits that lie ``step`` units in the last place above others, and wrap around.

    The last ``shift`` bits are 0, and do not count.
    """
    old, width = old >> shift, 8 * itemsize - shift
    sign, mask = 1 << (width - 1), (1 << width) - 1
    if fraction is None:
        return ((old + step) & mask) << shift
    order = ~old & mask if old & sign else old | sign  # what is below 0 comes first, backwards
    order = (order + step) & mask
    return (order ^ sign if order & sign else ~order & mask) << shift


# ---- symbols: rANS with adaptive models of sixteen symbols

SCALE = 15  # shares of symbols add up to 2^15
LEAST_STATE = 1 << 16
LEAST_SHARE = 4  # of a symbol that never comes
LEARNED = 63


class Symbols:
    """Reads symbols from a stream: a state of 32 bits, then words of 16."""

    def __init__(self, stream: bytes) -> None:
        self.state = int.from_bytes(stream[:4], "little")
        self.words = iter(struct.unpack(f"<{len(stream) // 2 - 2}H", stream[4:]))

    def read(self, model: Model) -> int:
        high, low = divmod(self.state, 1 << SCALE)
        # The symbol in whose share the number lies.
        symbol = max(s for s in range(16) if model.bounds[s] <= low)
        start, end = model.bounds[symbol : symbol + 2]
        self.state = (end - start) * high + low - start
        if self.state < LEAST_STATE:
            self.state = self.state << 16 | next(self.words)
        model.learn(symbol)
        return symbol

    def finished(self) -> bool:
        return self.state == LEAST_STATE and next(self.words, None) is None


class Model:
    """The share of each of sixteen symbols: from its bound to the next one's."""

    def __init__(self) -> None:
        self.bounds = [s << (SCALE - 4) for s in range(17)]
        self.seen = 0

    def learn(self, symbol: int) -> None:
        """Move the bounds to where a symbol has all but the least share of each other one."""
        rate = 1 + min(self.seen + 1, LEARNED).bit_length()
        for s in range(16):
            below, above = LEAST_SHARE * s, (1 << SCALE) - LEAST_SHARE * (16 - s)
            target = below if s <= symbol else above
            self.bounds[s] += (target - self.bounds[s]) >> rate  # rounds down
        self.seen += 1


# ---- what symbols stand for


class Bits:
    """Reads numbers from a stream of plain bits, the lowest first."""

    def __init__(self, stream: bytes) -> None:
        self.rest = int.from_bytes(stream, "little")

    def read(self, count: int) -> int:
        self.rest, number = divmod(self.rest, 1 << count)
        return number


class Gaps:
    """Elements of a class between two changes, divided by a power of two near their mean / 4."""

    def __init__(self) -> None:
        self.sum = 0  # sixteen times a mean of the gaps before
        self.models = [Model() for _ in range(17)]

    def read(self, symbols: Symbols, bits: Bits) -> int:
        shift = min(max((self.sum >> 4).bit_length() - 2, 0), 16)
        quotient = symbols.read(self.models[shift])
        if quotient < 15:
            gap = quotient << shift | bits.read(shift)
        else:  # the rest: its number of bits, then the bits below the first
            width = bits.read(5)
            gap = (15 << shift) + (1 << width) - 1 + bits.read(width)
        self.sum += gap - (self.sum >> 4)
        return gap


class Steps:
    """Steps, which are never 0: a magnitude and a sign."""

    def __init__(self) -> None:
        self.model = Model()

    def read(self, symbols: Symbols, bits: Bits) -> int:
        symbol = symbols.read(self.model)
        if symbol < 3:
            magnitude = symbol + 1
        else:  # the number of bits, then those below the first
            width = symbol if symbol < 15 else 15 + bits.read(6)
            magnitude = 1 << (width - 1) | bits.read(width - 1)
        return -magnitude if bits.read(1) else magnitude


class Values:
    """New values: the first eight bits as two symbols, the second given the first, and the rest."""

    def __init__(self, itemsize: int) -> None:
        self.rest = 8 * itemsize - 8
        self.high = Model()
        self.low = [Model() for _ in range(16)]

    def read(self, symbols: Symbols, bits: Bits) -> int:
        high = symbols.read(self.high)
        low = symbols.read(self.low[high])
        return (high << 4 | low) << self.rest | bits.read(self.rest)


# ---- the sum of a version, by which a chunk is checked


def key_of(name: str, dtype: str, shape: Sequence[int]) -> int:
    """Return the number that tells a tensor's elements from those of others."""
    from hashlib import blake2b

    what = repr((name, f"torch.{dtype}", tuple(shape))).encode()
    return int.from_bytes(blake2b(what, digest_size=8).digest(), "little")


def hashed(key: int, number: int, bits: int) -> int:
    """Return what an element adds to the sum of its version; sums are modulo 2^64."""
    mask = (1 << 64) - 1
    x = (key + number * 0x9E3779B97F4A7C15 + bits * 0xD1342543DE82EF95) & mask
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & mask
    x = (x ^ x >> 27) * 0x94D049BB133111EB & mask
    return x ^ x >> 31
