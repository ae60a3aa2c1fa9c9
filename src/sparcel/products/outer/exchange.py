"""What an island brings to outer steps, and how islands exchange and average it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from sparcel.core._checks import all_finite
from sparcel.core.training import Averager
from sparcel.errors import CommunicationError, MismatchError, few, warn
from sparcel.products.outer.island import Ranks
from sparcel.products.outer.islands import Elastic, Fixed
from sparcel.products.outer.method import Method, Weights
from sparcel.products.outer.model import Moment
from sparcel.products.outer.shared import Shared, Vector, queued

Islands = Fixed | Elastic
"""The islands that take part in outer steps."""

Poison = Literal["leave out", "void"]
"""What becomes of an outer step if an island's pseudo-gradient holds NaN or Inf."""

Outcome = Literal["done", "void", "again", "late"]
"""How an attempt at an outer step has ended."""

_REMEMBERED = 0.1
"""How much of an average has to be left when the next one comes, so that it is worth its bytes."""

_ENTRY = "second moment of "
"""What the names begin with under which second moments are averaged."""


class Moments:
    """The second moments of a fragment, which become averages in an outer step.

    From few samples an island learns little of how large gradients are: where it has seen none for
    long, the next makes a step that is several times too large. All islands together know more.
    """

    def __init__(self) -> None:
        self._fragment: Sequence[Vector] = ()
        self._own: Mapping[str, Moment] = {}
        self._averages: dict[str, Tensor] = {}

    def move(
        self, fragment: Sequence[Vector], own: Mapping[str, Moment], steps: float = 0.0
    ) -> None:
        """Begin an outer step in which those of a fragment become averages; none without one.

        The next averages come after so many inner steps.
        """
        self._fragment, self._averages = fragment, {}
        self._own = {
            name: one
            for name, one in own.items()
            if one.bias and one.decay**steps >= _REMEMBERED and all_finite(one.kept)
        }

    @property
    def flags(self) -> list[bool]:
        """Whether this island brings each of them."""
        return [name in self._own for vector in self._fragment for name in vector.tensors]

    def queue(self, averager: Averager, share: float, brought: Sequence[bool]) -> None:
        """Queue the exchange of those that all bring who count, each times this island's share."""
        self._averages, flags = {}, iter(brought)
        for vector in self._fragment:
            parts = {
                entry(name): self._brings(name, like, share)
                for (name, like), all_bring in zip(vector.tensors.items(), flags, strict=False)
                if all_bring
            }
            self._averages |= queued(averager, parts)

    def _brings(self, name: str, like: Tensor, share: float) -> Tensor:
        if not share:
            return torch.zeros_like(like)
        kept, bias, _ = self._own[name]
        return kept.to(like.dtype) * (share / bias)

    def put(self) -> list[str]:
        """Let the averages that have come take effect; return the names of their parameters."""
        averages = {key.removeprefix(_ENTRY): one for key, one in self._averages.items()}
        self._averages = {}
        for name in averages.keys() & self._own.keys():
            kept, bias, _ = self._own[name]
            kept.copy_(averages[name] * bias)
        return [*averages]


def entry(name: str) -> str:
    """Return the name under which a parameter's second moment is averaged."""
    return _ENTRY + name


