"""The public collectives: they check arguments, take any group, and can run asynchronously."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Required, TypeAlias, TypedDict, Unpack, overload

from sparcel.core import auto, collectives
from sparcel.core._checks import check_type, checked_flag, checked_whole
from sparcel.core.comm import Communicator, Group, Job, resolve
from sparcel.core.device import settle
from sparcel.core.formats import Format, format_named
from sparcel.core.ops import SUM, Op
from sparcel.core.ops import resolve as resolve_op
from sparcel.core.stream import SparseStream, reduce
from sparcel.core.wire import Wire
from sparcel.errors import InputError, checked_name

Exact: TypeAlias = Literal["raw", "packed", "chunked", "auto"]
"""The formats that lose nothing, by name; with any other the result is ``(result, lost)``."""


class _Exact(TypedDict, total=False):
    async_op: Literal[False]
    format: Exact


class _ExactJob(TypedDict, total=False):
    async_op: Required[Literal[True]]
    format: Exact


class _Rounded(TypedDict, total=False):
    async_op: bool
    format: Required[str | Format]


@overload
def all_reduce(
    stream: SparseStream,
    op: str | Op = ...,
    algorithm: str = ...,
    group: Group = ...,
    *,
    max_nnz: int | None = ...,
    **how: Unpack[_Exact],
) -> SparseStream: ...
@overload
def all_reduce(
    stream: SparseStream,
    op: str | Op = ...,
    algorithm: str = ...,
    group: Group = ...,
    *,
    max_nnz: int | None = ...,
    **how: Unpack[_ExactJob],
) -> Job[SparseStream]: ...
@overload
def all_reduce(
    stream: SparseStream,
    op: str | Op = ...,
    algorithm: str = ...,
    group: Group = ...,
    *,
    max_nnz: int | None = ...,
    **how: Unpack[_Rounded],
) -> Any: ...
def all_reduce(
    stream: SparseStream,
    op: str | Op = "sum",
    algorithm: str = "auto",
    group: Group = None,
    async_op: bool = False,
    max_nnz: int | None = None,
    format: str | Format = "raw",
) -> Any:
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
        default group. Streams on a GPU go over NCCL if the process group has it, and otherwise by
        way of the host.
    async_op
        Return a `Job` at once; its ``wait()`` gives the result. On a GPU the work begins after what
        is queued on the current stream, and what is queued after ``wait()`` uses the result.
    max_nnz
        An upper bound on the entries of every rank's stream. All ranks must pass the same value.
        It saves rounds and receive buffers.
    format
        How streams travel, the same on all ranks: a `Format`, or its name. ``"raw"`` sends an index
        in 32 or 64 bits, ``"packed"`` in about log₂(size / entries) + 2 bits; both are exact.
        Packing and unpacking take a few ns an index, which pays on networks of a few Gbit/s or
        less. Sums stay sparse longer with it. ``"auto"`` is the one of them that is predicted to
        take the least time. ``"packed:4"``, ``"raw:bfloat16"`` and their like round the values of
        streams and of sums, which must be sums of scalar floats.

    Returns
    -------
    SparseStream or Job
        Bit-identical on all ranks and in every run, but for ``"dense"``, which ``"auto"`` may
        choose, over MPI or NCCL: there the engine decides. The result of ``"dense"`` is dense.
        Any other stores what some rank stores, also where values cancel out, is dense if that takes
        fewer bytes, and shares no memory with the input. With a format that rounds: the pair of the
        result and the stream that this rank lost, over the whole vector. The result plus what all
        ranks lost is the sum; add it to what is sent next, and nothing is lost in the end.

    Raises
    ------
    InputError
        For an unknown operation, algorithm or format, a format that rounds for rows, integers or
        another operation than the sum, a stream on a device that the group does not reach, one with
        more entries than ``max_nnz``, or while a CUDA graph is captured.
    MismatchError
        On all ranks, when they differ in size, dtype, width, operation, algorithm, ``max_nnz`` or
        ``format``, or call another collective. It says which ranks called what.
    CommunicationError
        When a peer fails or does not answer within the timeout.

    Source: SparCML, section 5.3.
    """
    op, comm = resolve_op(op), _communicator(group, stream)
    collectives.check_algorithm(algorithm, op)
    max_nnz = _checked_bound(max_nnz)

    def reduced(wire: Wire) -> SparseStream:
        return _unshared(auto.all_reduce(stream, wire, op, algorithm, max_nnz), stream)

    return _run(comm, reduced, stream, format, async_op, op, max_nnz)


