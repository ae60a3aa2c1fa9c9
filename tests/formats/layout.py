"""A decoder of messages in plain Python, slow and short.

It is written from `docs/reference/wire.md` alone, and uses nothing of sparcel.
"""

from __future__ import annotations

import struct
from collections import namedtuple
from itertools import accumulate, pairwise
from math import copysign, inf, isfinite
from typing import Any

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
        require(2 <= bits <= 8 and ways < 4 and block <= 8 * 8192)
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
