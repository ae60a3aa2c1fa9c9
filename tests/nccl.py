"""Programs over NCCL's communicator: on a GPU over NCCL, elsewhere over Gloo with the card.

`connected` decides which. Over Gloo, what sparcel does with torch.distributed is real; NCCL itself
is not, and the card of `tests.card` takes a GPU's place. `tests.comm.torch.test_nccl` runs these
programs over Gloo, and `tests.gpu.test_nccl` over NCCL, with several ranks on one GPU.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from itertools import count
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.utils._pytree import tree_map_only

from sparcel import SparseStream
from sparcel.core import device
from sparcel.core.collectives import ALGORITHMS, broadcast, gtopk, oktopk
from sparcel.core.comm import Call, Communicator, Engine, TorchCommunicator, carry
from sparcel.core.comm.executor import Executor
from sparcel.core.comm.torch import NcclCommunicator, TorchRendezvous
from sparcel.core.comm.torch.nccl import NcclEngine
from sparcel.core.formats import Format
from sparcel.core.ops import SUM
from sparcel.core.schemes import Hierarchical
from sparcel.core.training import Averager
from sparcel.core.training.ranks import Shard
from sparcel.core.wire import Wire
from sparcel.errors import CommunicationError, MismatchError
from tests.card import CARD, OnCard, moved, on_card, seen
from tests.ddp.models import MANY_BUCKETS
from tests.gpu.cuda import no_waits
from tests.gpu.models import assert_equal, train
from tests.schemes.steps import SCHEMES, integers
from tests.schemes.test_on_card import ALL
from tests.strategies import case_of, full, same_bits
from tests.training.tensors import TENSORS, gradients_of

ON_GPU = torch.cuda.is_available()
CULPRIT = 1
TIMEOUT = 60.0
"""Seconds, of groups of which a rank dies or disagrees; nobody waits for so long."""
SHORT_TIMEOUT = 1.5
"""Of those of which a rank is late."""

EVERY = SCHEMES | ALL
"""All schemes, by name."""

_numbers = count()


class _Ending:
    """A transfer of Gloo's that ends as NCCL's do: an error does not end it, an abort does."""

    def __init__(self, work: dist.Work, engine: OverGloo) -> None:
        self._work, self._engine, self._done = work, engine, threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with suppress(RuntimeError):
            self._work.wait()
            self._done.set()

    def is_completed(self) -> bool:
        return self._engine.aborted or self._done.is_set()

    def wait(self) -> None:
        while not self.is_completed():
            self._done.wait(0.02)


class OverGloo(NcclEngine):
    """The engine over Gloo; ``transferred`` lists the lengths of what each transfer sent."""

    aborted = False

    def __init__(self, *args: Any) -> None:
        self.transferred: list[list[int]] = []
        super().__init__(*args)
        if self.device.type == "cpu":
            self.carrier = "Gloo"

    def _joined(self, members: list[int]) -> dist.ProcessGroup:
        group: dist.ProcessGroup = dist.new_group(
            members,
            timeout=timedelta(seconds=self.timeout + 60),
            backend="gloo",
            use_local_synchronization=True,
        )
        return group

    def _transfer(self, begin: Callable[..., Any], *args: Any) -> None:
        sent = [one[1] for one in args[0]] if isinstance(args[0], list) else [args[-1]]
        self.transferred.append([one.numel() for one in sent if isinstance(one, Tensor)])

        def plain(*args: Any) -> list[Any]:
            return [_Ending(work, self) for work in begin(*tree_map_only(OnCard, seen, args))]

        super()._transfer(plain, *args)

    def abort(self) -> None:
        super().abort()
        self.aborted = True


class _Meeting(TorchRendezvous):
    """Where ranks meet to use NCCL's engine over Gloo."""

    def engine(self) -> Engine:
        store = PrefixStore("idle", self.store)
        return OverGloo(store, self.members, self.rank, self.timeout, self.device)