@overload
def all_reduce_topk(
    stream: SparseStream,
    k: int,
    algorithm: str = ...,
    group: Group = ...,
    async_op: Literal[False] = ...,
    max_nnz: int | None = ...,
    format: str | Format = ...,
) -> tuple[SparseStream, SparseStream]: ...
@overload
def all_reduce_topk(
    stream: SparseStream,
    k: int,
    algorithm: str = ...,
    group: Group = ...,
    *,
    async_op: Literal[True],
    max_nnz: int | None = ...,
    format: str | Format = ...,
) -> Job[tuple[SparseStream, SparseStream]]: ...
def all_reduce_topk(
    stream: SparseStream,
    k: int,
    algorithm: str = "oktopk",
    group: Group = None,
    async_op: bool = False,
    max_nnz: int | None = None,
    format: str | Format = "raw",
) -> Any:
    """Sum the streams of all ranks, and keep the k largest magnitudes; every rank gets them.

    Parameters
    ----------
    stream
        Scalar float values, mostly those that this rank has selected; size and dtype must be the
        same on every rank.
    k
        How many coordinates of the sum are kept, at most; the same on every rank. Zeros never are.
    algorithm
        ``"oktopk"`` finds the k largest of the sum, ties going to the lowest index, and sends
        a few times k words, whatever P. ``"gathered_topk"`` finds them by sending every stream to
        every rank. ``"gtopk"`` adds streams in pairs up a tree and keeps the k largest of each sum,
        which comes close to the k largest of all in few rounds.
    group, async_op, max_nnz, format
        As for `all_reduce`. A format that rounds may change which coordinates are the largest.

    Returns
    -------
    total, lost
        The selected sums, sparse and the same on all ranks, and what this rank alone lost: sums or
        parts of them that were not selected, and what rounding took. ``total`` and all ranks'
        ``lost`` make up the sum of the streams; add ``lost`` to what is sent next, and nothing is
        lost in the end. If a stream or a sum is not finite, neither is ``total``, and both are
        without meaning. With ``async_op``, a `Job` whose ``wait()`` returns the two.

    Raises
    ------
    InputError
        For an unknown algorithm or format, values that are not scalar floats, or a stream with
        more entries than ``max_nnz``.
    MismatchError, CommunicationError
        As `all_reduce`.

    Source: Ok-Topk, Algorithm 1; gTop-k, Algorithms 2 and 3.
    """
    comm, k = _communicator(group, stream), checked_whole(k, "k", at_least=1)
    collectives.check_selectable(stream)
    select = collectives.SELECTING[checked_name(algorithm, collectives.SELECTING, "algorithm")]
    max_nnz = _checked_bound(max_nnz)

    def selected(wire: Wire) -> tuple[SparseStream, SparseStream]:
        found = select(stream, wire, k, max_nnz)
        return _copy(found.total), reduce([found.dropped, *_lost(wire, stream.size)])

    return _run(comm, selected, stream, format, async_op, SUM, max_nnz, tells_lost=True)


@overload
def all_gather(
    stream: SparseStream, group: Group = ..., **how: Unpack[_Exact]
) -> list[SparseStream]: ...
@overload
def all_gather(
    stream: SparseStream, group: Group = ..., **how: Unpack[_ExactJob]
) -> Job[list[SparseStream]]: ...
@overload
def all_gather(stream: SparseStream, group: Group = ..., **how: Unpack[_Rounded]) -> Any: ...
def all_gather(
    stream: SparseStream,
    group: Group = None,
    async_op: bool = False,
    format: str | Format = "raw",
) -> Any:
    """Return a list of the streams of all ranks; sizes, dtypes and widths must be the same.

    ``format`` is as for `all_reduce`. With one that rounds, the streams are rounded, this rank's
    too, and the result is the pair of the list and what this rank lost.

    Raises
    ------
    InputError, MismatchError, CommunicationError
        As `all_reduce`.
    """
    comm = _communicator(group, stream)

    def gathered(wire: Wire) -> list[SparseStream]:
        return [_copy(part) for part in collectives.all_gather(stream, wire)]

    return _run(comm, gathered, stream, format, async_op)


@overload
def reduce_scatter(
    stream: SparseStream, op: str | Op = ..., group: Group = ..., **how: Unpack[_Exact]
) -> SparseStream: ...
@overload
def reduce_scatter(
    stream: SparseStream, op: str | Op = ..., group: Group = ..., **how: Unpack[_ExactJob]
) -> Job[SparseStream]: ...
@overload
def reduce_scatter(
    stream: SparseStream, op: str | Op = ..., group: Group = ..., **how: Unpack[_Rounded]
) -> Any: ...
def reduce_scatter(
    stream: SparseStream,
    op: str | Op = "sum",
    group: Group = None,
    async_op: bool = False,
    format: str | Format = "raw",
) -> Any:
    """Reduce the streams of all ranks; rank r gets coordinates ``[r·n // P, (r+1)·n // P)``.

    The result is numbered from the start of the rank's region. ``format`` is as for `all_reduce`.
    With one that rounds, the result is the pair of the region, which is not rounded itself, and
    what this rank lost, over the whole vector.

    Raises
    ------
    InputError, MismatchError, CommunicationError
        As `all_reduce`.
    """
    op, comm = resolve_op(op), _communicator(group, stream)

    def region(wire: Wire) -> SparseStream:
        return _unshared(collectives.reduce_scatter(stream, wire, op), stream)

    return _run(comm, region, stream, format, async_op, op)


