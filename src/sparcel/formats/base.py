"""What a format is: how streams become messages, and how long these are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from sparcel.formats.header import Header
from sparcel.ops import Op
from sparcel.stream import SparseStream


class Encoded(NamedTuple):
    """A message, and what it lost.

    ``message`` is uint8 ``[nbytes]``. ``error`` is the stream minus what decoding the message
    gives, dense, ``[size]``; None for a message that holds the stream exactly.
    """

    message: Tensor
    error: Tensor | None = None


class Format(Protocol):
    """Lays streams out in bytes.

    All ranks use the same format. Whether a stream travels sparse or dense is decided before it is
    encoded, from its count of entries alone (`dense_from`), so that all ranks decide alike.
    ``value_bytes`` are the bytes of one coordinate's value, or row of values, in memory; they may
    be 0, for streams of indices alone. Formats are values: equal ones have equal hashes, because
    choices are remembered by them.
    """

    def __hash__(self) -> int:
        """Return the hash of the format's settings."""

    @property
    def kind(self) -> int:
        """The number in the header of the messages that `decode` reads; no two formats share it."""

    def encode(self, stream: SparseStream, start: int = 0) -> Encoded:
        """Return the message that holds ``stream`` as it is, sparse or dense.

        A stream that the format has no use for may be encoded by another format, such as `COO`.
        ``start`` is the place of its first coordinate in the whole vector.
        """

    def decode(self, message: Tensor, header: Header) -> SparseStream:
        """Return the stream in ``message``, which has the length that its header says.

        The tensors may be views of the message.

        Raises
        ------
        FormatError
            When the message contradicts its header or itself. It is never read out of bounds.
        """

    def expected_bytes(self, nnz: float | None, size: float, value_bytes: int) -> float:
        """Return how long a message of ``nnz`` of ``size`` coordinates is, on average.

        ``nnz`` None is a dense message. Predictions are made with it, also of fractions of entries.
        """

    def max_bytes(self, nnz: int | None, size: int, value_bytes: int) -> int:
        """Return how long a message of up to ``nnz`` of ``size`` coordinates can be; as above."""

    def dense_from(self, size: int, value_bytes: int) -> int:
        """Return the count of entries from which a stream travels dense."""

    def reduce_messages(
        self, messages: Sequence[Tensor], like: SparseStream, op: Op
    ) -> SparseStream | None:
        """Reduce the streams of messages without decoding them, in the order given.

        Returns None where the format cannot do that, for whatever reason; the caller then decodes.
        """
