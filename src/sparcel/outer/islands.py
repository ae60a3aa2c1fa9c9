"""Which islands take part in an outer step: a fixed group, or those that come to a meeting."""

from __future__ import annotations

import json
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar
from uuid import uuid4

import torch
from torch import Tensor

from sparcel.comm import Communicator, ConnectedCommunicator, UnreachedError
from sparcel.errors import CommunicationError
from sparcel.outer import protocol
from sparcel.outer.board import Board
from sparcel.outer.protocol import Protocol, Run
from sparcel.outer.shared import Shared

T = TypeVar("T")

Connect = Callable[[str, list[int], int, float], ConnectedCommunicator]
"""Connects the islands of these numbers, given a name of their own, the place of this one, and the
seconds that an exchange may take."""

_PAUSE_SECONDS, _WAITED_SHARE = 0.02, 0.3
"""How long to wait until the next look: at first, and as a share of what was waited before."""

_NUMBERS = ("place", "island", "order", "at")


class Fixed:
    """The ranks of a communicator, all of which take part in every step."""

    joined = False
    senior = 0

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm

    def meet(self) -> bool:
        """See `Elastic.meet`."""
        return True

    def decide(self, held: bool) -> bool:
        """See `Elastic.decide`."""
        return held

    def committed(self, clock: int) -> None:
        """See `Elastic.committed`."""

    def is_awaited(self) -> bool:
        """See `Elastic.is_awaited`."""
        return False

    def numbers(self) -> dict[str, int]:
        """See `Elastic.numbers`."""
        return dict.fromkeys(_NUMBERS, 0)

    def close(self) -> None:
        """See `Elastic.close`."""


