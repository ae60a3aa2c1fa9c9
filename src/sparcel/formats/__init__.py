"""Formats: how a stream is laid out in bytes for the wire.

A format is an index code (`indices`) times a value code (`values`). Every message begins with a
`header` that names both. `decode` therefore decodes any message, and several messages can follow
each other in one buffer.
"""

from sparcel.formats.codec import decode, decode_all
from sparcel.formats.expected import Expected
from sparcel.formats.format import RAW, Format, Packet, format_named, merge_messages
from sparcel.formats.header import HEADER_BYTES, Header
from sparcel.formats.values import FewBits, HalfValues, PlainValues, ValueCode

__all__ = [
    "HEADER_BYTES",
    "RAW",
    "Expected",
    "FewBits",
    "Format",
    "HalfValues",
    "Header",
    "Packet",
    "PlainValues",
    "ValueCode",
    "decode",
    "decode_all",
    "format_named",
    "merge_messages",
]