@contextmanager
def connected(comm: Communicator, place: str = CARD) -> Iterator[NcclCommunicator]:
    """Connect the ranks of a pool by NCCL's communicator meanwhile.

    Parameters
    ----------
    place
        ``"cpu"``: messages are there, and not on the card, if it is used at all.
    """
    assert isinstance(comm, TorchCommunicator)
    if ON_GPU:
        os.environ |= {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "2"}
        gpu = torch.device("cuda", 0)
        torch.cuda.set_device(gpu)
        group = dist.new_group(backend="nccl", timeout=timedelta(seconds=comm.timeout))
        made = TorchCommunicator.of(group, gpu)
        assert isinstance(made, NcclCommunicator)
        yield made
        made.close()
        return
    with on_card() if place == CARD else nullcontext():
        met = comm.rendezvous
        number = comm.gather_numbers(next(_numbers))[0]
        store = PrefixStore(f"nccl {number}", met.store)
        here = torch.device(place, 0) if place == CARD else torch.device(place)
        made = NcclCommunicator(_Meeting(store, met.members, met.rank, met.timeout, "nccl", here))
        yield made
        made.close()


def put(tensor: Tensor, comm: Communicator) -> Tensor:
    """Return a copy of a tensor where a communicator has its messages."""
    return moved(tensor) if comm.device.type == CARD else tensor.to(comm.device, copy=True)


def got(tensor: Tensor) -> Tensor:
    """Return a tensor on the host."""
    return seen(tensor).cpu().clone()


def numbers(rank: int, nbytes: int) -> Tensor:
    return (torch.arange(nbytes) * 7 + rank).to(torch.uint8)


def rows_of(comm: Communicator, in_rows: bool) -> tuple[list[Tensor], list[Tensor], int]:
    """Swap and spread messages of up to 40 bytes; return what came, and how often the host read.

    Parameters
    ----------
    in_rows
        Whether messages are rows, else tensors of exact lengths.
    """
    with connected(comm) as far:
        bounds = [40] * comm.size
        lengths = [48 if in_rows else 30 + to for to in range(comm.size)]
        leaving = [numbers(10 * comm.rank + to, lengths[to]) for to in range(comm.size)]
        message = numbers(comm.rank, 48 if in_rows else 20 + comm.rank)

        there = [put(one, far) for one in leaving]
        rows, own = put(torch.stack(leaving), far) if in_rows else there, put(message, far)

        def job() -> tuple[Any, Any, int]:
            before = device.reads()
            with no_waits() if ON_GPU else nullcontext():
                swapped, spread = far.swap(rows, bounds, len), far.spread(own, bounds, len)
            return swapped, spread, device.reads() - before

        before = far.traffic.bytes_sent
        swapped, spread, reads = far.run(job)
        if comm.size > 1:
            assert swapped.shape == spread.shape == (comm.size, 48)
        assert far.traffic.bytes_sent - before == 2 * 48 * (comm.size - 1)
        return list(map(got, swapped)), list(map(got, spread)), reads


def check_rows(ranks: Sequence[tuple[list[Tensor], list[Tensor], int]], in_rows: bool) -> None:
    """Check what `rows_of` returned on each rank."""
    for rank, (swapped, spread, reads) in enumerate(ranks):
        assert reads == 0
        for source in range(len(ranks)):
            expected = numbers(source, 48 if in_rows else 20 + source)
            assert torch.equal(spread[source][: len(expected)], expected)
            if source != rank:
                expected = numbers(10 * source + rank, 48 if in_rows else 30 + rank)
                assert torch.equal(swapped[source][: len(expected)], expected)


def reduced(comm: Communicator, format: Format, place: str) -> list[Any]:
    """Return what `reduced_here` does over NCCL's communicator, with streams where it has them."""
    with connected(comm, place) as far:
        return far.submit(lambda: reduced_here(comm, far, format)).wait()


