"""The one interface that collectives see, whatever engine carries the bytes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial, wraps
from typing import Any, Self, TypeVar
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from sparcel.core import patterns, profiling
from sparcel.core._checks import Array, as_tensor
from sparcel.core.comm.calls import Call, Calls, digest
from sparcel.core.comm.engine import (
    ALL_CONTROL,
    Arrived,
    Bounds,
    Leaving,
    PeerErrors,
    Rows,
    Traffic,
    whole,
)
from sparcel.core.comm.jobs import Job
from sparcel.core.comm.nodes import check_divided, nodes_of, own_location, place_of
from sparcel.core.ops import SUM, Op
from sparcel.core.rates import Rates
from sparcel.errors import InputError

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
Message = TypeVar("Message")

DIRECT_RANKS = 8
"""Up to so many ranks send short messages straight to all others. That takes one wait; ways with
fewer messages take several."""


_REDUCED_DTYPES = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.uint8, torch.int8, torch.int32, torch.int64),
)
"""The dtypes that NCCL and MPI can reduce."""


class Communicator(ABC):
    """A group of ranks that exchange messages.

    Attributes
    ----------
    rank, size
        The number of this process in the group, and the number of processes.
    timeout
        Seconds after which a hanging exchange raises.
    device
        The device that holds payloads: the CPU, or a GPU.
    carrier
        The name of what carries the messages: Gloo, NCCL, MPI, a simulated cluster; or of what
        does so by way of the host.
    traffic
        Messages and bytes that this rank sent and received so far, including those of communicators
        that were split from this one.
    calls
        The calls of this rank, including those on communicators split from this one.
    label
        Tells this communicator from those that share ``calls``; the same on all its ranks.
    rates
        Rates that `sparcel.cost.measure` found on these ranks, equal on all of them;
        ``algorithm="auto"`` uses them. None stands for the default rates.
    """

    rank: int
    size: int
    timeout: float
    device: torch.device
    carrier: str
    traffic: Traffic
    calls: Calls
    label: str
    rates: Rates | None = None
    _errors: PeerErrors
    _in_job: Callable[[], bool]  # tells whether the caller is a job

    @abstractmethod
    def exchange_parts(self, sends: Leaving, receives: Bounds, control: int) -> Arrived:
        """Exchange messages that are given in parts; return those received in parts, by source.

        A message is the bytes of its parts in order. The first ``control`` bytes of each message
        are control: the receiver gets them on the host. The rest is payload, which the receiver
        gets on `device`, and which no host reads in between. A message arrives whole, where host
        and device are the same; or as control and payload; or in the parts that were sent.
        Otherwise as `exchange`.

        Parameters
        ----------
        sends
            Parts (uint8, contiguous) by destination. Those of control may be on the host.
        control
            The same at both ends. `ALL_CONTROL` for messages without payload.
        """

    def exchange(
        self, sends: Mapping[int, Tensor], receives: Bounds, control: int = 0
    ) -> dict[int, Tensor]:
        """Send and receive messages, all outstanding at once; return those received, by source.

        Parameters
        ----------
        sends
            Message (uint8, ``[nbytes]``) by destination, in the order in which to send them.
            Messages between two ranks arrive in order.
        receives
            Upper bound of the message's bytes, by source. Both ends must give the same bound; the
            receiver need not know the size itself.
        control
            0: the messages are payload. `ALL_CONTROL`: they are control.

        Raises
        ------
        CommunicationError
            When a peer is gone, reports a failure, or does not answer within the timeout. The
            communicator cannot be used after that.
        MismatchError
            When a message belongs to another call than the one under way here, or is longer than
            its bound; or when another rank found this. The communicator cannot be used after that.
        """
        parts = {rank: [sent] for rank, sent in sends.items()}
        received = self.exchange_parts(parts, receives, control)
        return {rank: whole(message) for rank, message in received.items()}

    def gather_parts(
        self, parts: Sequence[Tensor], at_most: int, control: int
    ) -> list[Sequence[Tensor]]:
        """Send a message to every other rank; return the messages of all ranks, by rank.

        P−1 messages in one exchange. ``at_most`` bounds the bytes of each message and is equal on
        all ranks. Otherwise as `exchange_parts`.
        """
        rounds = patterns.rotation(self.rank, self.size)
        sends = {to: parts for to, *_ in rounds}
        receives = {source: at_most for _, source, *_ in rounds}
        messages: dict[int, Sequence[Tensor]] = {
            self.rank: parts,
            **self.exchange_parts(sends, receives, control),
        }
        return [messages[rank] for rank in range(self.size)]

    def gather(self, message: Tensor, at_most: int, control: int = 0) -> list[Tensor]:
        """Do what `gather_parts` does with messages in one part; ``control`` as in `exchange`."""
        return [whole(parts) for parts in self.gather_parts([message], at_most, control)]

    def swap(self, messages: Rows, bounds: Sequence[int], length: Callable[[Tensor], int]) -> Rows:
        """Send each other rank its message; return those that came, by source.

        P−1 messages in one exchange, and none of them is empty.

        Parameters
        ----------
        messages
            By destination, on `device`; this rank's own place may hold anything. On the host they
            are a list.
        bounds
            The most bytes of a message to each rank, by destination; the same on all ranks.
        length
            Tells how many bytes of a row are its message, by the message's header. The row is on
            the host. A carrier that sends rows as they are does not call it.

        Returns
        -------
        Rows
            A list on the host, and a tensor ``[P, L]`` on a GPU, with anything in this rank's own
            place. A rank that is alone gets what it gave.

        Raises
        ------
        CommunicationError, MismatchError
            As `exchange`; also `MismatchError` when a message that is to fill the start of a row
            has another length than its header says.
        """
        sends, receives, due = {}, {}, bounds[self.rank]
        for to, source, *_ in patterns.rotation(self.rank, self.size):
            sends[to], receives[source] = [messages[to]], due
        arrived = list(messages)
        for source, parts in self.exchange_parts(sends, receives, ALL_CONTROL).items():
            (arrived[source],) = parts
        return arrived

    def spread(
        self, message: Tensor, bounds: Sequence[int], length: Callable[[Tensor], int]
    ) -> Rows:
        """Send every other rank one message; return the messages of all ranks, by rank.

        As `swap`, with this rank's own message in its place, and ``bounds`` by source. The message
        may be the start of a row ``[L]``.
        """
        sends, receives, parts = {}, {}, [message]
        for to, source, *_ in patterns.rotation(self.rank, self.size):
            sends[to], receives[source] = parts, bounds[source]
        arrived = parts * self.size
        for source, came in self.exchange_parts(sends, receives, ALL_CONTROL).items():
            (arrived[source],) = came
        return arrived

    def all_to_all(
        self, message: Tensor, leaving: Sequence[int], arriving: Sequence[int]
    ) -> Tensor:
        """Send each rank its part of a message; return what the ranks sent, one after another.

        P−1 messages in one exchange. Empty parts do not travel.

        Parameters
        ----------
        message
            Bytes (uint8, contiguous): the parts for all ranks, by rank; this rank's own included.
        leaving, arriving
            Bytes of the part for each rank, and of the part from each rank.

        Raises
        ------
        CommunicationError, MismatchError
            As `exchange`; also `MismatchError` when a part is shorter than ``arriving`` says.
        """
        parts = message.split(list(leaving))
        rounds = patterns.rotation(self.rank, self.size)
        arrived = self.exchange(
            {to: parts[to] for to, *_ in rounds if leaving[to]},
            {source: arriving[source] for _, source, *_ in rounds if arriving[source]},
        )
        for source, part in arrived.items():
            if part.numel() != arriving[source]:
                raise self._errors.other_length(source, part.numel(), arriving[source])
        arrived[self.rank] = parts[self.rank]
        return torch.cat([arrived.get(rank, message[:0]) for rank in range(self.size)])

    def all_reduce(self, tensor: Array, op: Op = SUM) -> None:
        """Reduce a dense tensor, or an array of NumPy, over all ranks in place.

        The algorithm is the engine's own; where it has none, a ring.

        Raises
        ------
        InputError
            When ``op`` is user-defined: engines know sum, product, min and max only. When the
            tensor is not contiguous, or has a dtype that some engine does not reduce.
        CommunicationError, MismatchError
            As `exchange`. MPI and NCCL do not compare calls, so ranks that disagree may wait until
            the monitor finds it, or the timeout.
        """
        if op.name is None:
            raise InputError(
                f"the engine's dense all-reduce knows sum, product, min and max, got {op}; "
                "algorithm='recursive_doubling' takes any operation"
            )
        if isinstance(tensor, np.ndarray) and not tensor.flags.carray:
            raise InputError("an array must be contiguous and writeable, to be reduced in place")
        tensor = as_tensor(tensor, "tensor")
        if tensor.dtype not in _REDUCED_DTYPES or not tensor.is_contiguous():
            raise InputError(
                f"tensor must be contiguous and one of {_REDUCED_DTYPES}, got {tensor.dtype}"
                f" with strides {tensor.stride()}"
            )
        call = _dense_sum(op, tensor.numel(), tensor.dtype)
        self.call(call, partial(self._all_reduce, tensor, op))

    @abstractmethod
    def _all_reduce(self, tensor: Tensor, op: Op) -> None:
        """Do what `all_reduce` does, with arguments that are right."""

    def split(self, colour: int) -> Self:
        """Return the communicator of the ranks that gave the same ``colour``; all ranks call.

        Ranks keep their order. On real processes the new communicator has its own connections.
        """
        return self.run(lambda: self._split(colour))

    def _split(self, colour: int) -> Self:
        colours = self.gather_numbers(colour)
        return self._subgroup([rank for rank, one in enumerate(colours) if one == colour], colour)

    @abstractmethod
    def _subgroup(self, ranks: list[int], colour: int) -> Self:
        """Return the communicator of some ranks, all of which call in a job with this colour."""

    @abstractmethod
    def run(self, job: Callable[[], T]) -> T:
        """Run ``job`` after all jobs submitted before, and return its result.

        A job is a function that uses the communicator. The jobs of a communicator, and of all
        communicators split from it, run one at a time in the order of submission. This order must
        be the same on all ranks. A job that calls ``run`` runs the inner job at once. When a job
        raises, the peers are told.
        """

    def call(self, call: Call, job: Callable[[], T]) -> T:
        """Run ``job`` as a part of ``call``, which must be the same on all ranks.

        The job's messages carry the fingerprint of the call and of the calls around it.

        Raises
        ------
        MismatchError
            On all ranks, when ranks make different calls at the same place of the program.
        """
        if not self._in_job():
            return self.run(partial(self.call, call, job))
        calls = self.calls
        around = calls.begin(call, self.label)
        try:
            return job()
        finally:
            calls.under_way, calls.fingerprint = around

    def confirm(self) -> None:  # noqa: B027
        """Compare all calls since the last exchange that compared; all ranks call, in a job.

        So does every message that carries a fingerprint. Where rows travel without one, as over
        NCCL, it costs one exchange of a few bytes, also on the communicators of `grid`. The host
        waits for nothing there: what differs is raised at the job's next look at the GPU.

        Raises
        ------
        MismatchError
            When ranks made different calls.
        """

    @abstractmethod
    def submit(self, job: Callable[[], T]) -> Job[T]:
        """Queue ``job`` and return at once; on a GPU it works beside the caller: see `Job.wait`."""

    @abstractmethod
    def close(self) -> None:
        """Wait for the jobs submitted so far and disconnect; all ranks call."""

    def gather_numbers(self, number: int) -> list[int]:
        """Return the number (64-bit) that each rank gave, by rank.

        Up to `DIRECT_RANKS` ranks in one exchange of P−1 messages, beyond in ⌈log₂P⌉ of one.
        """
        held = torch.tensor([number], device="cpu")
        blocks = self.gather_blocks(held.view(torch.uint8), [held.nbytes] * self.size, ALL_CONTROL)
        return blocks.view(torch.int64).tolist()

    def gather_blocks(self, block: Tensor, nbytes: Sequence[int], control: int = 0) -> Tensor:
        """Return the bytes (uint8) of all ranks, by rank, end to end.

        All ranks know that rank r gives ``nbytes[r]``. ``control`` is as in `exchange`. The
        messages are those of `gather_numbers`.

        Raises
        ------
        MismatchError
            As `exchange`, and when a rank sends more or fewer bytes than that.
        """
        if self.size <= DIRECT_RANKS:
            blocks = self.gather(block, max(nbytes), control)
            for rank, (one, expected) in enumerate(zip(blocks, nbytes, strict=True)):
                if one.numel() != expected:
                    raise self._errors.other_length(rank, one.numel(), expected)
            return torch.cat(blocks)

        def cut(parts: list[Tensor], ranks: Sequence[int]) -> Sequence[Tensor]:
            arrived, lengths = torch.cat(parts), [nbytes[rank] for rank in ranks]
            if arrived.numel() != sum(lengths):
                raise self._errors.other_length(ranks[0], arrived.numel(), sum(lengths))
            messages: tuple[Tensor, ...] = arrived.split(lengths)
            return messages

        return torch.cat(gather_in_rounds(self, block, nbytes, list, cut, control))

    def nodes(self) -> list[int]:
        """Return the number of each rank's node, by rank; all ranks call, in a job.

        The launcher's local ranks decide, or else the hostnames.
        """
        return nodes_of(self.gather_numbers(own_location()))

    def ranks_per_node(self) -> int:
        """Return how many consecutive ranks form a node; all ranks call, in a job.

        The result is 1 when nodes have different numbers of ranks, or when the ranks of a node are
        not consecutive.
        """
        nodes = self.nodes()
        count = nodes.count(nodes[0])
        return count if nodes == [rank // count for rank in range(self.size)] else 1

    def grid(self, ranks_per_node: int | None = None) -> Grid:
        """Return the communicators of this rank's node and of its place on all nodes.

        All ranks call. The communicators are made once for each ``ranks_per_node`` and close with
        this one.

        Parameters
        ----------
        ranks_per_node
            Number of consecutive ranks that form a node; None asks `nodes`.

        Raises
        ------
        InputError
            When nodes have different numbers of ranks.
        MismatchError
            When other ranks gave another ``ranks_per_node``.
        """
        if ranks_per_node not in self._grids:
            if ranks_per_node is None:
                nodes = self.nodes()
            else:
                nodes = [rank // ranks_per_node for rank in range(self.size)]
            node, place = place_of(self.rank, nodes)
            made = Grid(self.split(node), self.split(place))
            check_divided(self.rank, nodes, (made.node.size, made.across.size))
            self._grids[ranks_per_node] = made
        grid = self._grids[ranks_per_node]
        grid.across.rates = None if self.rates is None else _across_nodes(self.rates)
        return grid

    @cached_property
    def _grids(self) -> dict[int | None, Grid]:
        return {}

    @cached_property
    def staged(self) -> WeakValueDictionary[torch.device, Communicator]:
        """What carries tensors of GPUs over this communicator, by the GPU; see `carry`."""
        return WeakValueDictionary()  # they refer to this communicator


@dataclass(frozen=True)
class Grid:
    """Ranks arranged as nodes × places.

    Attributes
    ----------
    node
        The ranks of this rank's node.
    across
        The ranks that have this rank's place on every node.
    """

    node: Communicator
    across: Communicator


def exchanging(method: F) -> F:
    """Make a method that exchanges messages a job, and let a timer time it."""

    @wraps(method)
    def exchange(self: Communicator, *args: Any, **kwargs: Any) -> Any:
        if not self._in_job():
            return self.run(partial(exchange, self, *args, **kwargs))
        if (timer := profiling.timer) is None:
            return method(self, *args, **kwargs)
        with timer("messages"):
            return method(self, *args, **kwargs)

    return exchange  # type: ignore[return-value]  # it has the method's signature


def ranks_with_other(facts: str, comm: Communicator) -> list[int]:
    """Return the ranks whose facts differ from this rank's; all ranks call."""
    own = digest(facts, 56)
    gathered = comm.run(lambda: comm.gather_numbers(own))
    return [rank for rank, other in enumerate(gathered) if other != own]


