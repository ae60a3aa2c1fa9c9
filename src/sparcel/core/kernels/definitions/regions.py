"""The passes of the two exchanges by regions: up to the owners, and down from them.

They are composed of other kernels, so they run on any device and with any format.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sparcel.core import kernels
from sparcel.core.device import all_of, finite_flag
from sparcel.core.kernels.definitions.select import Addition, magnitude_bits
from sparcel.core.kernels.regions import Leg, Regions
from sparcel.core.ops import SUM
from sparcel.errors import FormatError, MismatchError


class Entered(NamedTuple):
    """What a rank sends up.

    Attributes
    ----------
    messages
        uint8, by owner; that of the rank itself is nothing. On a GPU one tensor ``[P, length]``,
        whose rows have room for the longest message: its header tells where a message ends.
    sent
        How many entries these are.
    magnitude
        By how much the sum of ``|x|`` fell.
    """

    messages: Sequence[Tensor] | Tensor
    sent: int | Tensor
    magnitude: float | Tensor


class Collected(NamedTuple):
    """What an owner returns.

    Attributes
    ----------
    message
        uint8; on a GPU with room for the longest.
    magnitude
        By how much the sum of ``|x|`` fell.
    fault
        Whether a message that arrived was something else. Nothing of this step may be kept then.
    """

    message: Tensor
    magnitude: float | Tensor
    fault: bool | Tensor


class Delivered(NamedTuple):
    """What all owners returned.

    Attributes
    ----------
    entries
        How many coordinates came back.
    finite
        Whether all that any rank added up, and all that was written, is finite.
    fault
        As of `Collected`.
    """

    entries: int | Tensor
    finite: bool | Tensor
    fault: bool | Tensor


def enter(addition: Addition, up: Leg, rank: int, step: int) -> Entered:
    """Compute ``x = memory + addend``, and take out of it what this rank sends to other owners.

    Parameters
    ----------
    addition
        Its scratch is ``x``, and holds what is kept: what does not travel, and what rounding takes.
        What enters, if it is kept, becomes 0 where a coordinate was selected.
    up
        How much of each region travels: all, or what reaches a threshold that is estimated from a
        sample of the other owners' coordinates, one for each share. No more than there is room for:
        the first by place.
    rank
        This rank, whose own region stays whole.
    step
        Decides what a sample takes, and random rounding.
    """
    x, ranks = addition.scratch, up.regions.ranks
    *_, finite = kernels.accumulate_topk(addition, 0)
    limits = _limits(x, up, rank, step, others=True)
    messages, sent = [x.new_empty(0, dtype=torch.uint8)] * ranks, 0
    fell: float | Tensor = 0.0
    for number, owner in enumerate(owner for owner in range(ranks) if owner != rank):
        turn = (step, rank, number)
        messages[owner], count, less = _take_out(addition, up, owner, limits, finite, turn)
        sent += count
        fell += less
    return Entered(messages, sent, fell)


def collect(
    addition: Addition,
    arrived: Sequence[Tensor] | Tensor,
    up: Leg,
    down: Leg,
    rank: int,
    step: int,
) -> Collected:
    """Add what arrived to the own region of ``x``, and take out of it what all ranks get.

    Parameters
    ----------
    arrived
        The messages of the other ranks, by source; they are added in this order. A GPU has them in
        one tensor, as `Entered` has.
    down
        How much of the own region travels: at least as much as ``up``.

    The others are those of `enter`.
    """
    x, regions = addition.scratch, up.regions
    region, flags = regions.take(x, rank), []
    before = _magnitude(region)
    for source in range(regions.ranks):
        if source == rank:
            continue
        try:
            read = up.code.decode(regions.length(rank), up.dtype, arrived[source])
        except (FormatError, MismatchError):
            return Collected(arrived[source], 0.0, True)
        indices, values, finite = read
        flags.append(finite)
        if indices is None:
            region += values
        else:
            kernels.scatter_reduce(region, indices, values, SUM)
    rose = _magnitude(region) - before
    regions.put(x, rank, region)
    finite = all_of([*flags, finite_flag(region)])
    limits = _limits(x, down, rank, step, others=False)
    turn = (step, rank, regions.ranks - 1)
    message, _, fell = _take_out(addition, down, rank, limits, finite, turn)
    return Collected(message, fell - rose, False)


def deliver(
    out: Tensor, returned: Sequence[Tensor] | Tensor, down: Leg, divisor: float
) -> Delivered:
    """Write what all owners returned, over the divisor, to ``out``, and zeros elsewhere.

    Parameters
    ----------
    out
        ``[size]``, any float dtype; it may be the gradient.
    returned
        The messages of all owners, as `collect` has them.
    """
    regions, entries, flags = down.regions, 0, []
    out.zero_()
    for owner in range(regions.ranks):
        try:
            read = down.code.decode(regions.length(owner), down.dtype, returned[owner])
        except (FormatError, MismatchError):
            return Delivered(0, False, True)
        indices, values, finite = read
        average = kernels.average(values, divisor).to(out.dtype)
        if indices is None:
            regions.put(out, owner, average)
        else:
            kernels.scatter(out, regions.coordinates(owner, indices), average)
        entries += values.numel()
        flags += [finite, finite_flag(average)]
    return Delivered(entries, all_of(flags), False)


def _take_out(
    addition: Addition,
    leg: Leg,
    owner: int,
    limits: list[Tensor],
    finite: bool | Tensor,
    turn: tuple[int, ...],
) -> tuple[Tensor, int, float | Tensor]:
    """Return a message of a region, in which what rounding takes is left, and what it holds."""
    regions, x, indices = leg.regions, addition.scratch, None
    region = values = regions.take(x, owner)
    if not leg.dense:
        indices, values = _reaching(region, leg, owner, limits)
    message, held = leg.code.encode(region.numel(), indices, values, finite, turn)
    rest = values - held
    fell = _magnitude(values) - _magnitude(rest)
    if indices is None:
        region = rest
    else:
        kernels.scatter(region, indices, rest)
        if addition.entering is not None:
            places = regions.coordinates(owner, indices)
            kernels.scatter(addition.entering, places, torch.zeros_like(values))
    regions.put(x, owner, region)
    return message, values.numel(), fell


def _reaching(region: Tensor, leg: Leg, owner: int, limits: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the first entries of a region that reach the limits of their shares."""
    bits, parts = magnitude_bits(region), leg.regions.parts(leg.shares, owner)
    reached = [
        bits[first:last] >= limit for (_, _, first, last), limit in zip(parts, limits, strict=True)
    ]
    above = torch.where(torch.cat(reached), region, 0)
    indices, values = kernels.threshold_select(above, _SMALLEST[region.dtype])
    most = leg.most[owner]
    return indices[:most], values[:most]


