"""Formats: how a stream is laid out in bytes for the wire.

A format is an index code (`indices`) times a value code (`values`). Every `message` begins with a
header that names both, so `decode` decodes any message. The header is control, which a receiver
needs on its host; what follows is payload, which stays on its device.
"""

from sparcel.core.formats.format import (
    RAW,
    Format,
    Lengths,
    Packet,
    decode,
    format_named,
    merge_messages,
)
from sparcel.core.formats.message import (
    HEADER_BYTES,
    Expected,
    Header,
    Message,
    cut,
    joined,
    message_length,
    nbytes_of,
    whole,
)
from sparcel.core.formats.values import FewBits, HalfValues, PlainValues, ValueCode

__all__ = [
    "HEADER_BYTES",
    "RAW",
    "Expected",
    "FewBits",
    "Format",
    "HalfValues",
    "Header",
    "Lengths",
    "Message",
    "Packet",
    "PlainValues",
    "ValueCode",
    "cut",
    "decode",
    "format_named",
    "joined",
    "merge_messages",
    "message_length",
    "nbytes_of",
    "whole",
]
