"""Sorted indices in few bits each."""

from __future__ import annotations

from torch import Tensor

from sparcel.errors import InputError
from sparcel.kernels import cpu, reference
from sparcel.kernels.reference import packed_words as words_of


def packed_words(count: int, size: int) -> int:
    """Return how many words `pack_indices` needs for ``count`` indices below ``size``.

    These are count · (log₂(size / count) + 2) bits, or up to 0.09 · count fewer. The count never
    falls when ``count`` rises.
    """
    return words_of(count, size)


def pack_indices(indices: Tensor, size: int) -> Tensor:
    """Pack sorted indices by Elias and Fano's code.

    Each index is split into l = ⌊log₂(size / count)⌋ low bits (at most 57) and the number h of the
    bits above. The i-th index sets bit h + i of a bitmap of count + ⌊(size − 1) / 2^l⌋ bits. The
    low bits of all indices follow. The length depends on the counts alone, and is within 0.6 bits
    an index of the entropy of sparse indices that lie anywhere.

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
    if indices.is_cpu:
        return cpu.pack_indices(indices, size)
    return reference.pack_indices(indices, size)


def unpack_indices(words: Tensor, count: int, size: int) -> Tensor | None:
    """Return the indices that `pack_indices` packed, with the dtype that ``size`` needs.

    Parameters
    ----------
    words
        As returned by `pack_indices`, or any others: then the indices may be out of order or of
        range, and the result is None if the bitmap does not have ``count`` bits.

    Raises
    ------
    InputError
        When the length of ``words`` does not fit the counts.
    """
    expected = packed_words(count, size)
    if words.numel() != expected:
        raise InputError(f"{count} indices below {size} need {expected} words, got {words.numel()}")
    if words.is_cpu:
        return cpu.unpack_indices(words, count, size)
    return reference.unpack_indices(words, count, size)
