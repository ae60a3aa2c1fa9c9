"""The interface of formats: how streams become messages, and how long the messages are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, Self

import torch
from torch import Tensor

from sparcel.formats.header import Header
from sparcel.ops import Op
from sparcel.stream import SparseStream


class Encoded(NamedTuple):
    """A message, and its encoding error.

    ``message`` is uint8 ``[nbytes]``. ``error`` is the stream minus the decoded message, at the
    stream's coordinates; None if the message holds the stream exactly.
    """

    message: Tensor
    error: SparseStream | None = None


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


class Format(Protocol):
    """Encodes streams as bytes.

    All ranks use the same format. Whether a stream travels sparse or dense is decided before it is
    encoded. The count of entries alone decides (`dense_from`), so all ranks agree.
    ``value_bytes`` are the bytes of one coordinate's value, or row of values, in memory; they may
    be 0, for streams of indices alone.
    """

    def __hash__(self) -> int:
        """Return a hash, equal for equal formats: cached choices are keyed by formats."""

    @property
    def kind(self) -> int:
        """The number in the header of the messages that `decode` reads; no two formats share it."""

    def encode(self, stream: SparseStream, start: int = 0) -> Encoded:
        """Return the message that holds ``stream`` as it is, sparse or dense.

        A stream that the format has no use for may be encoded by another format, such as `COO`.
        ``start`` is the position of the stream's first coordinate in the whole vector.
        """

    def decode(self, message: Tensor, header: Header) -> SparseStream:
        """Return the stream in ``message``, whose length matches its header.

        The tensors may be views of the message.

        Raises
        ------
        FormatError
            When the message contradicts its header or itself. Decoding never reads out of bounds.
        """

    def expected_bytes(self, nnz: float | None, size: float, value_bytes: int) -> float:
        """Return the average bytes of a message with ``nnz`` of ``size`` coordinates.

        If ``nnz`` is None, the message is dense. Predictions use this function, so counts may be
        fractions.
        """

    def max_bytes(self, nnz: int | None, size: int, value_bytes: int) -> int:
        """Return the bytes of the longest message with up to ``nnz`` of ``size`` coordinates.

        If ``nnz`` is None, the message is dense.
        """

    def dense_from(self, size: int, value_bytes: int) -> int:
        """Return the count of entries from which a stream travels dense."""

    def reduce_messages(
        self, messages: Sequence[Tensor], like: SparseStream, op: Op
    ) -> SparseStream | None:
        """Reduce the streams of messages without decoding them, in the order given.

        Returns None if the format cannot do that; the caller then decodes the messages.
        """