_SMALLEST = {torch.float32: 2.0**-149, torch.float64: 2.0**-1074}
"""The least magnitudes above 0."""


def _limits(x: Tensor, leg: Leg, rank: int, step: int, others: bool) -> list[Tensor]:
    """Return, by share, the bits of the magnitude from which entries travel."""
    regions = leg.regions
    if leg.dense or (others and regions.ranks == 1):
        return []
    place = Regions.elsewhere if others else Regions.coordinates
    limits = []
    for _, density, first, last in regions.parts(leg.shares, rank, others):
        places = sampled_places(last - first, step, x.device)
        sample = x[place(regions, rank, places + first)]
        limits.append(sampled_threshold(sample, density))
    return limits


LEAST_SAMPLE, MOST_SAMPLE = 1024, 8192
"""How many coordinates a threshold is estimated from: one in 64, within these bounds. At 10 % the
larger gives a count that is 3 % off, in the mean."""


def sample_size(count: int) -> int:
    """Return how many of ``count`` coordinates are in a sample; all, if there are few."""
    return min(count, max(LEAST_SAMPLE, min(MOST_SAMPLE, count // 64)))


def sample_rank(taken: int, density: float) -> int:
    """Return which of a sample, by magnitude, about ``density`` of all coordinates reach."""
    return max(1, min(int(density * taken + 0.5), taken))


def sampled_places(count: int, step: int, device: torch.device) -> Tensor:
    """Return the places below ``count`` of which a step takes its sample.

    They are spread by multiples of the golden section, elsewhere in each step.
    """
    taken = sample_size(count)
    numbers = torch.arange(taken, device=device)
    if taken == count:
        return numbers
    spread = (numbers + step * taken & 0xFFFFFF) * 0x9E3779B1 & 0xFFFFFFFF
    return (spread >> 8) * count >> 24


def sampled_threshold(sample: Tensor, density: float) -> Tensor:
    """Return the bits of the magnitude that about ``density`` of the coordinates reach, above 0."""
    bits = magnitude_bits(sample)
    if bits.numel() == 0:
        return bits.new_ones(())
    return bits.topk(sample_rank(bits.numel(), density)).values[-1].clamp(min=1)


def _magnitude(values: Tensor) -> float | Tensor:
    """Return the sum of the magnitudes, on a GPU as a tensor."""
    magnitude = torch.linalg.vector_norm(values, 1, dtype=torch.float64)
    return float(magnitude) if magnitude.is_cpu else magnitude
