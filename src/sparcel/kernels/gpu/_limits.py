"""From which magnitude on coordinates leave a vector, estimated by samples, on a GPU."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparcel import device
from sparcel.kernels.definitions.regions import MOST_SAMPLE, sample_rank, sample_size
from sparcel.kernels.gpu._bits import magnitude_bits
from sparcel.kernels.gpu._compact import load_inside
from sparcel.kernels.gpu._launch import launch
from sparcel.kernels.gpu._radix import next_bits
from sparcel.kernels.gpu._region import TILE, layout_of, skipped
from sparcel.kernels.phase import Phase


class Source(NamedTuple):
    """What is selected from: x = memory + scale·gradient, or x itself."""

    memory: Tensor
    gradient: Tensor
    scale: float
    x: Tensor
    added: bool

    def flags(self) -> dict[str, bool]:
        """Return what kernels are compiled for."""
        return {"ADDED": self.added, "SCALED": self.scale != 1}


class Limits(NamedTuple):
    """What decides how much leaves.

    Attributes
    ----------
    shares
        int64 ``[5, shares]``: where a share stops, its first place in the domain that is selected
        from, its places, how many of these are in a sample, and the rank of the threshold in it.
    most
        int64 ``[ranks]``: the most entries of a region's message.
    """

    shares: Tensor
    most: Tensor


def limits_of(phase: Phase, rank: int, others: bool, place: torch.device) -> Limits:
    """Return what a phase decides of the others' regions, or of the own one, on a device."""
    stream = torch.cuda.current_stream(place).cuda_stream if place.type == "cuda" else 0
    return _limits_on(phase, rank, others, place, stream)


@lru_cache(maxsize=256)
def _limits_on(phase: Phase, rank: int, others: bool, place: torch.device, _: int) -> Limits:
    """Each stream has its own: nothing else would wait until they are there."""
    regions, rows, first = phase.regions, [], 0
    for stop, density in phase.shares:
        owned = regions.before(rank, stop)
        last = stop - owned if others else owned
        count = last - first
        taken = sample_size(count)
        rows.append((stop, first, count, taken, sample_rank(taken, density)))
        first = last
    numbers = [number for column in zip(*rows, strict=True) for number in column]
    both = device.put([*numbers, *phase.most], place, torch.int64)
    return Limits(both[: len(numbers)].view(5, -1), both[len(numbers) :])


@triton.jit
def sum_at(
    memory, gradient, scale, at, size,
    WHOLE: tl.constexpr, ADDED: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Return memory + scale·gradient at coordinates, or memory alone; 0 from ``size`` on."""
    total = load_inside(memory, at, size, WHOLE)
    if ADDED:
        addend = load_inside(gradient, at, size, WHOLE).to(tl.float32)
        if SCALED:
            addend = addend * scale
        total = total + addend
    return total


@triton.jit
def _nth_largest(bits, counted, nth):
    """Return the ``nth`` largest of the magnitudes that are counted."""
    found, nth = next_bits(bits, counted, nth * 0, nth, 20, 11)
    found, nth = next_bits(bits, counted, found, nth, 10, 10)
    found, _ = next_bits(bits, counted, found, nth, 0, 10)
    return found


@triton.jit(do_not_specialize=["size", "ranks", "block_bits", "rank", "shares", "step", "words"])
def _begin(
    memory, gradient, scale, size, ranks, block_bits, rank, table, shares, step, thresholds,
    messages, words, facts,
    ADDED: tl.constexpr, SCALED: tl.constexpr, OTHERS: tl.constexpr,
    SAMPLES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Find the threshold of a share in its sample, or write zeros to a part of the messages."""
    program = tl.program_id(0)
    if program < shares:
        first = tl.load(table + shares + program)
        count = tl.load(table + 2 * shares + program)
        taken = tl.load(table + 3 * shares + program)
        number = tl.arange(0, SAMPLES).to(tl.int64)
        spread = (((number + step * taken) & 0xFFFFFF) * 0x9E3779B1) & 0xFFFFFFFF
        place = first + tl.where(taken == count, number, ((spread >> 8) * count) >> 24)
        if OTHERS:  # the rank's own blocks before it
            blocks = ((place >> block_bits) + (ranks - 1 - rank)) // tl.maximum(ranks - 1, 1)
            at = place + (blocks << block_bits)
        else:
            at = place + skipped(place, ranks, block_bits, rank)
        counted = number < taken
        end = tl.where(counted, size, 0)
        bits = magnitude_bits(sum_at(memory, gradient, scale, at, end, False, ADDED, SCALED))
        nth = tl.load(table + 4 * shares + program).to(tl.int32)
        tl.store(thresholds + program, tl.maximum(_nth_largest(bits, counted, nth), 1))
    else:
        part = (program - shares).to(tl.int64)
        word = part * TILE + tl.arange(0, TILE)
        zero = tl.zeros([TILE], tl.int32)
        tl.store(messages.to(tl.pointer_type(tl.int32), bitcast=True) + word, zero, word < words)
        if part == 0:
            tl.store(facts + tl.arange(0, 4), tl.zeros([4], tl.int64))


@triton.jit
def _share_of(stops, shares, coordinate):
    """Return the share of a coordinate; the last one past the end."""
    share = shares * 0
    for first in range(0, shares, 256):
        number = first + tl.arange(0, 256)
        stop = tl.load(stops + number, mask=number < shares - 1, other=0x7FFFFFFF)
        share += tl.sum((stop <= coordinate).to(tl.int32), axis=0)
    return tl.minimum(share, shares - 1)


@triton.jit
def limits_at(
    at, first, stops, shares, thresholds, ranks, block_bits, owner,
    ONE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Return the thresholds of the coordinates of a tile; ``ONE`` if there is only one share."""
    if ONE:
        limit = tl.load(thresholds)
    else:
        end = first + TILE - 1
        share = _share_of(stops, shares, first + skipped(first, ranks, block_bits, owner))
        last = _share_of(stops, shares, end + skipped(end, ranks, block_bits, owner))
        limit = tl.load(thresholds + share) + tl.zeros([TILE], tl.int32)
        for later in range(share + 1, last + 1):
            reached = at >= tl.load(stops + later - 1)
            limit = tl.where(reached, tl.load(thresholds + later), limit)
    return limit


def begin(
    source: Source,
    phase: Phase,
    limits: Limits,
    rank: int,
    step: int,
    others: bool,
    messages: Tensor,
    facts: Tensor,
) -> Tensor:
    """Return the threshold of each share, bits in int32; set messages and facts to zero."""
    shares, words = len(phase.shares), messages.numel() // 4
    thresholds = source.x.new_empty(shares, dtype=torch.int32)
    launch(
        _begin, shares + triton.cdiv(words, TILE), source.memory, source.gradient, source.scale,
        *layout_of(phase), rank, limits.shares, shares, step & 0xFFFFFF, thresholds, messages,
        words, facts, **source.flags(), OTHERS=others, SAMPLES=MOST_SAMPLE, TILE=TILE, num_warps=16,
        enable_fp_fusion=False,
    )  # fmt: skip
    return thresholds