class Exchange:
    """Exchanges a fragment of what islands share in each outer step.

    Attributes
    ----------
    shared, averager, islands, method
        What islands share, what averages it, who takes part, and how.
    steps
        How many outer steps have been done; each is of one fragment.
    weights
        By what this island counts.
    finite
        Whether what this island has moved of the fragment is finite on all its ranks.
    spoilt
        What holds NaN or Inf of what this rank has moved.
    void
        How many attempts nothing was exchanged in, because of NaN or Inf.
    """

    def __init__(
        self,
        shared: Shared,
        averager: Averager,
        islands: Islands,
        method: Method,
        poison: Poison,
        ranks: Ranks,
    ) -> None:
        self.shared, self.averager, self.islands = shared, averager, islands
        self.method, self._poison, self._ranks = method, poison, ranks
        self.steps = self.void = 0
        self.weights, self._weight = Weights(len(shared.fragments)), 0.0
        self.finite, self.spoilt = True, list[str]()
        self._moments, self._connected, self._was_told = Moments(), islands.comm, False

    @property
    def _fragment(self) -> list[Vector]:
        """What the next outer step is of."""
        return self.shared.fragments[self._turn]

    @property
    def _turn(self) -> int:
        """The number of the fragment that the next outer step is of."""
        return self.steps % len(self.shared.fragments)

    def move(self, clock: int) -> None:
        """Find out what this island has moved of the fragment, after so many inner steps."""
        model, buffers = self.shared.model, self.shared.buffers
        model.look()
        self._weight = self.weights.move(self._turn)
        self.spoilt = [name for one in self._fragment for name in one.move(model.parameters)]
        self.finite = self._ranks.all(not self.spoilt)
        every, done = self.method.moments, self.steps // len(self.shared.fragments)
        if every and done % every == 0:
            self._moments.move(self._fragment, model.moments(), every * clock / (done + 1))
        else:
            self._moments.move((), {})
        averages = self.finite and self._turn == 0
        if spoilt := buffers.move(model.buffers if averages else {}):
            warn(
                f"the buffers {few(spoilt)} hold NaN or Inf: this island's do not count in their"
                " average, which it takes over"
            )

    @torch.no_grad()
    def attempt(self) -> Outcome:
        """Exchange the fragment, and update what is shared of it."""
        islands, fragment = self.islands, self._fragment
        finite = arrived = decides = False

        def decide(ended_finite: bool) -> bool:
            nonlocal finite, arrived, decides
            decides = True
            arrived, finite = islands.decide(True, ended_finite)
            return arrived and finite

        if not islands.meet():
            return "late"
        try:
            self._average(fragment, decide)
        except CommunicationError:
            if isinstance(islands, Fixed) or decides:
                raise
            islands.decide(False, False)
        if not arrived:
            return "again"
        if not finite:
            return "void"
        self.shared.step(fragment)
        self.weights.step(self._turn)
        if self.method.decay != 1:
            self._decay(fragment, self.method.decay)
        return "done"

    def _average(self, fragment: Sequence[Vector], decide: Callable[[bool], bool]) -> None:
        """Average a fragment, and what goes with it, as far as islands decide that it counts."""
        averager, comm = self.averager, self.islands.comm
        if comm is not self._connected:
            averager.connect(comm, self.steps)
            self._connected = comm
        counting, own, moments = self._agree()
        if not counting or (counting < comm.size and self._poison == "void"):
            decide(False)
            self.void += 1
            return
        share = own * comm.size / counting  # memory counts once
        for vector in fragment:
            _scale(vector.moved, own if self.method.by_senders else share)
            averager.queue(vector.moved, vector.places)
        self.shared.buffers.queue(averager, share)
        self._moments.queue(averager, share, moments)
        averager.finish(decide)

    def _agree(self) -> tuple[int, float, list[bool]]:
        """Learn what all islands bring, if they share the same parameters.

        Return how many of them count, by how much this one is multiplied in their average, and
        which second moments all bring. The learning rate becomes that of the island which has taken
        part for longest.
        """
        comm, buffers = self.averager.comm, self.shared.buffers
        vectors = [*self._fragment, *(buffers.vectors if self._turn == 0 else ())]
        numbers = torch.tensor([self.shared.rate, self._weight], dtype=torch.float64)
        own = [*buffers.flags, *self._moments.flags]
        told = torch.tensor([self.digest(vectors), self.finite, *own])
        told = torch.cat([numbers.view(torch.int64), told])
        blocks = comm.run(
            lambda: comm.gather_blocks(told.view(torch.uint8), [told.nbytes] * comm.size)
        )
        all_told = blocks.view(torch.int64).view(comm.size, -1)
        rates, weights = all_told[:, :2].contiguous().view(torch.float64).t().tolist()
        digests, finite, *flags = all_told[:, 2:].t().tolist()
        others = [rank for rank, one in enumerate(digests) if one != digests[comm.rank]]
        if others:
            raise MismatchError(
                f"ranks {others} share other parameters than rank {comm.rank} after"
                f" {self.steps} outer steps; start them from one checkpoint, or with one seed, and"
                " see that their processors round alike"
            )
        rate = rates[self.islands.senior]
        if rate != self.shared.rate:
            if not self._was_told:
                warn(
                    f"this island's outer learning rate is {self.shared.rate:g}; it goes on with"
                    f" {rate:g}, the rate of the island that has taken part for longest"
                )
            self._was_told, self.shared.rate = True, rate
        counting = [weight for weight, counts in zip(weights, finite, strict=True) if counts]
        share = self.weights.share(counting, self._weight) if self.finite else 0.0
        buffers.averaged = [any(flag) for flag in flags[: len(buffers.flags)]]
        moments = [
            all(brings or not counts for brings, counts in zip(flag, finite, strict=True))
            for flag in flags[len(buffers.flags) :]
        ]
        return len(counting), share, moments

    def digest(self, vectors: Sequence[Vector]) -> int:
        """Return what sums up shared values on all ranks of this island."""
        parts = self._ranks.gather(self.shared.digest(vectors))
        return sum(part * (2 * rank + 1) for rank, part in enumerate(parts)) % (1 << 62)

    def put(self) -> list[str]:
        """Go on with what has come; return the parameters whose second moments are averages now."""
        self.shared.put(self._fragment, self.method.keep)
        self.shared.model.keep()
        return self._moments.put()

    def forget(self) -> None:
        """Forget all that this rank keeps back."""
        for fragment in self.shared.fragments:
            self._decay(fragment, 0.0)

    def _decay(self, fragment: Sequence[Vector], factor: float) -> None:
        """Multiply what this rank keeps back of a fragment."""
        self.averager.decay([name for one in fragment for name in one.places], factor)


def _scale(moved: Tensor, share: float) -> None:
    """Multiply a pseudo-gradient, which may hold NaN or Inf if it counts nothing."""
    if not share:
        moved.zero_()
    elif share != 1:
        moved.mul_(share)
