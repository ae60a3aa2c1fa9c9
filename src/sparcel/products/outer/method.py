"""What an outer step does, by settings or a paper's name, when it is due, and how islands count."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from sparcel.core._checks import check_type, checked_flag, checked_number, checked_whole
from sparcel.core.formats import FewBits, Format
from sparcel.core.schemes import Bidirectional, Dense, Scheme
from sparcel.core.schemes.from_papers import SparseLoCo
from sparcel.core.selectors import Bucketed
from sparcel.errors import InputError, checked_name, warn

Divisor = Literal["all", "sent"]
"""Over whom a coordinate is averaged: all islands, or those that sent it."""


@dataclass(frozen=True)
class Method:
    """How islands exchange what their parameters have moved, and what they do with the average.

    Parameters
    ----------
    scheme
        What averages the pseudo-gradients, as `sparcel.scheme` makes it.
    lr, momentum, nesterov
        The outer optimiser, `torch.optim.SGD`, which steps with the average.
    decay
        What the memory of a fragment is multiplied by after each of its outer steps, in [0, 1]: 1
        loses nothing, 0 is no error feedback.
    fragments
        How many parts take turns, so that a part is exchanged every ``every / fragments`` inner
        steps. The tensors of the model are dealt to them in turn.
    overlap
        How many inner steps go on while a fragment is exchanged.
    keep
        The share of an island's own parameters in what it goes on with, in [0, 1): the rest are the
        shared parameters.
    moments
        After how many exchanges of a fragment the second moments that Adam and its kin keep of
        gradients become their averages, too, in float32: the first time in the first exchange. Not
        those that will be nine tenths forgotten when the next would come. 0: never.
    """

    scheme: Scheme
    lr: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True
    decay: float = 1.0
    fragments: int = 1
    overlap: int = 0
    keep: float = 0.0
    moments: int = 0

    def __post_init__(self) -> None:
        check_type(self.scheme, Scheme, "scheme", "sparcel.scheme('topk') makes one")
        checked_number(self.lr, "lr", above=0)
        checked_number(self.momentum, "momentum", at_least=0, below=1)
        checked_flag(self.nesterov, "nesterov")
        checked_number(self.decay, "decay", at_least=0, at_most=1)
        checked_whole(self.fragments, "fragments", 1)
        checked_whole(self.overlap, "overlap", 0)
        checked_number(self.keep, "keep", at_least=0, below=1)
        checked_whole(self.moments, "moments", 0)
        if self.moments and self.overlap:
            raise InputError("second moments are averaged only without overlap; pass overlap=0")
        if not self.momentum:
            object.__setattr__(self, "nesterov", False)  # SGD has none without momentum

    @property
    def by_senders(self) -> bool:
        """Whether a coordinate's sum is divided by the number of islands that have sent it."""
        return isinstance(self.scheme, SparseLoCo)


def default() -> Method:
    """Everything in 4 bits, up and down, with error feedback, and second moments now and then."""
    return Method(Bidirectional(1.0, format="packed:4"), lr=0.8, momentum=0.7, moments=16)


def diloco(lr: float = 0.7, momentum: float = 0.9) -> Method:
    """DiLoCo: everything in float32, and Nesterov momentum.

    Source: Douillard et al. 2023, "DiLoCo: Distributed Low-Communication Training".
    """
    return Method(Dense(), lr, momentum)


def streaming(fragments: int = 4, overlap: int = 4, bits: int = 4) -> Method:
    """Streaming DiLoCo: fragments in turn, beside inner steps, in 4 bits without error feedback.

    Islands go on with the mean of their own and of the shared parameters. The paper writes numbers
    of 4 bits with an exponent of 3 (E3M0); here they have a scale for 64 of them.
    Source: Douillard et al. 2025, "Streaming DiLoCo with overlapping communication".
    """
    scheme = Bidirectional(1.0, format=f"packed:{bits}")
    return Method(scheme, decay=0.0, fragments=fragments, overlap=overlap, keep=0.5)


def sparseloco(lr: float | None = None, divisor: Divisor = "all") -> Method:
    """SparseLoCo: one coordinate in 64, in 2 bits, a decaying memory, and no outer momentum.

    What is not sent waits for tens of outer steps, so it is for trainings of many hundreds.

    Parameters
    ----------
    lr
        The outer rate. By default 2, which ended below the paper's 1 in our trainings; 1 where
        sums are divided by the number of senders, which makes them larger.
    divisor
        ``"all"``, as in the paper: a coordinate's sum is divided by the number of islands. It goes
        by way of the owners of regions, so a rank sends as much however many islands there are.
        ``"sent"``, as in its authors' code: by the number of islands that have sent the coordinate,
        each clipped to the median norm. Every island then gets all that the others send, in their
        layout of chunks. It ended lower in our trainings.

    Source: Sarfi et al. 2025, "Communication Efficient LLM Pre-training with SparseLoCo".
    """
    checked_name(divisor, ("all", "sent"), "divisor")
    values = FewBits(2, block=64)
    scheme: Scheme = Bidirectional(1 / 64, format=Format("packed", values))
    if divisor == "sent":
        scheme = SparseLoCo(1 / 64, format=Format("chunked", values), selector=Bucketed(4096, 64))
    rate = lr if lr is not None else 1.0 if divisor == "sent" else 2.0
    return Method(scheme, rate, momentum=0.0, decay=0.95)


