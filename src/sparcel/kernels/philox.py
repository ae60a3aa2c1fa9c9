"""Philox4x32-10 in torch: random numbers that depend only on a seed and a position.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_WORD = 0xFFFFFFFF


def uniform(count: int, seed: int, offset: int, device: torch.device) -> Tensor:
    """Return the random numbers ``[offset, offset + count)`` of the sequence given by ``seed``.

    Number j is made of the upper 24 bits of word ``j mod 4`` of the Philox block whose 128-bit
    counter is ``j div 4``.

    Parameters
    ----------
    count
        How many numbers.
    seed
        The 64-bit key; other integers are taken modulo 2**64.
    offset
        Position of the first number, at least 0 and below 2**63 - count.
    device
        The device of the result.

    Returns
    -------
    Tensor
        float32 ``[count]``, in [0, 1).
    """
    first_block = offset // 4
    blocks = torch.arange(first_block, (offset + count + 3) // 4, device=device)
    words = torch.stack(philox(blocks, seed), dim=1).view(-1)
    start = offset - 4 * first_block
    return (words[start : start + count] >> 8).float() * 2.0**-24


def philox(blocks: Tensor, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the four 32-bit words of each block, as int64; the counter's upper half is 0."""
    zero = torch.zeros_like(blocks)
    c0, c1, c2, c3 = blocks & _WORD, blocks >> 32, zero, zero
    key0, key1 = seed & _WORD, (seed >> 32) & _WORD
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(c0, _MULTIPLIERS[0])
        high1, low1 = _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ key0, low1, high0 ^ c3 ^ key1, low0
        key0 = (key0 + _KEY_STEPS[0]) & _WORD
        key1 = (key1 + _KEY_STEPS[1]) & _WORD
    return c0, c1, c2, c3


def _multiply(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    # The product of two 32-bit words may wrap in int64, but its 64 bits are right.
    product = a * b
    return (product >> 32) & _WORD, product & _WORD
