"""Messages of a header and parts, and sorted indices in few bits each."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from sparcel.core.device import put
from sparcel.core.kernels.definitions.reduce import indices_fault
from sparcel.core.kernels.definitions.select import index_dtype

WORD = 8
"""Parts of a message begin at multiples of so many bytes."""

_MOST_LOW_BITS = 57  # so many can be read at once, from any bit of a byte on


def join_message(
    parts: Sequence[Tensor], header: bytes, finite: Tensor | None = None, void: int = 0
) -> tuple[Tensor, ...]:
    """Return a message: its header, and its parts, each padded with zeros to multiples of 8 bytes.

    Parameters
    ----------
    parts
        One to three contiguous tensors of any dtype.
    header
        40 bytes, of which the last 8 tell how many the message has.
    finite
        bool ``[]``, on the device of the parts; None where the header tells what is so.
    void
        The bits that the first 8 bytes of the header have in addition where ``finite`` is false.

    Returns
    -------
    tuple
        uint8 tensors: the header, on the host, and the payload; or one, where both are on the host,
        or ``finite`` is given.

    Raises
    ------
    ValueError
        When the header tells another length.
    """
    contents = [part.reshape(-1).view(torch.uint8) for part in parts]
    payload = torch.cat(
        [torch.nn.functional.pad(one, (0, -one.numel() % WORD)) for one in contents]
    )
    check_length(header, payload.numel())
    control = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    if finite is None:
        return (torch.cat([control, payload]),) if payload.is_cpu else (control, payload)
    words = put(control.view(torch.int64), payload.device, torch.int64)
    words[:1] |= torch.where(finite, 0, void)
    return (torch.cat([words.view(torch.uint8), payload]),)


def check_length(header: bytes, payload: int) -> None:
    """Raise ValueError unless a header tells the length of itself and of so many bytes."""
    if int.from_bytes(header[-8:], "little") != len(header) + payload:
        raise ValueError("the parts must take up the message")


@lru_cache(maxsize=256)  # the lengths of a message are asked for several times
def packed_words(count: int, size: int) -> int:
    """Return how many words `pack_indices` needs for ``count`` indices below ``size``.

    These are count · (log₂(size / count) + 2) bits, or up to 0.09 · count fewer, and never more
    than size. The count never falls when ``count`` rises.
    """
    low_bits, bitmap_bits = layout(count, size)
    return -(-(bitmap_bits + count * low_bits) // 64)


def pack_indices(indices: Tensor, size: int) -> Tensor:
    """Pack sorted indices by Elias and Fano's code, or as a bitmap where that is shorter.

    Each index is split into l = ⌊log₂(size / count)⌋ low bits (at most 57) and the number h of the
    bits above. The i-th index sets bit h + i of a bitmap of count + ⌊(size − 1) / 2^l⌋ bits. The
    low bits of all indices follow. The length depends on the counts alone, and is within 0.6 bits
    an index of the entropy of sparse indices that lie anywhere. Where there are more indices than a
    quarter of the coordinates, index i sets bit i of a bitmap of all coordinates instead.

    Parameters
    ----------
    indices
        ``[nnz]``, int32 or int64, sorted, unique and in ``[0, size)``.

    Returns
    -------
    Tensor
        int64 ``[packed_words(nnz, size)]``. The first bit is the lowest of the first word. The
        last word is filled up with zeros.

    Source: Elias, "Efficient storage and retrieval by content and address of static files", 1974.
    """
    count, positions = indices.numel(), indices.long()
    low_bits, bitmap_bits = layout(count, size)
    bits = positions.new_zeros(64 * packed_words(count, size))
    if _is_bitmap(count, size):
        bits[positions] = 1
    else:
        bits[(positions >> low_bits) + _places(count, indices)] = 1
    lows = positions[:, None] >> _places(low_bits, indices) & 1
    bits[bitmap_bits : bitmap_bits + lows.numel()] = lows.flatten()
    return (bits.view(-1, 64) << _places(64, indices)).sum(dim=1)


def unpack_indices(words: Tensor, count: int, size: int) -> tuple[Tensor, bool | Tensor]:
    """Return the indices that `pack_indices` packed, with the dtype that ``size`` needs.

    Parameters
    ----------
    words
        As returned by `pack_indices`, or any others.

    Returns
    -------
    indices, fault
        ``[count]``, and, on the device of the words, whether these do not hold so many indices,
        sorted, unique and in range. The indices then mean nothing.
    """
    low_bits, bitmap_bits = layout(count, size)
    bits = (words[:, None] >> _places(64, words) & 1).flatten()
    highs = bits[:bitmap_bits].nonzero().squeeze(1)
    if highs.numel() != count:
        return words.new_zeros(count, dtype=index_dtype(size)), True
    if _is_bitmap(count, size):
        return highs.to(index_dtype(size)), False
    lows = bits[bitmap_bits : bitmap_bits + count * low_bits].view(count, low_bits)
    low = (lows << _places(low_bits, words)).sum(dim=1)
    indices = (highs - _places(count, words) << low_bits | low).to(index_dtype(size))
    return indices, indices_fault(indices, size)


def layout(count: int, size: int) -> tuple[int, int]:
    """Return how many low bits an index has, and how many bits the bitmap of the others has."""
    if count == 0:
        return 0, 0
    if _is_bitmap(count, size):
        return 0, size
    low_bits = min((size // count).bit_length() - 1, _MOST_LOW_BITS)
    return low_bits, count + (size - 1 >> low_bits)


def _is_bitmap(count: int, size: int) -> bool:
    return count > size // 4


def _places(count: int, like: Tensor) -> Tensor:
    return torch.arange(count, device=like.device)
