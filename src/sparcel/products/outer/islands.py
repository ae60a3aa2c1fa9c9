"""Which islands take part in an outer step: a fixed group, or those that come to a meeting."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TypeVar, cast

import torch
from torch import Tensor

from sparcel.core.comm import Communicator, ConnectedCommunicator, UnreachedError
from sparcel.errors import CommunicationError, MismatchError
from sparcel.products.outer.history import (
    Action,
    Create,
    Gone,
    Host,
    Now,
    Read,
    Receive,
    Remove,
    Run,
    Signs,
    Wait,
)
from sparcel.products.outer.island import Ranks
from sparcel.products.outer.places import Beats, Place, pause_after
from sparcel.products.outer.protocol import LONGEST, Protocol
from sparcel.products.outer.shared import Shared

T = TypeVar("T")

_SENT_BYTES = 64 << 20
"""How much of what is shared is sent at once to a guest, which may take as long as the patience."""

_BITS = 62
"""How many islands a number can tell of."""

_NUMBERS = ("place", "island", "order", "at")

_TOLD = ("island", "steps", "at", "place", "order", "origin")
"""What of an island's part in the protocol all its ranks know."""


class Fixed:
    """The ranks of a communicator, all of which take part in every step."""

    joined = False
    senior = 0

    def __init__(self, comm: Communicator, ranks: Ranks) -> None:
        self.comm, self._ranks = comm, ranks

    def meet(self) -> bool:
        """See `Elastic.meet`."""
        return True

    def decide(self, held: bool, finite: bool) -> tuple[bool, bool]:
        """See `Elastic.decide`."""
        return held, self._ranks.all(finite)

    def committed(self, clock: int) -> None:
        """See `Elastic.committed`."""

    def is_awaited(self) -> bool:
        """See `Elastic.is_awaited`."""
        return False

    def fail(self) -> None:
        """See `Elastic.fail`."""

    def numbers(self) -> dict[str, int]:
        """See `Elastic.numbers`."""
        return dict.fromkeys(_NUMBERS, 0)

    def close(self) -> None:
        """See `Elastic.close`."""


