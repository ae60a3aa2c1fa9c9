"""Samples of what would be multiplied out: parameters that do not depend on one another."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

S, T = TypeVar("S"), TypeVar("T")


def meeting(one: Iterable[S], other: Iterable[T], each: int) -> list[tuple[S, T]]:
    """Return pairs in which every value of ``one`` meets at least ``each`` values of ``other``.

    These lie far apart, and move on by one with each value of ``one``. So the values of ``other``
    meet about equally many of ``one``, and each of them at least one. For more than two parameters,
    ``other`` is the product of the rest.
    """
    few, many = list(one), list(other)
    each = min(each, len(many))
    turns = max(len(few), -(-len(many) // each))
    pairs = [
        (few[turn % len(few)], many[(turn + place * len(many) // each) % len(many)])
        for turn in range(turns)
        for place in range(each)
    ]
    return list(dict.fromkeys(pairs))
