"""Formats: how a stream is laid out in bytes for the wire.

Every message begins with a `header` that names the format of the rest. `decode` therefore decodes
any message, and several messages can follow each other in one buffer. A format is one file, and a
line in the table of `codec`.
"""

from sparcel.formats.base import Encoded, Expected, Format
from sparcel.formats.codec import FORMATS_BY_NAME, decode, decode_all
from sparcel.formats.coo import COO, Coo
from sparcel.formats.header import HEADER_BYTES, Header
from sparcel.formats.packed import Packed
from sparcel.formats.qsgd import Qsgd

__all__ = [
    "COO",
    "FORMATS_BY_NAME",
    "HEADER_BYTES",
    "Coo",
    "Encoded",
    "Expected",
    "Format",
    "Header",
    "Packed",
    "Qsgd",
    "decode",
    "decode_all",
]
