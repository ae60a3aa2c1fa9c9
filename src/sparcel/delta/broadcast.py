"""Chunks from one rank to all others, over sparcel's wires."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sparcel import api
from sparcel.comm import Group, Job, resolve
from sparcel.errors import InputError
from sparcel.stream import SparseStream


class Arriving:
    """Chunks on their way: they travel in the background until somebody waits for them."""

    def __init__(self, job: Job[SparseStream], error: Exception | None = None) -> None:
        self._job, self._error = job, error

    def wait(self) -> list[bytes]:
        """Return the chunks when all are there; raise what `broadcast` raises."""
        values = self._job.wait().values
        if self._error is not None:
            raise self._error
        return _split(values)


@overload
def broadcast(
    chunks: Iterable[bytes] | None,
    group: Group = ...,
    root: int = ...,
    async_op: Literal[False] = ...,
) -> list[bytes]: ...
@overload
def broadcast(
    chunks: Iterable[bytes] | None, group: Group = ..., root: int = ..., *, async_op: Literal[True]
) -> Arriving: ...
def broadcast(
    chunks: Iterable[bytes] | None, group: Group = None, root: int = 0, async_op: bool = False
) -> list[bytes] | Arriving:
    """Return the root's chunks on every rank; the other ranks pass None.

    Few bytes go down a tree; more are scattered, and gathered from all ranks, so that the root
    sends them about twice, however many ranks there are.

    Parameters
    ----------
    chunks
        What `encode` made, on the root.
    group
        As for `sparcel.broadcast`.
    root
        The rank that has the chunks.
    async_op
        Return at once with an `Arriving`; servers go on with the old version until they wait.

    Raises
    ------
    InputError
        If the root has no chunks to send; the root raises its own error, if making them failed.
        The group can be used after that.
    InputError, MismatchError, CommunicationError
        As `sparcel.broadcast`.
    """
    comm = resolve(group)
    stream, error = None, None
    if comm.rank == root:
        try:
            stream = _joined(chunks)
        except Exception as failure:  # the others must know, and would wait
            stream, error = _words(np.array([-1])), failure
    arriving = Arriving(api.broadcast(stream, root, comm, async_op=True), error)
    return arriving if async_op else arriving.wait()


def _joined(chunks: Iterable[bytes] | None) -> SparseStream:
    """Return chunks as words: how many there are, the length of each, and their bytes."""
    if chunks is None:
        raise InputError("the root must pass chunks, got None")
    chunks = list(chunks)
    lengths = np.array([len(chunks), *map(len, chunks)], np.int64)
    data = b"".join([lengths.tobytes(), *chunks])
    return _words(np.frombuffer(data + bytes(-len(data) % 8), np.int64).copy())


def _words(words: NDArray[np.int64]) -> SparseStream:
    return SparseStream(None, torch.from_numpy(words), len(words))


def _split(words: Tensor) -> list[bytes]:
    numbers = words.cpu().numpy()
    count = int(numbers[0])
    if count < 0:
        raise InputError("the root has no chunks to send; its own error says why")
    data = numbers[1 + count :].data.cast("B")
    ends = np.cumsum(numbers[1 : 1 + count]).tolist()
    return [bytes(data[begin:end]) for begin, end in zip([0, *ends], ends, strict=False)]
