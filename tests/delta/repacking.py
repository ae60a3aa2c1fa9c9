"""Chunks with other headers than `encode` writes, whose checksums are right."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable
from typing import Any

from tests.delta import plain


def repacked(chunk: bytes, change: Callable[[dict[str, Any], bytearray], None]) -> bytes:
    """Change a chunk's header and streams, with the right checksum and lengths in its start."""
    header, _ = plain.read(chunk)
    length = struct.unpack_from("<I", chunk, 4)[0]
    header |= dict(zip(("base_sum", "sum"), struct.unpack_from("<QQ", chunk, 12), strict=True))
    rest = bytearray(chunk[28:-length])
    change(header, rest)
    sums = struct.pack("<QQ", header.pop("base_sum"), header.pop("sum"))
    return framed(json.dumps(header).encode(), sums + bytes(rest))


def framed(header: bytes, before: bytes) -> bytes:
    """Put a chunk together of a header, sums and streams."""
    packer = zlib.compressobj(wbits=-15, zdict=plain.DICTIONARY)
    packed = (packer.compress(header) + packer.flush()).ljust(32, b"\0")
    body = before + packed
    return struct.pack("<4sII", b"SPD2", len(packed), zlib.crc32(body)) + body