@overload
def broadcast(
    stream: SparseStream | None, root: int = ..., group: Group = ..., **how: Unpack[_Exact]
) -> SparseStream: ...
@overload
def broadcast(
    stream: SparseStream | None, root: int = ..., group: Group = ..., **how: Unpack[_ExactJob]
) -> Job[SparseStream]: ...
@overload
def broadcast(
    stream: SparseStream | None, root: int = ..., group: Group = ..., **how: Unpack[_Rounded]
) -> Any: ...
def broadcast(
    stream: SparseStream | None,
    root: int = 0,
    group: Group = None,
    async_op: bool = False,
    format: str | Format = "raw",
) -> Any:
    """Return the root's stream on every rank; the other ranks pass None.

    They get it on the device from which the group communicates: the CPU, or NCCL's GPU.

    ``format`` is as for `all_reduce`, except ``"auto"``. With one that rounds, the result is the
    pair of the stream, which is rounded on the root too, and what this rank lost.

    Raises
    ------
    InputError
        When ``root`` is not a rank, or the root passes None.
    MismatchError, CommunicationError
        As `all_reduce`.
    """
    comm = resolve(group) if stream is None else _communicator(group, stream)
    root = checked_whole(root, "root")
    if not 0 <= root < comm.size:
        raise InputError(f"root must be a rank in [0, {comm.size}), got {root}")
    if format == "auto":
        raise InputError(
            'format="auto" needs every rank\'s stream, and the other ranks have none; pass "raw" or'
            ' "packed"'
        )

    def sent(wire: Wire) -> SparseStream:
        if comm.rank == root and stream is None:  # the others do not know, and would wait
            raise InputError(f"rank {root} is the root and must pass a stream, got None")
        return _copy(collectives.broadcast(stream, wire, root))

    return _run(comm, sent, stream, format, async_op)


def _checked_bound(max_nnz: int | None) -> int | None:
    return None if max_nnz is None else checked_whole(max_nnz, "max_nnz", at_least=0)


def _run(
    comm: Communicator,
    collective: Callable[[Wire], Any],
    stream: SparseStream | None,
    format: str | Format,
    async_op: bool,
    op: Op = SUM,
    max_nnz: int | None = None,
    tells_lost: bool = False,
) -> Any:
    """Run a collective over a wire of the group, at once or as a job, and return its result.

    With a format that rounds, what this rank lost is returned as well, unless the collective
    ``tells_lost`` itself. ``stream`` is None on a rank that only receives. Raises `InputError` when
    the format is unknown, or cannot hold such a stream and its sums, and when the stream exceeds
    ``max_nnz``.
    """
    layout = None if format == "auto" else format_named(format)
    if layout is not None and layout.loses and stream is not None:
        layout.check_holds(stream.dtype, stream.width)
        if op != SUM:
            raise InputError(
                f"the format {layout.name!r} rounds, which only sums allow, got {op};"
                f" use {layout.exact.name!r}, which loses nothing"
            )

    def job() -> Any:
        if max_nnz is not None and stream is not None and stream.nnz > max_nnz:
            raise InputError(
                f"max_nnz must bound the entries of every rank's stream, got {max_nnz} for a stream"
                f" of {stream.nnz}; leave max_nnz out if no bound is known"
            )
        wire = Wire(comm, layout or _fastest_format(comm, stream, max_nnz))
        result = collective(wire)
        if wire.format.loses and not tells_lost:
            like = result if stream is None else stream
            result = result, reduce([like.empty_like(), *_lost(wire, like.size)])
        settle()  # nobody else asks whether messages from a GPU were sound
        return result

    return comm.submit(job) if checked_flag(async_op, "async_op") else comm.run(job)


def _lost(wire: Wire, size: int) -> list[SparseStream]:
    """Return what rounding took from this rank, as streams over a vector of ``size``."""
    return [part.placed(start, size) for start, part in wire.take_lost()]


def _fastest_format(comm: Communicator, stream: SparseStream | None, max_nnz: int | None) -> Format:
    """Return the exact format that is predicted to be the fastest; all ranks call."""
    assert stream is not None, "broadcast refuses auto"
    most = max(comm.gather_numbers(stream.nnz)) if max_nnz is None else max_nnz
    return auto.fastest_format(stream.size, min(most, stream.size), comm.rates)


def _communicator(group: Group, stream: SparseStream) -> Communicator:
    """Return the communicator of a group; raise `InputError` unless it reaches the stream."""
    check_type(
        stream,
        SparseStream,
        "stream",
        "make one with SparseStream.from_dense(vector) or sparcel.topk(vector, k)",
    )
    comm = resolve(group, stream.device)
    if stream.device != comm.device:
        raise InputError(
            f"the stream is on {stream.device}, the group communicates from {comm.device};"
            f" move the stream to {comm.device}"
        )
    return comm


def _unshared(result: SparseStream, stream: SparseStream) -> SparseStream:
    """Return the result, copied if it shares memory with the input (only when P = 1)."""
    shared = result.values.untyped_storage()._cdata == stream.values.untyped_storage()._cdata
    return _copy(result) if shared else result


def _copy(stream: SparseStream) -> SparseStream:
    """Return a copy. Decoded tensors are views of a message, and simulated ranks share messages."""
    indices = None if stream.indices is None else stream.indices.clone()
    return SparseStream.unchecked(indices, stream.values.clone(), stream.size, stream.finite)