class Elastic:
    """Islands that come and go between steps; does what their `Protocol` wants to be done.

    Of an island's ranks the first takes part in the protocol. The others do alike with their
    shards, as it tells them: all ranks call all methods.

    Parameters
    ----------
    place
        Where they meet.
    protocol
        This island's part, which has not begun.
    shared
        What islands share.
    ranks
        Those of this island.

    Attributes
    ----------
    joined
        Whether it has taken over what others share when it came.

    Raises
    ------
    MismatchError
        When other islands of the run have other facts, or another beginning.
    CommunicationError
        When the place does not answer, or what is waited for does not come. Other methods raise
        both, too.
    """

    def __init__(self, place: Place, protocol: Protocol, shared: Shared, ranks: Ranks) -> None:
        self._board, self._connect_at, self._pause, self._patience = place
        self._protocol, self._shared, self._ranks = protocol, shared, ranks
        self._connected: list[int] = []
        """The islands whose connections hold, by rank."""
        self._looked = 0.0
        self._failing: float | None = None
        """Since when no exchange has come to its end."""
        self._beats: Beats | None = None
        self.joined = self._run(self._protocol.enter())
        me = self._protocol.island
        self.comm = self._connect(f"alone.{me}", [me], 0)

    @property
    def steps(self) -> int:
        """How many outer steps this island holds."""
        return self._protocol.steps

    @property
    def senior(self) -> int:
        """The rank that has taken part for longest."""
        return self._connected.index(min(self._connected))

    def begin(self, steps: int, shared: int) -> None:
        """Begin with what this number sums up, after so many outer steps."""
        self._protocol.steps, self._protocol.state = steps, f"{shared:x}"
        self._beat()

    def resume(self, numbers: dict[str, int]) -> bool:
        """Go on from a checkpoint, given what `numbers` was then.

        Return False if the run has gone on without this island.
        """
        place, island, order, at = (numbers[name] for name in _NUMBERS)
        mine = self._protocol
        if self.joined and (str(place), at) != (mine.place, mine.at):
            return False
        self._run(mine.resume(str(place), island, order, at))
        return True

    def numbers(self) -> dict[str, int]:
        """Return what a checkpoint has to hold for `resume`."""
        place, island, at = self._protocol.origin
        return dict(zip(_NUMBERS, (int(place), island, self._protocol.order, at), strict=True))

    def meet(self) -> bool:
        """Wait for the others; return whether this island takes part in a step with ``comm``.

        False if it has to take over first what others hold.
        """
        while (attempt := self._run(self._protocol.meet())) is not None:
            number, members = attempt
            if members == self._connected:
                return True
            self._connected, cause = [], None
            try:
                # The former connections end when nothing uses them, and nobody waits for that.
                rank = members.index(self._protocol.island)
                self.comm = self._connect(f"mesh.{number}", members, rank)
            except CommunicationError as error:
                cause = error
            if self._refuse(members, cause):
                continue
            self._connected = members
            return True
        self._connected = []  # the others have left these connections
        return False

    def _refuse(self, members: list[int], error: CommunicationError | None) -> bool:
        """Propose to abort an attempt if its members do not connect; return whether they did not.

        A connection that one rank of this island misses is missing.
        """
        if self._ranks.all(error is None):
            return False
        found = error.__cause__ if error else None
        missed = [*found.peers] if isinstance(found, UnreachedError) else []
        flags = self._ranks.gather(sum(1 << peer for peer in missed if peer < _BITS))
        peers = [one for peer, one in enumerate(members) if any(flag >> peer & 1 for flag in flags)]
        why = str(error or "another rank of this island did not reach its peer")
        self._run(self._protocol.decide(False, False, peers, why))
        return True

    def decide(self, held: bool, finite: bool) -> tuple[bool, bool]:
        """Return whether the step takes effect, and whether it is finite on all ranks.

        Parameters
        ----------
        held
            Whether all has arrived here.
        finite
            Whether what has arrived is finite.
        """
        arrived = held
        if held:
            try:
                self.comm.run(lambda: self.comm.gather_numbers(0))
            except CommunicationError:
                arrived = False
        flags = self._ranks.gather(held | arrived << 1 | finite << 2)
        held, arrived, finite = (all(flag >> bit & 1 for flag in flags) for bit in range(3))
        took_effect = self._run(self._decide(arrived, held))
        if not took_effect or not arrived:  # connections to the others have ended
            self._connected = []
        return took_effect, finite

    def _decide(self, arrived: bool, held: bool) -> Run[bool]:
        """Decide on an exchange; raise if none has come to its end for too long."""
        if (yield from self._protocol.decide(arrived, held)):
            self._failing = None
            return True
        now = yield Now()
        self._failing = now if self._failing is None else self._failing
        if (failing := now - self._failing) > LONGEST * self._patience:
            raise CommunicationError(
                f"for {failing:.0f} s no exchange of islands {self._connected} has ended within the"
                f" patience of {self._patience:g} s; if it takes longer, give attach a larger"
                " patience="
            )
        return False

    def committed(self, clock: int) -> None:
        """Go on after an outer step, which came after so many inner steps.

        Islands that wait to join get what is shared, while this one trains.
        """
        if self._beats is not None:
            self._beats.count(clock)
        self._run(self._protocol.welcome())

    def take_over(self) -> bool | None:
        """Receive what islands share; return whether what this one has moved may be kept.

        None if nobody is left who could send it, and the run has not begun.
        """
        self._failing = None
        if self._beats is not None:
            self._beats.forget()
        return self._run(self._protocol.take_over())

    def is_awaited(self) -> bool:
        """Tell whether others wait for this island, or have gone on without it."""
        return self._run(self._look())

    def _look(self) -> Run[bool]:
        if (now := (yield Now())) < self._looked:
            return False
        self._looked = now + self._pause
        return (yield from self._protocol.is_awaited())

    def fail(self) -> None:
        """Give no more signs of life, so that nobody waits for this island."""
        if self._beats is not None:
            self._beats.stop.set()
            self._beats = None

    def close(self) -> None:
        """Take part in no more steps; the last island of a run removes what is left of it."""
        with suppress(CommunicationError):
            self.comm.close()
            if self._beats is not None:
                self._beats.end()
                if self._protocol.at and not self._board.found("beat."):
                    self._board.end("ended")

    def _run(self, part: Run[T]) -> T:
        """Do what a part of the protocol wants to be done, and return its result.

        The other ranks of this island do what concerns their shards.
        """
        if self._ranks.rank:
            return cast("T", self._follow())
        answer: object = None
        try:
            while True:
                action = part.send(answer)
                self._beat()
                answer = self._done(action)
        except StopIteration as end:
            result: T = end.value
        except (CommunicationError, MismatchError) as error:
            self._ranks.tell(["failed", str(error)])
            self.fail()
            raise
        self._beat()
        told = {name: getattr(self._protocol, name) for name in _TOLD}
        self._ranks.tell(["ended", result, told])
        return result

    def _follow(self) -> object:
        """Do what the first rank tells, until its part of the protocol has ended."""
        while True:
            what, *told = self._ranks.tell(None)
            match what:
                case "host":
                    self._host(*told)
                case "receive":
                    self._receive(*told)
                case "ended":
                    result, mine = told
                    vars(self._protocol).update(mine)
                    return result
                case "failed":
                    raise CommunicationError(
                        f"the first rank of this island could not go on: {told[0]}"
                    )

    def _beat(self) -> None:
        """Give signs of life under the number that this island has now, and tell how far it is."""
        me = self._protocol.island
        if me and self._beats is None and self._ranks.rank == 0:
            self._beats = Beats(self._board, me, self._patience)
            weakref.finalize(self, self._beats.stop.set)
        if self._beats is not None:
            self._beats.island, self._beats.steps = me, self._protocol.steps

    def _done(self, action: Action) -> object:
        match action:
            case Create(key, text):
                return self._board.create(key, text)
            case Read(key):
                return self._board.read(key)
            case Remove(keys):
                self._board.remove(keys)
            case Now():
                return time.monotonic()
            case Wait(waited):
                self._ranks.tell(["waiting"])  # so that they do not wait for long themselves
                time.sleep(pause_after(waited, self._pause))
            case Gone():
                lost = self.comm.lost() if self._connected else []
                return {self._connected[rank] for rank in lost}
            case Signs(island):
                return self._board.signs(island)
            case Host(guest, name):
                at, steps, state = self._protocol.holds
                told = name, [self._protocol.island, guest], [at, steps, int(state or "0", 16)]
                self._ranks.tell(["host", *told])
                self._host(*told)
            case Receive(host, name):
                pair = [host, self._protocol.island]
                self._ranks.tell(["receive", name, pair])
                return self._receive(name, pair)
        return None

    def _connect(self, name: str, members: list[int], rank: int) -> ConnectedCommunicator:
        """Connect the ranks of some islands that hold the same shard as this one."""
        return self._connect_at(f"{name}.{self._ranks.rank}", members, rank)

    def _host(self, name: str, pair: list[int], holds: list[int]) -> None:
        """Begin to send what this rank holds of what is shared, from the first of two islands."""
        copies = (one.to("cpu", copy=True) for one in self._shared.tensors)
        messages = [torch.tensor(holds), *copies]

        def send() -> None:
            with suppress(CommunicationError, MismatchError):  # the guest has gone, or asks anew
                comm = self._connect(name, pair, 0)
                for part in _parts(messages):
                    comm.exchange({1: part}, {})
                comm.close()

        threading.Thread(target=send, daemon=True).start()

    def _receive(self, name: str, pair: list[int]) -> tuple[int, int, str] | str:
        """Receive this rank's share of what is shared; return what the host holds, or an error."""
        told, failed = torch.zeros(3, dtype=torch.int64), ""
        try:
            comm = self._connect(name, pair, 1)
            for part in _parts([told, *self._shared.tensors]):
                part.copy_(comm.exchange({}, {0: part.nbytes})[0])
            comm.close()
        except CommunicationError as error:
            failed = str(error)
        if not self._ranks.all(not failed):
            return failed or "another rank of this island has not received its shard"
        at, steps, state = told.tolist()
        return at, steps, f"{state:x}"


def _parts(messages: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield the bytes of messages, in parts that are sent one after the other."""
    for message in messages:
        yield from message.view(torch.uint8).split(_SENT_BYTES)