def gather_in_rounds(
    comm: Communicator,
    own: Message,
    at_most: Sequence[int],
    join: Callable[[list[Message]], Sequence[Tensor]],
    cut: Callable[[list[Tensor], Sequence[int]], Sequence[Message]],
    control: int = 0,
) -> list[Message]:
    """Return the messages of all ranks, by rank.

    Parameters
    ----------
    own
        This rank's message.
    at_most
        The most bytes of each rank's message; the same on all ranks.
    join
        Given several messages, returns the parts of the one in which they travel.
    cut
        Given what came, in parts, and the ranks whose messages it holds, returns these messages.
    control
        How many bytes of each rank's message are control; `join` puts these first.
    """
    held = [own]  # the messages of this rank and of those that follow it
    for below, above, _, count in patterns.bruck(comm.rank, comm.size):
        ranks = [(above + place) % comm.size for place in range(count)]
        bound = sum([at_most[rank] for rank in ranks])
        leaving = {below: join(held[:count])}
        came = comm.exchange_parts(leaving, {above: bound}, count * control)[above]
        held += cut(came, ranks)
    return [held[(rank - comm.rank) % comm.size] for rank in range(comm.size)]


@lru_cache(maxsize=1024)
def _dense_sum(op: Op, size: int, dtype: torch.dtype) -> Call:
    return Call.of("all_reduce", {"op": op, "size": size, "dtype": dtype})


_across_nodes = lru_cache(maxsize=8)(Rates.across_nodes)
"""Return one object for one object of rates, since choices are remembered by it."""
