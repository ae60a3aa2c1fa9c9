"""Which islands take part in an outer step: a fixed group, or those that come to a meeting.

A meeting is an attempt at a step. Everything about it is in a store that all islands reach:

``` text
step.attempt/came, step.attempt/island    how many have come, and who
step.attempt/quorum                       who takes part: the first to write it decides
step.attempt/outcome                      "commit" or "abort": likewise
latest                                    how many steps have been committed
```

After an exchange all members wait for one another. Whoever has heard from all proposes to commit,
whoever has not proposes to abort, and the first proposal holds for all. So a step takes effect on
all its members or on none, whenever one of them dies. What is written of a step is removed when two
more have been committed. So an island that stood still, and finds ``latest`` beyond its step, may
have decided alone what the others had decided before, and is late.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from sparcel.comm import Communicator, ConnectedCommunicator
from sparcel.errors import CommunicationError, MismatchError

Connect = Callable[[str, list[int], int, float], ConnectedCommunicator]
"""Connects the islands of these numbers, given a name of their own, the place of this one, and the
seconds that an exchange may take."""

_POLL_SECONDS = 0.02

_NOTHING = "-"
"""What no key's value is."""

_GRACE_SECONDS = 3.0
"""How long islands are waited for that may have failed with the last attempt."""

_LONGEST_ROUND = 10
"""For how many times the patience a newcomer waits for the end of an outer step of the others."""