def muloco(bits: int = 4, decay: float = 0.9) -> Method:
    """MuLoCo: Muon inside, everything in few bits, and a decaying error feedback.

    Give `sparcel.outer.attach` Muon as the inner optimiser. The authors scale numbers row by row;
    here 64 share a scale, or 32 with 2 bits.
    Source: Thérien et al. 2025, "MuLoCo: Muon is a practical inner optimizer for DiLoCo".
    """
    return Method(Bidirectional(1.0, format=f"packed:{bits}"), decay=decay)


METHODS = {
    "default": default,
    "diloco": diloco,
    "streaming": streaming,
    "sparseloco": sparseloco,
    "muloco": muloco,
}
"""The methods by name."""


def chosen_method(method: Method | Scheme | str | None) -> Method:
    """Return a method that is given, by name, or by its scheme alone; a fresh scheme is its own."""
    if isinstance(method, Scheme):
        method = Method(method)
    if not isinstance(method, Method):
        method = METHODS[checked_name(method or "default", METHODS, "method")]()
    return replace(method, scheme=method.scheme.fresh())


class Pace:
    """When an outer step of the next fragment is due.

    Parameters
    ----------
    every
        After how many inner steps each parameter is exchanged, or after how many seconds: "60s".
    fragments
        How many fragments take turns.
    overlap
        How many inner steps go on while a fragment is exchanged.

    Raises
    ------
    InputError
        When the pace is none, or exchanges would overlap one another.
    """

    def __init__(self, every: int | str, fragments: int, overlap: int) -> None:
        self._fragments, self._seconds, self._steps = fragments, 0.0, 1
        if isinstance(every, str):
            found = re.fullmatch(r"([0-9]+\.?[0-9]*|\.[0-9]+) ?s", every)
            if found is None:
                raise InputError(
                    f'every must be a number of steps, or such as "60s", got {every!r}'
                )
            self._seconds = checked_number(float(found[1]), "the seconds of every", above=0)
        else:
            self._steps = checked_whole(every, "every", 1)
            if overlap >= max(1, self._steps // fragments):
                raise InputError(
                    f"overlap must be less than the inner steps between exchanges, got {overlap}"
                    f" with every={every} and {fragments} fragments"
                )
        self.begin()

    def begin(self) -> None:
        """Count seconds from now on: an outer step has ended."""
        self._since = time.monotonic()

    @property
    def goes_by_time(self) -> bool:
        """Whether seconds count, and not inner steps."""
        return self._seconds > 0

    def due(self, steps: int) -> int:
        """Return after how many inner steps so many outer steps are due."""
        return -(-steps * self._steps // self._fragments)

    def is_due(self, clock: int, steps: int) -> bool:
        """Tell whether one is due after so many inner steps, and outer steps."""
        if self.goes_by_time:
            return time.monotonic() - self._since >= self._seconds / self._fragments
        return clock >= self.due(steps + 1)


class Weights:
    """How much this island has learned from, by which islands count in the average.

    Parameters
    ----------
    fragments
        How many fragments take turns.
    """

    def __init__(self, fragments: int) -> None:
        self._counted = math.nan
        """What it was told in all; NaN if it was told nothing."""
        self._marks = [0.0] * fragments
        """What of it was counted when each fragment was exchanged last."""
        self._moved = math.nan
        self._has_warned = False

    def count(self, amount: float) -> None:
        """Add what this island has learned from."""
        amount = checked_number(amount, "what an island has learned from", at_least=0)
        self._counted = amount + (0.0 if math.isnan(self._counted) else self._counted)

    def move(self, fragment: int) -> float:
        """Return what it has learned from since a fragment was exchanged; NaN if unknown."""
        self._moved = self._counted
        return self._counted - self._marks[fragment]

    def step(self, fragment: int) -> None:
        """Begin anew with a fragment that was exchanged as it was at the last `move`."""
        if not math.isnan(self._moved):
            self._marks[fragment] = self._moved

    def forget(self) -> None:
        """Begin anew with all fragments."""
        if not math.isnan(self._counted):
            self._marks = [self._counted] * len(self._marks)

    def share(self, told: Sequence[float], own: float) -> float:
        """Return by what this island's pseudo-gradient is multiplied before the average.

        Parameters
        ----------
        told
            What the islands that count have learned from.
        own
            What this one has.
        """
        total = sum(told)
        if math.isnan(total):
            if not self._has_warned and not all(map(math.isnan, told)):
                self._has_warned = True
                warn(
                    "some islands have told by count() what they have learned from, and others have"
                    " not: all count alike"
                )
            return 1.0
        return own * len(told) / total if total else 1.0

    @property
    def state(self) -> Tensor:
        """What it has learned from since each fragment was exchanged, float64 ``[fragments]``."""
        return torch.tensor([self._counted - mark for mark in self._marks], dtype=torch.float64)

    @state.setter
    def state(self, state: Tensor) -> None:
        waiting = state.tolist()
        self._counted = math.nan if any(map(math.isnan, waiting)) else 0.0
        self._marks = [0.0 if math.isnan(one) else -one for one in waiting]
