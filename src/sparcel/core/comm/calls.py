"""What a rank called: a text for people, and a fingerprint that its messages carry.

Every message carries the fingerprint of the call that sent it. A rank that receives a message of
another call knows that the ranks disagree, whatever the message holds.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping
from functools import lru_cache
from inspect import signature
from typing import Any, NamedTuple
from zlib import crc32

import torch

_FINGERPRINT_BITS = 32


def digest(text: str, bits: int) -> int:
    """Return a hash of a text, the same in every process; ``bits`` is a multiple of 8."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=bits // 8).digest())


class Call(NamedTuple):
    """A function with arguments that are the same on all ranks, such as ``ring(op=sum, size=40)``.

    ``fingerprint`` is 32 bits of a hash of ``text``.
    """

    text: str
    fingerprint: int

    @classmethod
    def of(cls, name: str, arguments: Mapping[str, object]) -> Call:
        """Describe a call of the function ``name``."""
        inside = ", ".join([f"{key}={_said(value)}" for key, value in arguments.items()])
        text = f"{name}({inside})"
        return cls(text, digest(text, _FINGERPRINT_BITS))

    def at(self, step: str) -> Call:
        """Return the same call with what differs from step to step, such as ``step=3``."""
        return Call(f"{self.text[:-1]}, {step})", crc32(step.encode(), self.fingerprint))


class LatestCall(NamedTuple):
    """The call that a rank began last, and its position in the program.

    Attributes
    ----------
    label
        The communicator of the outermost call.
    outer
        How many outermost calls that communicator has seen.
    begun
        The calls that have begun on that communicator since the last of them, itself included, with
        their depths.
    under_way
        The call and those around it on that communicator, the outermost first.

    Calls on communicators that were split from it are left out: their arguments may differ between
    its ranks, as the sizes of shards do. Their messages carry their fingerprints all the same.
    """

    label: str
    outer: int
    begun: tuple[tuple[int, Call], ...]
    under_way: tuple[Call, ...]

    @property
    def position(self) -> str:
        """A text that is the same on ranks that made the same outermost calls before."""
        return f"{self.label}/{self.outer}"

    @property
    def history(self) -> str:
        """The texts of ``begun``, one a line, indented by their depth."""
        return "".join([" " * depth + call.text + "\n" for depth, call in self.begun])

    @property
    def texts(self) -> str:
        """The texts of ``under_way``, one a line."""
        return "\n".join([call.text for call in self.under_way])


class Calls:
    """The calls of one process on a communicator and on those split from it.

    Only jobs make calls, so one thread at a time changes this. Any thread may read ``latest``.

    Attributes
    ----------
    under_way
        The call under way and those around it, the outermost first.
    fingerprint
        Of these; 0 outside of calls.
    latest
        The call that began last, or None before the first one.
    """

    def __init__(self) -> None:
        self.fingerprint = 0
        self.latest: LatestCall | None = None
        self.under_way: tuple[Call, ...] = ()
        self._outer: Counter[str] = Counter()

    def begin(self, call: Call, label: str) -> tuple[tuple[Call, ...], int]:
        """Begin ``call`` on the communicator with this label.

        Returns what ``under_way`` and ``fingerprint`` have to be again when it ends.
        """
        around, fingerprint = self.under_way, self.fingerprint
        self.fingerprint = (31 * fingerprint + call.fingerprint) % (1 << _FINGERPRINT_BITS)
        if not around:
            self._outer[label] += 1
            self.latest = LatestCall(label, self._outer[label], ((0, call),), (call,))
            self.under_way = (call,)
        elif self.latest is not None and label == self.latest.label:
            self.under_way = (*around, call)
            begun = (*self.latest.begun, (len(around), call))
            self.latest = LatestCall(label, self.latest.outer, begun, self.under_way)
        return around, fingerprint


@lru_cache(maxsize=1024, typed=True)
def call_of(
    function: Callable[..., object],
    facts: tuple[tuple[str, object], ...],
    args: tuple[object, ...],
    kwargs: tuple[tuple[str, object], ...],
) -> Call:
    """Describe ``function(stream, wire, *args, **kwargs)``, default arguments included.

    ``facts`` are what all ranks know of the stream and the wire. Cached, because this takes longer
    than a small message.
    """
    bound = signature(function).bind(None, None, *args, **dict(kwargs))
    bound.apply_defaults()
    arguments = list(bound.arguments.items())[2:]
    return Call.of(function.__name__, dict(arguments) | dict(facts))


def differences(places: Mapping[int, str]) -> str:
    """Say which ranks called what, given each rank's ``texts``; empty if all are the same.

    Calls around a call are left out where they are the same on all ranks.
    """
    if len(set(places.values())) < 2:
        return ""
    stacks = {rank: texts.split("\n") for rank, texts in places.items()}
    depth = 0
    while len({stack[depth] for stack in stacks.values()}) == 1:
        depth += 1
        if any(len(stack) == depth for stack in stacks.values()):
            break
    callers: dict[str, list[int]] = {}
    for rank, stack in sorted(stacks.items()):
        callers.setdefault(stack[min(depth, len(stack) - 1)], []).append(rank)
    return "; ".join(f"{_ranks(ranks)} called {text}" for text, ranks in callers.items())


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _said(value: Any) -> str:
    """Return a text for an argument, the same in every process."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    text = repr(value)
    return type(value).__name__ if text == object.__repr__(value) else text  # tells no address