class Fixed:
    """The ranks of a communicator, all of which take part in every step."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm

    def meet(self, step: int) -> bool:
        """See `Elastic.meet`."""
        return True

    def decide(self, arrived: bool) -> bool:
        """See `Elastic.decide`."""
        return arrived

    def committed(self, step: int, tensors: Sequence[Tensor]) -> None:
        """See `Elastic.committed`."""

    def waiting(self, step: int) -> bool:
        """See `Elastic.waiting`."""
        return False

    def close(self) -> None:
        """See `Elastic.close`."""


class Attempt(NamedTuple):
    """An attempt at a step."""

    step: int
    number: int

    def key(self, what: str) -> str:
        """Return the name in the store of something about it."""
        return f"{self.step}.{self.number}/{what}"


class Elastic:
    """Islands that come and go between steps, and meet in a store.

    Parameters
    ----------
    store
        A store of the run, which survives every island.
    connect
        What connects islands.
    facts
        What has to be the same on all islands, in words.
    shared
        A number of the parameters that islands have in common when the run begins.
    least
        How many islands begin it.
    patience
        Seconds for which an island is waited for.

    Attributes
    ----------
    begun
        Whether the run had begun when this island came.

    Raises
    ------
    MismatchError
        When other islands of the run have other facts, or it has not begun and they have other
        parameters.
    CommunicationError
        When the store does not answer. Other methods raise it, too.
    """

    def __init__(
        self,
        store: Store,
        connect: Connect,
        facts: str,
        shared: int,
        least: int,
        patience: float,
    ) -> None:
        self._store, self._connect, self._patience, self._least = store, connect, patience, least
        self.begun = store.check(["latest"])
        self._check("facts", facts, "other settings")
        if not self.begun:
            self._check("shared", str(shared), "other parameters to begin with")
        self.me = int(store.add("islands", 1))
        """The number of this island, which no other gets."""
        self._members: list[int] = []
        self._attempts: list[tuple[Attempt, int]] = []
        """The latest attempts, whose keys are still in the store, and how many came to each."""
        self._known, self._unserved = int(store.add("guests", 0)), set[int]()
        """How many guests have come, and which of them have no host, as far as it is known."""
        self.comm: ConnectedCommunicator = connect(f"alone{self.me}", [self.me], 0, patience)
        self._alone = True
        """Whether ``comm`` does not tell which members are there."""

    def _check(self, key: str, own: str, what: str) -> None:
        first = self._store.compare_set(key, "", own).decode()
        if first != own:
            text = f"an island has {what}: {own!r}, where the first one has {first!r}"
            if not self.begun:
                self._store.set("refused", text)
            raise MismatchError(f"{text}; start all islands of a run alike, or name another run")

    def meet(self, step: int) -> bool:
        """Wait for the others; return whether this island takes part in the step with ``comm``.

        False if the others have done the step without it.
        """
        while self._latest() <= step:
            attempt = self._next_attempt(step)
            place = int(self._store.add(attempt.key("came"), 1))
            self._store.set(attempt.key(f"island{place}"), str(self.me))
            members = self._agree(attempt)
            if self._latest() > step + 1:
                return False
            self._attempts.append((attempt, len(members)))
            if self.me in members:
                if self._alone or members != self._members:
                    self._members, self._alone = members, True
                    # The former connections end when nothing uses them, and nobody waits for that.
                    self.comm = self._connect(
                        attempt.key("mesh"), members, members.index(self.me), self._patience
                    )
                    self._alone = False
                return True
            self._alone = True  # the others have left these connections
            if self._outcome(attempt) == "commit":
                return False
        return False

    def _next_attempt(self, step: int) -> Attempt:
        """Return the first attempt at a step that has not been aborted."""
        attempt = Attempt(step, 0)
        while self._read(attempt.key("outcome")) == "abort":
            attempt = Attempt(step, attempt.number + 1)
        return attempt

    def _agree(self, attempt: Attempt) -> list[int]:
        """Wait until it is decided who takes part; return them in order."""
        since = time.monotonic()
        patience = min(self._patience, _GRACE_SECONDS) if attempt.number else self._patience
        while (decided := self._read(attempt.key("quorum"))) is None:
            if (refused := self._read("refused")) is not None:
                raise MismatchError(refused)
            came = self._numbers(attempt.key("came"), attempt.key("island"))
            guests = self._numbers(f"{attempt.step}/guests", f"{attempt.step}/guest")
            expected = {*self._members} - self._gone() | guests
            late = time.monotonic() - since > patience
            if self._members:
                ready = late or expected <= came
            else:  # a guest does not know whom to expect
                ready = late if self.begun else len(came) >= self._least
            if ready and self.me in came:
                text = json.dumps(sorted(came))
                decided = self._store.compare_set(attempt.key("quorum"), "", text).decode()
                break
            time.sleep(_POLL_SECONDS)
        self.begun = True
        members: list[int] = json.loads(decided)
        return members

    def _numbers(self, count: str, key: str) -> set[int]:
        """Return the numbers of islands that were put under a key, one after another."""
        places = range(1, int(self._store.add(count, 0)) + 1)
        found = [self._read(f"{key}{place}") for place in places]
        return {int(one) for one in found if one is not None}

    def _gone(self) -> set[int]:
        """Return the members whose connections have ended."""
        if self._alone:
            return set()
        return {self._members[rank] for rank in self.comm.lost()}

    def decide(self, arrived: bool) -> bool:
        """Return whether the step takes effect, given whether all has arrived here."""
        if arrived:
            try:
                self.comm.run(lambda: self.comm.gather_numbers(0))
            except CommunicationError:
                arrived = False
        wish = "commit" if arrived else "abort"
        (attempt, _) = self._attempts[-1]
        outcome = self._store.compare_set(attempt.key("outcome"), "", wish).decode()
        self._alone = not arrived or outcome == "abort"  # connections to the others have ended
        return outcome == "commit" and self._latest() <= attempt.step + 1

    def _outcome(self, attempt: Attempt) -> str:
        """Wait for the outcome of an attempt of others, who may die of it."""
        deadline = time.monotonic() + 3 * self._patience
        while (outcome := self._read(attempt.key("outcome"))) is None:
            if time.monotonic() > deadline:
                return self._store.compare_set(attempt.key("outcome"), "", "abort").decode()
            time.sleep(_POLL_SECONDS)
        return outcome

    def committed(self, step: int, tensors: Sequence[Tensor]) -> None:
        """Learn that so many steps have been done, after which islands share these tensors.

        Islands that wait to join get them, while this one goes on, and are expected at its next
        meeting.
        """
        before = self._read("latest")
        if int(before or 0) < step:
            self._store.compare_set("latest", before or "", str(step))
        self._forget(step - 2)
        known, self._known = self._known, int(self._store.add("guests", 0))
        self._unserved.update(range(known + 1, self._known + 1))
        for place in sorted(self._unserved):
            guest = self._read(f"guest{place}")
            if guest is None:
                continue  # it has just come, or died in that moment
            self._unserved.remove(place)
            if self._store.compare_set(f"host{place}", "", str(self.me)).decode() == str(self.me):
                expected = int(self._store.add(f"{step}/guests", 1))
                self._store.set(f"{step}/guest{expected}", guest)
                copies = [tensor.to("cpu", copy=True) for tensor in tensors]
                arguments = (place, int(guest), step, copies)
                threading.Thread(target=self._host, args=arguments, daemon=True).start()

    def _forget(self, step: int) -> None:
        """Remove what the store holds of attempts up to a step."""
        for attempt, came in [one for one in self._attempts if one[0].step <= step]:
            self._attempts.remove((attempt, came))
            if self.me == self._members[0]:
                places = [f"island{place}" for place in range(1, came + 1)]
                for what in ("came", "quorum", "outcome", *places):
                    self._store.delete_key(attempt.key(what))

    def _host(self, place: int, guest: int, step: int, tensors: Sequence[Tensor]) -> None:
        """Send an island that wants to join what the islands share after so many steps."""
        with suppress(CommunicationError):  # the guest has gone, or will ask another
            comm = self._connect(f"guest{place}/mesh", [self.me, guest], 0, self._patience)
            for message in (torch.tensor([step]), *tensors):
                comm.exchange({1: message.view(torch.uint8)}, {})
            comm.close()

    def join(self, tensors: Sequence[Tensor]) -> int:
        """Wait for a host; receive what the islands share, and return after how many steps."""
        self._members, self._alone = [], True
        while True:
            place = int(self._store.add("guests", 1))
            self._store.set(f"guest{place}", str(self.me))
            step = torch.zeros(1, dtype=torch.int64)
            host = self._host_of(place)
            with suppress(CommunicationError):
                comm = self._connect(f"guest{place}/mesh", [host, self.me], 1, self._patience)
                for tensor in (step, *tensors):
                    came = comm.exchange({}, {0: tensor.nbytes})[0]
                    tensor.view(torch.uint8).copy_(came)
                comm.close()
                return int(step)

    def _host_of(self, place: int) -> int:
        """Wait for the end of an outer step of the others, one of whom is then the host."""
        deadline = time.monotonic() + _LONGEST_ROUND * self._patience
        while (host := self._read(f"host{place}")) is None:
            if time.monotonic() > deadline:
                raise CommunicationError(
                    f"no island of the run has ended an outer step in"
                    f" {_LONGEST_ROUND * self._patience:g} s, so there is nobody to join; give a"
                    " longer patience, or begin another run at another place"
                )
            time.sleep(_POLL_SECONDS)
        return int(host)

    def waiting(self, step: int) -> bool:
        """Tell whether others have met already for the step, and wait."""
        return int(self._store.add(self._next_attempt(step).key("came"), 0)) > 0

    def close(self) -> None:
        """Take part in no more steps."""
        with suppress(CommunicationError):
            self.comm.close()

    def _latest(self) -> int:
        return int(self._read("latest") or 0)

    def _read(self, key: str) -> str | None:
        # One request; between check() and get(), a key may be removed.
        value = self._store.compare_set(key, _NOTHING, _NOTHING).decode()
        return None if value == _NOTHING else value


Islands = Fixed | Elastic
"""The islands that take part in outer steps."""


@contextmanager
def answering() -> Iterator[None]:
    """Turn errors of a store where islands meet into `CommunicationError`."""
    try:
        yield
    except dist.DistError as error:
        raise CommunicationError(
            f"the place where islands meet does not answer: {error}"
        ) from error
