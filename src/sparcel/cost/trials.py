"""The trials that `measure` times: exchanges in each pattern, and work on synthetic streams."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from sparcel import formats, kernels, patterns
from sparcel.comm import Communicator
from sparcel.formats import COO
from sparcel.ops import SUM
from sparcel.stream import SparseStream, concatenate

Run = Callable[[], object]


@dataclass(frozen=True)
class Trial:
    """A call to time, which consists of ``rounds`` equal consecutive parts."""

    run: Run
    rounds: int = 1


def exchanges(
    comm: Communicator, ranks_per_node: int
) -> Iterator[tuple[str, Callable[[int], Trial]]]:
    """Yield each pattern's name, and a function from a message's bytes to a trial."""
    everybody = comm.size
    here = ranks_per_node if ranks_per_node < everybody else 1
    yield "pair", lambda nbytes: _in_turn(comm, _partners(comm.rank, here, everybody), nbytes)
    yield "shift", lambda nbytes: _in_turn(comm, _neighbours(comm.rank, here, everybody), nbytes)
    yield "tree", lambda nbytes: _broadcast(comm, nbytes, here)
    yield "rotate", lambda nbytes: _to_all(comm, nbytes, range(everybody))
    yield "gather", lambda nbytes: _gather(comm, nbytes)
    if here > 1:
        first = comm.rank // here * here
        place, members = comm.rank - first, range(first, first + here)

        def inside(peers: list[tuple[int, int]]) -> list[tuple[int, int]]:
            return [(first + to, first + source) for to, source in peers]

        yield "node.pair", lambda nbytes: _in_turn(comm, inside(_partners(place, 1, here)), nbytes)
        yield (
            "node.shift",
            lambda nbytes: _in_turn(comm, inside(_neighbours(place, 1, here)), nbytes),
        )
        yield "node.rotate", lambda nbytes: _to_all(comm, nbytes, members)


def engine_sum(comm: Communicator, dtype: torch.dtype) -> Callable[[int], Trial]:
    """Return a function from a vector's bytes to a trial of the engine's all-reduce."""

    def trial(nbytes: int) -> Trial:
        vector = torch.zeros(nbytes // dtype.itemsize, dtype=dtype)
        return Trial(lambda: comm.all_reduce(vector))

    return trial


def work(ranks: int, seed: int) -> dict[str, Callable[[int], Trial]]:
    """Return, for each kind of work, a function from an amount to a trial."""

    def of_stream(task: Callable[[SparseStream], object]) -> Callable[[int], Trial]:
        def trial(amount: int) -> Trial:
            stream = _stream(amount, seed)
            return Trial(lambda: task(stream))

        return trial

    return {
        "select": lambda size: _select(size, seed),
        "topk": of_stream(lambda stream: stream.topk(-(-stream.nnz // 2))),
        "largest": of_stream(lambda stream: stream.largest(-(-stream.nnz // 2))),
        "merge": lambda entries: _merge(entries, 2, seed),
        "merge.many": lambda entries: _merge(entries, ranks, seed),
        "split": lambda entries: _split(entries, ranks, seed),
        "join": lambda entries: _join(entries, ranks, seed),
        "small": _small,
        "scatter": lambda entries: _scatter(entries, seed),
        "fill": lambda size: _in_place(size, lambda vector: vector.zero_()),
        "add": lambda size: _in_place(size, lambda vector: vector.sub_(1.0)),
        "encode": lambda nbytes: of_stream(COO.encode)(_entries_in(nbytes)),
        "decode": lambda entries: _decode(entries, seed),
        "without": of_stream(lambda stream: stream.without(stream)),
        "histogram": of_stream(
            lambda stream: kernels.magnitude_histogram(stream.values, 20, 1 << 11, None)
        ),
    }


def _entries_in(nbytes: int) -> int:
    """Return how many float32 entries take so many bytes of a message."""
    many, size = 1 << 16, 1 << 24
    each = (COO.max_bytes(many, size, 4) - COO.max_bytes(0, size, 4)) / many
    return round(nbytes / each)


def _partners(rank: int, nearest: int, ranks: int) -> list[tuple[int, int]]:
    """Return a rank's partner in each round, at doubling distances, as (to, from).

    Ranks beyond a power of two are their own partners.
    """
    places, place = ranks // nearest, rank // nearest
    powers = patterns.fold(place, places).powers
    own = rank % nearest
    peers = [peer * nearest + own for peer, *_ in patterns.doubling(place, powers)]
    return [(peer, peer) if place < powers else (rank, rank) for peer in peers]


def _neighbours(rank: int, nearest: int, ranks: int) -> list[tuple[int, int]]:
    """Return the ranks that a rank sends to and receives from in each round of a gather."""
    rounds = patterns.bruck(0, -(-ranks // nearest))
    distances = [nearest * distance for _, _, distance, _ in rounds]
    return [((rank - far) % ranks, (rank + far) % ranks) for far in distances]


def _in_turn(comm: Communicator, peers: list[tuple[int, int]], nbytes: int) -> Trial:
    message = torch.zeros(nbytes, dtype=torch.uint8)

    def run() -> None:
        for to, source in peers:
            if to != comm.rank:
                comm.exchange({to: message}, {source: nbytes})

    return Trial(run, max(1, len(peers)))


def _broadcast(comm: Communicator, nbytes: int, here: int) -> Trial:
    """Send a message down a binomial tree of each node's first rank."""
    held = torch.zeros(nbytes, dtype=torch.uint8)
    levels = patterns.binomial_tree(comm.rank // here, comm.size // here)

    def run() -> None:
        for to, source, *_ in levels if comm.rank % here == 0 else ():
            if to is not None:
                comm.exchange({to * here: held}, {})
            elif source is not None:
                comm.exchange({}, {source * here: nbytes})

    return Trial(run, max(1, len(levels)))


def _to_all(comm: Communicator, nbytes: int, members: range) -> Trial:
    message = torch.zeros(nbytes, dtype=torch.uint8)
    place, count = comm.rank - members.start, len(members)
    rounds = patterns.rotation(place, count)
    sends = {members[to]: message for to, *_ in rounds}
    receives = {members[source]: nbytes for _, source, *_ in rounds}
    return Trial(lambda: comm.exchange(sends, receives), max(1, len(rounds)))


def _gather(comm: Communicator, nbytes: int) -> Trial:
    message = torch.zeros(nbytes, dtype=torch.uint8)
    return Trial(lambda: comm.gather(message, nbytes), comm.size - 1)


def _stream(entries: int, seed: int, gap: int = 100) -> SparseStream:
    """Return a stream that stores about one coordinate in ``gap``."""
    generator = torch.Generator().manual_seed(seed)
    gaps = torch.randint(1, 2 * gap, (entries,), dtype=torch.int32, generator=generator)
    indices = gaps.cumsum(0, dtype=torch.int32)
    values = torch.randn(entries, generator=generator)
    return SparseStream.unchecked(indices, values, 2 * gap * entries)


def _select(size: int, seed: int) -> Trial:
    generator = torch.Generator().manual_seed(seed)
    memory, scratch = torch.zeros(size), torch.empty(size)
    gradient = torch.randn(size, generator=generator)
    k = -(-size // 1000)
    addition = kernels.Addition(memory, gradient, scratch)
    return Trial(lambda: kernels.accumulate_topk(addition, k))


def _merge(entries: int, streams: int, seed: int) -> Trial:
    """Reduce the messages of ``streams`` streams that have ``entries`` entries in total."""
    parts = [_stream(-(-entries // streams), seed + part) for part in range(streams)]
    size = max(part.size for part in parts)
    for part in parts:
        part.size = size
    messages = [COO.encode(part).message for part in parts]
    return Trial(lambda: COO.reduce_messages(messages, parts[0], SUM))


def _split(entries: int, parts: int, seed: int) -> Trial:
    stream = _stream(entries, seed)
    cuts = [part * stream.size // parts for part in range(parts + 1)]
    return Trial(lambda: [part.compact() for part in stream.split(cuts)])


def _join(entries: int, parts: int, seed: int) -> Trial:
    whole = _stream(entries, seed)
    pieces = whole.split([part * whole.size // parts for part in range(parts + 1)])
    return Trial(lambda: concatenate(pieces))


def _small(operations: int) -> Trial:
    counts = torch.arange(1024)

    def run() -> None:
        for _ in range(operations):
            counts.cumsum(0)

    return Trial(run)


def _scatter(entries: int, seed: int) -> Trial:
    stream = _stream(entries, seed, gap=12)
    dense = torch.zeros(stream.size)
    assert stream.indices is not None, "_stream makes sparse streams"
    indices = stream.indices
    return Trial(lambda: kernels.scatter_reduce(dense, indices, stream.values, SUM))


def _in_place(size: int, task: Callable[[Tensor], object]) -> Trial:
    vector = torch.zeros(size)
    return Trial(lambda: task(vector))


def _decode(entries: int, seed: int) -> Trial:
    message = COO.encode(_stream(entries, seed)).message
    return Trial(lambda: formats.decode(message))
