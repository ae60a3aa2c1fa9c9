"""The whole step of the default scheme in plain torch, to be read alone.

It does on one machine what P ranks do together, with a list of tensors in place of each of them.
The compiled passes and the GPU's compute the same, bit for bit: `tests/test_simple.py` compares
them. What they add are messages, layers with densities of their own, momentum, clipping, other
formats, and messages without indices where these are shorter.
"""

import math

import torch
from torch import Tensor


def step(
    memories: list[Tensor],
    gradients: list[Tensor],
    number: int,
    density: float = 1.0,
    returned: float | None = None,
    bits: int = 5,
) -> tuple[Tensor, list[Tensor]]:
    """Return the update of one step, the same for all ranks, and each rank's new memory.

    Parameters
    ----------
    memories, gradients
        A vector ``[n]`` for each rank, float32. Memories begin as zeros.
    number
        How many steps came before; it decides where samples are taken.
    density, returned
        Share of the coordinates that a rank sends, 1 for all, and of the sums that an owner
        returns: ``3·density`` unless it is told.
    bits
        Bits of a value that travels, 3 to 8.
    """
    ranks, size = len(gradients), gradients[0].numel()
    returned = min(1.0, 3 * density) if returned is None else returned
    owner = owners(size, ranks)
    x = [memory + gradient for memory, gradient in zip(memories, gradients, strict=True)]

    # Up: each rank sends the owner of each region its largest coordinates of it.
    arrived: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(ranks)]
    for rank in range(ranks):
        limit = threshold(x[rank][owner != rank], density, number)
        for other in range(ranks):
            if other != rank:
                region = (owner == other).nonzero().flatten()
                arrived[other].append(take_out(x[rank], region, limit, density, bits))

    # Down: each owner adds what arrived to its own part, and returns the largest sums to all.
    update = torch.zeros_like(x[0])
    for rank in range(ranks):
        for coordinates, values in arrived[rank]:
            x[rank][coordinates] += values
        region = (owner == rank).nonzero().flatten()
        limit = threshold(x[rank][region], returned, number)
        coordinates, values = take_out(x[rank], region, limit, returned, bits)
        update[coordinates] = values / ranks

    if not all(vector.isfinite().all() for vector in (update, *x)):
        return torch.full_like(update, torch.nan), memories  # the step is void on all ranks
    return update, x


def owners(size: int, ranks: int) -> Tensor:
    """Return which rank owns each coordinate, ``[n]``: every P-th block is of the same rank."""
    wanted = max(1, size // (16 * ranks))
    block = min(16384, max(64, 1 << wanted.bit_length() - 1))
    return torch.arange(size) // block % ranks


def take_out(
    x: Tensor, region: Tensor, limit: float, density: float, bits: int
) -> tuple[Tensor, Tensor]:
    """Take a region's coordinates that reach the limit out of ``x``; return what travels of them.

    What rounding takes stays in ``x``. A message has room for twice what is expected, and a little
    more, because the limit is estimated.
    """
    if density < 1:
        room = 2 * math.ceil(density * region.numel()) + 64
        region = region[x[region].abs() >= limit][:room]
    values = rounded(x[region], bits)
    x[region] -= values
    return region, values


def threshold(x: Tensor, density: float, number: int) -> float:
    """Return the magnitude, above 0, that about this share of the coordinates reaches.

    It is that of a sample, whose places multiples of the golden section spread over the vector,
    elsewhere in each step.
    """
    count = x.numel()
    taken = min(count, max(1024, min(8192, count // 64)))
    if taken == 0:
        return math.inf
    if taken < count:
        turns = torch.arange(taken) + number * taken & 0xFFFFFF
        x = x[((turns * 0x9E3779B1 & 0xFFFFFFFF) >> 8) * count >> 24]
    rank = max(1, min(int(density * taken + 0.5), taken))
    return max(float(x.abs().topk(rank).values[-1]), 2.0**-149)


def rounded(values: Tensor, bits: int) -> Tensor:
    """Return values as receivers read them: levels of a scale that 64 consecutive ones share.

    The scale is their largest magnitude in bfloat16; s = 2^(bits−1) − 1 levels lie above zero.
    """
    levels = torch.tensor(2.0 ** (bits - 1) - 1)
    rows = torch.nn.functional.pad(values, (0, -values.numel() % 64)).view(-1, 64)
    largest = rows.abs().amax(dim=1, keepdim=True)
    scales = largest.clamp(max=torch.finfo(torch.bfloat16).max).bfloat16().float()
    level = (rows.abs() * (levels / scales) + 0.5).floor().clamp(max=levels)
    is_some = (level > 0) & (largest >= 2.0**-100)
    held = torch.where(is_some, level * (scales / levels) * rows.sign(), 0)
    return held.view(-1)[: values.numel()]