class Elastic:
    """Islands that come and go between steps; does what their `Protocol` wants to be done.

    Parameters
    ----------
    board
        The place where they meet.
    connect
        What connects islands.
    pause
        Seconds that pass at most between two looks at the place.
    facts, layout, least, patience
        As `Protocol` has them.
    shared
        What islands share.

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

    def __init__(
        self,
        board: Board,
        connect: Connect,
        pause: float,
        facts: dict[str, str],
        layout: str,
        least: int,
        patience: float,
        shared: Shared,
    ) -> None:
        self._board, self._connect, self._patience = board, connect, patience
        self._shared, self._pause = shared, pause
        nonce = f"{uuid4().int >> 65}"
        self._protocol = Protocol(nonce, facts, layout, least, patience)
        self._connected: list[int] = []
        """The islands whose connections hold, by rank."""
        self._looked = 0.0
        self.joined = self._run(self._protocol.enter())
        me = self._protocol.island
        self._beats = _Beats(board, me, patience)
        weakref.finalize(self, self._beats.stop.set)
        self.comm: ConnectedCommunicator = connect(f"alone.{me}", [me], 0, patience)

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

        False if the others have done the step without it.
        """
        while (attempt := self._run(self._protocol.meet())) is not None:
            members, me = attempt.members, self._protocol.island
            if members == self._connected:
                return True
            self._connected = []
            try:
                # The former connections end when nothing uses them, and nobody waits for that.
                self.comm = self._connect(
                    f"mesh.{attempt.number}", members, members.index(me), self._patience
                )
            except CommunicationError as error:
                self._refuse(members, error)
            else:
                self._connected = members
                return True
        self._connected = []  # the others have left these connections
        return False

    def _refuse(self, members: list[int], error: CommunicationError) -> None:
        """Propose to abort an attempt whose members do not connect."""
        cause = error.__cause__
        peers = cause.peers if isinstance(cause, UnreachedError) else []
        self._run(
            self._protocol.decide(False, False, [members[peer] for peer in peers], str(error))
        )

    def decide(self, held: bool) -> bool:
        """Return whether the step takes effect, given whether all has arrived here."""
        arrived = held
        if held:
            try:
                self.comm.run(lambda: self.comm.gather_numbers(0))
            except CommunicationError:
                arrived = False
        took_effect = self._run(self._protocol.decide(arrived, held))
        if not took_effect or not arrived:  # connections to the others have ended
            self._connected = []
        return took_effect

    def committed(self, clock: int) -> None:
        """Go on after an outer step, which came after so many inner steps.

        Islands that wait to join get what is shared, while this one trains.
        """
        self._beats.steps, self._beats.clock = self.steps, clock
        self._run(self._protocol.welcome())

    def take_over(self) -> bool:
        """Receive what islands share; return whether what this one has moved may be kept."""
        return self._run(self._protocol.take_over())

    def is_awaited(self) -> bool:
        """Tell whether others wait for this island, or have gone on without it."""
        if time.monotonic() < self._looked:
            return False
        self._looked = time.monotonic() + self._pause
        return self._run(self._protocol.is_awaited())

    def close(self) -> None:
        """Take part in no more steps; the last island of a run removes what is left of it."""
        with suppress(CommunicationError):
            self.comm.close()
            self._beats.end()
            if self._protocol.at and not self._board.found("beat."):
                self._board.end("ended")

    def _run(self, part: Run[T]) -> T:
        """Do what a part of the protocol wants to be done, and return its result."""
        answer: object = None
        while True:
            try:
                action = part.send(answer)
            except StopIteration as end:
                result: T = end.value
                return result
            answer = self._done(action)

    def _done(self, action: protocol.Action) -> object:
        match action:
            case protocol.Create(key, text):
                return self._board.create(key, text)
            case protocol.Read(key):
                return self._board.read(key)
            case protocol.Remove(keys):
                self._board.remove(keys)
            case protocol.Now():
                return time.monotonic()
            case protocol.Wait(waited):
                time.sleep(pause_after(waited, self._pause))
            case protocol.Gone():
                return (
                    {self._connected[rank] for rank in self.comm.lost()}
                    if self._connected
                    else set()
                )
            case protocol.Signs(islands):
                return "".join(self._board.read(f"beat.{one}") or "" for one in islands)
            case protocol.Host(guest, name):
                at, steps, state = self._protocol.holds
                told = torch.tensor([at, steps, int(state or "0", 16)])
                shared = (tensor.to("cpu", copy=True) for tensor in self._shared.tensors)
                copies = [told, *shared]
                arguments = (guest, self._protocol.island, name, copies)
                threading.Thread(target=self._host, args=arguments, daemon=True).start()
            case protocol.Receive(host, name):
                return self._receive(host, name)
        return None

    def _host(self, guest: int, me: int, name: str, messages: Sequence[Tensor]) -> None:
        with suppress(CommunicationError):  # the guest has gone, or will ask another
            comm = self._connect(name, [me, guest], 0, self._patience)
            for message in messages:
                comm.exchange({1: message.view(torch.uint8)}, {})
            comm.close()

    def _receive(self, host: int, name: str) -> tuple[int, int, str] | str:
        told = torch.zeros(3, dtype=torch.int64)
        try:
            comm = self._connect(name, [host, self._protocol.island], 1, self._patience)
            for tensor in (told, *self._shared.tensors):
                came = comm.exchange({}, {0: tensor.nbytes})[0]
                tensor.view(torch.uint8).copy_(came)
            comm.close()
        except CommunicationError as error:
            return str(error)
        at, steps, state = told.tolist()
        return at, steps, f"{state:x}"


def pause_after(waited: float, most: float) -> float:
    """Return the seconds until the next look at a place, after so many of waiting."""
    return min(max(_PAUSE_SECONDS, _WAITED_SHARE * waited), most)


class _Beats:
    """An island's signs of life: a key that changes, and tells how far it is."""

    def __init__(self, board: Board, island: int, patience: float) -> None:
        self._board, self._key = board, f"beat.{island}"
        self.steps = self.clock = 0
        self.stop = threading.Event()
        self._seconds = protocol.beat_seconds(patience)
        self._thread = threading.Thread(target=self._go_on, daemon=True)
        self._thread.start()

    def _go_on(self) -> None:
        number, since, before, a_step = 0, time.monotonic(), 0, 0.0
        while True:
            number += 1
            now, clock = time.monotonic(), self.clock
            if clock > before:
                since, before, a_step = now, clock, (now - since) / (clock - before)
            told = {"beat": number, "steps": self.steps, "seconds": a_step}
            self._board.tell(self._key, json.dumps(told))
            if self.stop.wait(self._seconds):
                return

    def end(self) -> None:
        """Give none any more."""
        self.stop.set()
        self._thread.join()
        self._board.remove([self._key])


Islands = Fixed | Elastic
"""The islands that take part in outer steps."""
