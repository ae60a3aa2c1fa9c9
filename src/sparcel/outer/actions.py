"""What an island's part of the protocol wants to be done."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")


class Create(NamedTuple):
    """Create a key unless it is there; the answer is the text that it has."""

    key: str
    text: str


class Read(NamedTuple):
    """The answer is a key's text, or None."""

    key: str


class Remove(NamedTuple):
    """Remove keys that nobody needs."""

    keys: list[str]


class Wait(NamedTuple):
    """Let time go by before the next look: the longer one has waited already, the longer."""

    waited: float


class Now(NamedTuple):
    """The answer is a time in seconds."""


class Gone(NamedTuple):
    """The answer is the set of members of the last attempt whose connections have ended."""


class Signs(NamedTuple):
    """The answer is what sums up an island's last signs of life; it is empty for none."""

    island: int


class Host(NamedTuple):
    """Begin to send what is shared to an island, beside all else, under a name of its own.

    `Protocol.holds` goes with it.
    """

    guest: int
    name: str


class Receive(NamedTuple):
    """Receive what is shared; the answer is what the host holds, or the error's text."""

    host: int
    name: str


Action = Create | Read | Remove | Wait | Now | Gone | Signs | Host | Receive
Run = Generator[Action, Any, T]
"""What yields actions, is sent their answers, and returns a result."""
