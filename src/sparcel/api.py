"""The public collectives: they check arguments, take any group, and can run asynchronously."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeVar, overload

from sparcel import auto, collectives
from sparcel._checks import check_type, flag, whole_number
from sparcel.comm import Communicator, Group, Job, resolve
from sparcel.errors import InputError, known
from sparcel.formats import FORMATS_BY_NAME
from sparcel.ops import Op
from sparcel.ops import resolve as resolve_op
from sparcel.stream import SparseStream
from sparcel.wire import Wire

T = TypeVar("T")


@overload
def all_reduce(
    stream: SparseStream,
    op: str | Op = ...,
    algorithm: str = ...,
    group: Group = ...,
    async_op: Literal[False] = ...,
    max_nnz: int | None = ...,
    format: str = ...,
) -> SparseStream: ...
@overload
def all_reduce(
    stream: SparseStream,
    op: str | Op = ...,
    algorithm: str = ...,
    group: Group = ...,
    *,
    async_op: Literal[True],
    max_nnz: int | None = ...,
    format: str = ...,
) -> Job[SparseStream]: ...
def all_reduce(
    stream: SparseStream,
    op: str | Op = "sum",
    algorithm: str = "auto",
    group: Group = None,
    async_op: bool = False,
    max_nnz: int | None = None,
    format: str = "coo",
) -> SparseStream | Job[SparseStream]:
    """Reduce the streams of all ranks, coordinate by coordinate; every rank gets the result.

    Parameters
    ----------
    stream
        Size, dtype and width must be the same on every rank; the number of entries may differ.
    op
        ``"sum"``, ``"product"``, ``"min"``, ``"max"``, or an `Op`. An absent coordinate holds the
        operation's neutral element.
    algorithm
        ``"dense"``, ``"allgather"``, ``"recursive_doubling"``, ``"halving_doubling"``,
        ``"split_allgather"``, ``"ring"``, or ``"auto"``, which picks the algorithm that the cost
        model predicts to be the fastest. The prediction depends on the communicator's ``rates``
        (see `sparcel.cost.measure`) and on the most entries that any rank has. If ``max_nnz`` is
        None, the ranks exchange their counts first.
    group
        A torch process group, an mpi4py communicator, a sparcel communicator, or None for torch's
        default group.
    async_op
        Return a `Job` at once; its ``wait()`` gives the result.
    max_nnz
        An upper bound on the entries of every rank's stream. All ranks must pass the same value.
        It saves rounds and receive buffers.
    format
        ``"coo"``, which sends an index in 32 or 64 bits, or ``"packed"``, which sends it in
        log₂(size / entries) + 2 bits. Both are exact. Packing and unpacking take about 3 ns an
        index, which pays on networks of a few Gbit/s or less. Sums stay sparse longer with it.
        All ranks must pass the same.

    Returns
    -------
    SparseStream or Job
        Bit-identical on all ranks and in every run. The exception is ``"dense"``, which ``"auto"``
        may choose: there the engine decides. The result is dense if that takes fewer bytes, and
        shares no memory with the input.

    Raises
    ------
    InputError
        For an unknown operation, algorithm or format, a stream on the wrong device, or one with
        more entries than ``max_nnz``.
    MismatchError
        On all ranks, when they differ in size, dtype, width, operation, algorithm, ``max_nnz`` or
        ``format``, or call another collective. It says which ranks called what.
    CommunicationError
        When a peer fails or does not answer within the timeout.

    Source: SparCML, section 5.3.
    """
    op, comm = resolve_op(op), _communicator(group, stream)
    collectives.check_algorithm(algorithm, op)
    layout = FORMATS_BY_NAME[known(format, FORMATS_BY_NAME, "format")]
    if max_nnz is not None:
        max_nnz = whole_number(max_nnz, "max_nnz", at_least=0)

    def job() -> SparseStream:
        if max_nnz is not None and stream.nnz > max_nnz:
            raise InputError(
                f"max_nnz must bound the entries of every rank's stream, got {max_nnz} for a stream"
                f" of {stream.nnz}; leave max_nnz out if no bound is known"
            )
        wire = Wire(comm, layout)
        return _unshared(auto.all_reduce(stream, wire, op, algorithm, max_nnz), stream)

    return _start(comm, job, async_op)


@overload
def all_gather(
    stream: SparseStream, group: Group = ..., async_op: Literal[False] = ...
) -> list[SparseStream]: ...
@overload
def all_gather(
    stream: SparseStream, group: Group = ..., *, async_op: Literal[True]
) -> Job[list[SparseStream]]: ...
def all_gather(
    stream: SparseStream, group: Group = None, async_op: bool = False
) -> list[SparseStream] | Job[list[SparseStream]]:
    """Return a list of the streams of all ranks; sizes, dtypes and widths must be the same.

    Raises
    ------
    InputError, MismatchError, CommunicationError
        As `all_reduce`.
    """
    comm = _communicator(group, stream)

    def job() -> list[SparseStream]:
        return [_copy(part) for part in collectives.all_gather(stream, Wire(comm))]

    return _start(comm, job, async_op)


@overload
def reduce_scatter(
    stream: SparseStream, op: str | Op = ..., group: Group = ..., async_op: Literal[False] = ...
) -> SparseStream: ...
@overload
def reduce_scatter(
    stream: SparseStream, op: str | Op = ..., group: Group = ..., *, async_op: Literal[True]
) -> Job[SparseStream]: ...
def reduce_scatter(
    stream: SparseStream, op: str | Op = "sum", group: Group = None, async_op: bool = False
) -> SparseStream | Job[SparseStream]:
    """Reduce the streams of all ranks; rank r gets coordinates ``[r·n // P, (r+1)·n // P)``.

    The result is numbered from the start of the rank's region.

    Raises
    ------
    InputError, MismatchError, CommunicationError
        As `all_reduce`.
    """
    op, comm = resolve_op(op), _communicator(group, stream)

    def job() -> SparseStream:
        return _unshared(collectives.reduce_scatter(stream, Wire(comm), op), stream)

    return _start(comm, job, async_op)


@overload
def broadcast(
    stream: SparseStream | None,
    root: int = ...,
    group: Group = ...,
    async_op: Literal[False] = ...,
) -> SparseStream: ...
@overload
def broadcast(
    stream: SparseStream | None, root: int = ..., group: Group = ..., *, async_op: Literal[True]
) -> Job[SparseStream]: ...
def broadcast(
    stream: SparseStream | None, root: int = 0, group: Group = None, async_op: bool = False
) -> SparseStream | Job[SparseStream]:
    """Return the root's stream on every rank; the other ranks pass None.

    Rounds: 2⌈log₂P⌉, and ⌈log₂P⌉ more for long streams: see `sparcel.collectives.broadcast`.

    Raises
    ------
    InputError
        When ``root`` is not a rank, or the root passes None.
    MismatchError, CommunicationError
        As `all_reduce`.
    """
    comm = resolve(group) if stream is None else _communicator(group, stream)
    root = whole_number(root, "root")
    if not 0 <= root < comm.size:
        raise InputError(f"root must be a rank in [0, {comm.size}), got {root}")

    def job() -> SparseStream:
        if comm.rank == root and stream is None:  # the others do not know, and would wait
            raise InputError(f"rank {root} is the root and must pass a stream, got None")
        return _copy(collectives.broadcast(stream, Wire(comm), root))

    return _start(comm, job, async_op)


def _communicator(group: Group, stream: SparseStream) -> Communicator:
    comm = resolve(group)
    check_type(
        stream,
        SparseStream,
        "stream",
        "make one with SparseStream.from_dense(vector) or sparcel.topk(vector, k)",
    )
    if stream.device.type != comm.device.type:
        raise InputError(
            f"the stream is on {stream.device}, the group communicates from {comm.device};"
            f" move the stream to {comm.device}"
        )
    return comm


def _unshared(result: SparseStream, stream: SparseStream) -> SparseStream:
    """Return the result, copied if it shares memory with the input (only when P = 1)."""
    if result.values.untyped_storage().data_ptr() != stream.values.untyped_storage().data_ptr():
        return result
    return _copy(result)


def _copy(stream: SparseStream) -> SparseStream:
    """Return a copy. Decoded tensors are views of a message, and simulated ranks share messages."""
    indices = None if stream.indices is None else stream.indices.clone()
    return SparseStream.unchecked(indices, stream.values.clone(), stream.size, stream.finite)


def _start(comm: Communicator, job: Callable[[], T], async_op: bool) -> T | Job[T]:
    return comm.submit(job) if flag(async_op, "async_op") else comm.run(job)