def reduced_here(comm: Communicator, far: Communicator, format: Format) -> list[Any]:
    """Return what every collective makes of a case."""
    case = case_of("random", comm.size, 3000, count=200)
    stream = case.streams[comm.rank]
    assert stream.indices is not None
    there = SparseStream.unchecked(put(stream.indices, far), put(stream.values, far), stream.size)
    results = [
        algorithm(there, Wire(far, format), SUM, case.max_nnz) for algorithm in ALGORITHMS.values()
    ]
    results += [collective(there, Wire(far), 50).total for collective in (gtopk, oktopk)]
    results.append(broadcast(there, Wire(far), far.size - 1))
    return [full(on_host(result)).tolist() for result in results]


def on_host(stream: SparseStream) -> SparseStream:
    indices = None if stream.indices is None else got(stream.indices)
    return SparseStream.unchecked(indices, got(stream.values), stream.size)


def scheme_on(name: str, ranks: int) -> Any:
    """Return a scheme; nodes have half of the ranks."""
    scheme = EVERY[name]()
    if isinstance(scheme, Hierarchical):
        scheme.ranks_per_node = max(1, ranks // 2)
    return scheme


def steps_in_both_ways(comm: Communicator, names: Iterable[str]) -> None:
    """Check that steps over NCCL have the bits of those by way of the host.

    Gradients are small integers, of whose sums no engine rounds any.
    """
    with connected(comm) as far:
        for name in names:
            found = []
            for way in (carry(comm, far.device), far):
                scheme, updates = scheme_on(name, comm.size), []
                for step in range(2):
                    gradient = put(integers(comm.rank, step, 400), way)
                    updates.append(got(scheme.step(gradient, way)))
                memory = None if scheme.memory is None else got(scheme.memory)
                found.append([*updates, memory])
            assert all(map(same_bits, *found)), name


def average_in_both_ways(comm: Communicator, name: str, sharded: bool) -> None:
    """Check the same of an averager, with a small tensor that is averaged densely.

    Over NCCL the host waits for a step of regions once, at its end.

    Parameters
    ----------
    sharded
        Whether ranks hold two shards in turn, so that those of a shard average it.
    """
    with connected(comm) as far:
        shard = Shard(comm.rank % 2, {}) if sharded else None
        tensors = {key: put(TENSORS[key], far) for key in ("first", "bias")}
        found = []
        for way in (carry(comm, far.device), far):
            averager = Averager(
                tensors,
                scheme_on(name, comm.size // (2 if sharded else 1)),
                group=way,
                carrier="nccl" if way is far else "host",
                frontload=False,
                shard=shard,
            )
            updates = []
            for step in range(2):  # of which the first is void
                gradients = gradients_of(comm.rank, step)
                if step == 0 and comm.rank == 0:
                    gradients["first"][3, 4] = torch.inf
                there = {key: put(gradients[key], far) for key in tensors}
                with patch.object(device, "_read", wraps=device._read) as reads:
                    update = averager.average(there)
                updates += [got(update[key]) for key in tensors]
            assert ("over NCCL" in repr(averager.handle)) == (way is far)
            found.append(updates)
        assert all(map(same_bits, *found))
        if "bidirectional" in name and not sharded:
            assert reads.call_count == 1


def queue_others(comm: Communicator) -> tuple[int, str, bool]:
    """Do a step alike on all ranks, then one in which two tensors of one size change places.

    No tensors are small, so no frame tells anybody; and the monitor, which might, compares nothing.
    Returns how often the host waited in the first step, the kind of the error of the second, and
    whether that one left the state as it was.
    """
    with connected(comm) as far, patch.object(Executor, "_disagreement", return_value=None):
        names = ["first", "second"]
        tensors = {name: put(TENSORS["first"], far) for name in names}
        averager = Averager(
            tensors, EVERY["bidirectional 4 bits"](), group=far, carrier="nccl", frontload=False
        )

        def step(names: list[str]) -> None:
            for name in names:
                averager.queue(put(integers(comm.rank, 0, 1200), far), {name: (0, 1200)})
            averager.finish()

        def state() -> Any:
            return tree_map_only(
                Tensor, lambda part: got(part).tolist(), averager.handle.state_dict()
            )

        with patch.object(device, "_read", wraps=device._read) as reads:
            step(names)
        waits, before = reads.call_count, state()
        with pytest.raises((CommunicationError, MismatchError)) as caught:
            step(names[::-1] if comm.rank == CULPRIT else names)
        return waits, type(caught.value).__name__, state() == before


def check_others(ends: Sequence[tuple[int, str, bool]]) -> None:
    """Check what `queue_others` returned on each rank."""
    for waits, error, unchanged in ends:
        assert waits == 1
        assert error == "MismatchError"
        assert unchanged


def train_in_both_ways(comm: Communicator, place: str, **settings: Any) -> None:
    """Check the same of training in DDP with a static graph and several buckets.

    Parameters
    ----------
    place
        That of `connected`; DDP knows no card.
    settings
        Of `sparcel.attach`.
    """
    with connected(comm, place) as far:
        wrap = {**MANY_BUCKETS, "static_graph": True}
        carrier = "nccl" if far.carrier == "NCCL" else "host"
        here = train(comm, far.device, settings, wrap=wrap)
        there = train(comm, far.device, {**settings, "group": far, "carrier": carrier}, wrap=wrap)
        for found, expected in zip(there.updates, here.updates, strict=True):
            assert_equal(found, expected)
        assert_equal(there.memory, here.memory)


def end_in(comm: Communicator, program: str) -> tuple[str, str, float]:
    """Return the kind and text of the error of an exchange that cannot end, and the seconds.

    The exchange is a swap, for which the host waits in the read of what came. ``program`` is what
    the culprit does: die, come late, call something else, or swap in another call, which a frame
    tells, or a mark, on a communicator that was split from the other.
    """
    call, other = Call.of("step", {"size": 40}), Call.of("step", {"size": 50})
    with connected(comm) as far:
        rows, bounds, culprit = torch.zeros(comm.size, 48), [40] * comm.size, comm.rank == CULPRIT
        there, engine = put(rows.to(torch.uint8), far), far.engine
        assert isinstance(engine, NcclEngine)

        def job() -> None:
            far.call(call, lambda: far.swap(there, bounds, len))  # what NCCL connects by is there
            if program == "late":
                engine.timeout = SHORT_TIMEOUT
            if program == "die" and culprit:
                os.kill(os.getpid(), signal.SIGKILL)
            if program == "late" and culprit:
                time.sleep(3 * SHORT_TIMEOUT)
            if program == "other" and culprit:
                device.read(far.call(other, lambda: far.gather_blocks(there[0, :40], bounds)))
            mixed = program in ("mixed", "marked") and culprit
            part = far.grid(1).across if program == "marked" else far
            arrived = far.call(other if mixed else call, lambda: part.swap(there, bounds, len))
            assert isinstance(arrived, Tensor)
            device.read(arrived)
            if program == "mixed":
                far.gather_numbers(0)
            if program == "marked":
                far.confirm()
                device.read(arrived)

        start = time.monotonic()
        with pytest.raises((CommunicationError, MismatchError)) as caught:
            far.submit(job).wait()
        return type(caught.value).__name__, str(caught.value), time.monotonic() - start


ENDS = {
    "die": ("CommunicationError", "lost its connection to rank 1"),
    "late": ("CommunicationError", "waited 1.5 s"),
    "other": ("MismatchError", "rank 1 called step(size=50)"),
    "mixed": ("MismatchError", "another call"),
    "marked": ("MismatchError", "another call"),
}
"""The kind and text of the errors of `end_in`."""


def check_ends(ends: Sequence[tuple[str, str, float]], program: str) -> None:
    """Check what `end_in` returned on the ranks that live."""
    for kind, text, seconds in ends:
        expected, said = ENDS[program]
        assert kind == expected
        assert said in text
        assert seconds < TIMEOUT / 2
