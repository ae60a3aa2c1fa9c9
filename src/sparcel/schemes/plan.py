"""What a step does, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from sparcel.comm import Call, Communicator, digest
from sparcel.formats import RAW, Format
from sparcel.kernels import Phase
from sparcel.schemes.request import Request


class Span(NamedTuple):
    """Coordinates ``[start, stop)`` with a density, and how many of them it asks for."""

    start: int
    stop: int
    density: float
    k: int


def named(tensors: tuple[str, ...]) -> dict[str, object]:
    """Return facts that tell tensors from others, by name; nothing for none."""
    if not tensors:
        return {}
    others = f" and {len(tensors) - 1} more" if len(tensors) > 1 else ""
    return {"tensors": f"{tensors[0]}{others}", "digest": digest("\n".join(tensors), 32)}


@dataclass(frozen=True, eq=False)
class Plan:
    """What a step does: the same on all ranks, and in all steps until something changes.

    Attributes
    ----------
    call
        All of it, and whose gradients it averages, for the ranks to compare.
    ranks
        How many ranks the average is over.
    coordinates, asked
        How many coordinates are not exchanged apart; how many of them the densities ask for.
    spans
        The vector's ranges with their densities; empty for a scheme that sends all.
    format
        How streams travel.
    up, down
        What travels to the owners of regions, and what comes back, if the step goes by regions.
    """

    call: Call
    ranks: int
    coordinates: int
    asked: int
    spans: tuple[Span, ...] = ()
    format: Format = RAW
    up: Phase | None = None
    down: Phase | None = None


class Step(NamedTuple):
    """One step of one vector: what it is given, and what it does.

    ``out`` is a tensor like ``gradient``, or the gradient itself, to which the update is written;
    None if it is wanted as a stream.
    """

    gradient: Tensor
    comm: Communicator
    request: Request
    plan: Plan
    out: Tensor | None
