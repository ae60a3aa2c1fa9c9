"""Formats: how a stream is laid out in bytes for the wire.

Every message begins with the `header`, which names the format that wrote the rest, so that any
message can be decoded by `decode` and several can follow each other in one buffer.
"""

from sparcel.formats.codec import decode, decode_all, encode, max_bytes, reduce_messages
from sparcel.formats.qsgd import Qsgd

__all__ = ["Qsgd", "decode", "decode_all", "encode", "max_bytes", "reduce_messages"]
