"""A message: a header, which is control, and the payload: the values, then their places.

Where both lie in the same memory, as on the CPU, a message is one tensor. Otherwise it is two, and
the payload's device is that of the stream. Several messages travel joined: all headers come first,
so whoever reads these knows where the payloads begin and end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self, TypeAlias

import torch
from torch import Tensor

from sparcel import kernels
from sparcel.device import put
from sparcel.errors import FormatError
from sparcel.formats.header import HEADER_BYTES, VOID, Header
from sparcel.stream import SparseStream


@dataclass(frozen=True)
class Expected:
    """What a rank knows of a stream before it arrives.

    Attributes
    ----------
    size, dtype, width
        As of the stream.
    max_nnz
        The most entries that it can have; None where nothing bounds them.
    stays_sparse
        Whether the sender keeps it sparse even where the dense form takes fewer bytes.
    """

    size: int
    dtype: torch.dtype
    width: int | None
    max_nnz: int | None = None
    stays_sparse: bool = False

    @classmethod
    def like(
        cls,
        stream: SparseStream,
        max_nnz: int | None = None,
        size: int | None = None,
        stays_sparse: bool = False,
    ) -> Self:
        """Expect a stream like ``stream``, of its size or of ``size``."""
        size = stream.size if size is None else size
        return cls(size, stream.dtype, stream.width, max_nnz, stays_sparse)

    @property
    def value_bytes(self) -> int:
        """Bytes of one coordinate's value, or of its row of values."""
        return self.dtype.itemsize * (1 if self.width is None else self.width)


Message: TypeAlias = Sequence[Tensor]
"""Bytes (uint8): the header and the payload, or one tensor that holds both."""


def message_of(header: Header, parts: Sequence[Tensor]) -> Message:
    """Return the message of a header and the payload's contiguous parts, each padded."""
    if isinstance(header.finite, Tensor):
        certain = header._replace(finite=True).pack()
        return kernels.join_message(parts, certain, header.finite, VOID)
    return kernels.join_message(parts, header.pack())


def payload_of(message: Message) -> Tensor:
    """Return the bytes after the header."""
    return message[1] if len(message) == 2 else message[0][HEADER_BYTES:]


def nbytes_of(message: Message) -> int:
    """Return the bytes of a message."""
    return sum([part.numel() for part in message])


def whole(message: Message) -> Tensor:
    """Return a message in one tensor, on the payload's device."""
    if len(message) == 1:
        return message[0]
    place = message[-1].device
    return torch.cat([put(part, place, part.dtype) if part.is_cpu else part for part in message])


def joined(messages: Sequence[Message]) -> Message:
    """Return the parts of several messages in one: the headers, then the payloads."""
    if len(messages) == 1:
        return messages[0]
    headers = [m[0] if len(m) == 2 else m[0][:HEADER_BYTES] for m in messages]
    return [*headers, *map(payload_of, messages)]


def cut(parts: Sequence[Tensor], count: int) -> list[Message]:
    """Return the ``count`` messages that `joined` has joined; only the headers are read.

    Parameters
    ----------
    parts
        As a communicator returns them: whole, the headers and the payloads apart, or as `joined`.

    Raises
    ------
    FormatError
        When the bytes are not so many messages.
    """
    if count == 1:
        return [parts]
    if len(parts) == 1:
        parts = (parts[0][: count * HEADER_BYTES], parts[0][count * HEADER_BYTES :])
    if len(parts) == 2:
        control, payload = parts
        headers = control.split(HEADER_BYTES)
        lengths = [Header.parse(header).payload_bytes for header in headers]
        if len(headers) != count or sum(lengths) != payload.numel():
            raise FormatError(
                f"{len(headers)} of {count} headers, which announce {sum(lengths)} bytes, and"
                f" {payload.numel()} bytes"
            )
        parts = (*headers, *payload.split(lengths))
    if len(parts) != 2 * count:
        raise FormatError(f"{len(parts)} parts are not {count} headers and payloads")
    return list(zip(parts[:count], parts[count:], strict=True))
