"""Selection of the largest coordinates of a dense vector, or of a sum that is computed first."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor


def index_dtype(size: int) -> torch.dtype:
    """Return int32 if it can count ``size`` coordinates, else int64."""
    return torch.int32 if size <= 2**31 - 1 else torch.int64


_BITS_DTYPE = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def magnitude_bits(x: Tensor) -> Tensor:
    """Return the bits of ``|x|`` as integers of the same width; they order like magnitudes."""
    dtype = _BITS_DTYPE[x.element_size()]
    return x.view(dtype) & torch.iinfo(dtype).max


@dataclass(frozen=True)
class Addition:
    """The sum ``memory + addend``, where ``addend = scale·gradient + momentum·velocity``.

    Parameters
    ----------
    memory
        ``[n]``, float32 or float64; not changed.
    gradient
        ``[n]``, float16, bfloat16, float32 or float64. It is converted to the dtype of ``memory``
        first, in which all is computed.
    scratch
        ``[n]``, the dtype of ``memory``; the sum is written there. It must not overlap the others.
    scale, momentum
        Rounded to the dtype of ``memory``.
    velocity
        ``[n]``, the dtype of ``memory``; not changed. None for zeros.
    entering
        ``[n]``, the dtype of ``memory``; the addend is written there. None writes it nowhere.
    clear
        Whether ``gradient`` is set to zero as it is read. This saves a pass over it.
    """

    memory: Tensor
    gradient: Tensor
    scratch: Tensor
    scale: float = 1.0
    momentum: float = 0.0
    velocity: Tensor | None = None
    entering: Tensor | None = None
    clear: bool = False

    def part(self, start: int, stop: int) -> Self:
        """Return the addition of the coordinates ``[start, stop)``."""
        return replace(
            self,
            memory=self.memory[start:stop],
            gradient=self.gradient[start:stop],
            scratch=self.scratch[start:stop],
            velocity=None if self.velocity is None else self.velocity[start:stop],
            entering=None if self.entering is None else self.entering[start:stop],
        )


def topk(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Select the entries of largest magnitude, exactly.

    Parameters
    ----------
    x
        Dense vector ``[n]``, float16, bfloat16, float32 or float64.
    k
        How many to select, at least 0.

    Returns
    -------
    indices, values
        ``[min(k, nnz)]`` each; ties go to the lowest index.
    """
    return topk_chunked(x, k, max(1, x.numel()))


def topk_chunked(x: Tensor, k: int, chunk: int) -> tuple[Tensor, Tensor]:
    """Select the entries of largest magnitude of every ``chunk`` consecutive ones.

    Source: SparCML's bucketed selection (section 8.3, buckets of 512) and ScaleCom's chunk-wise
    selection.

    Parameters
    ----------
    x
        Dense vector ``[n]``, float16, bfloat16, float32 or float64; its last chunk may be short.
    k
        At least 0; min(k, nnz of the chunk) entries are selected from each chunk.
    chunk
        Length of a chunk, at least 1.

    Returns
    -------
    indices, values
        Over the whole vector; ties go to the lowest index.
    """
    bits = magnitude_bits(x)
    padding = -x.numel() % chunk
    rows = torch.nn.functional.pad(bits, (0, padding)).view(-1, chunk)  # [chunks, chunk]
    if rows.numel() == 0 or k == 0:
        return _gather(x, torch.zeros_like(bits, dtype=torch.bool))
    kth = rows.topk(min(k, chunk), dim=1).values[:, -1:]  # [chunks, 1]
    above = rows > kth
    ties = (rows == kth) & (rows != 0)
    # Ties go to the lowest index: the first ones fill the remaining places of k.
    room = k - above.sum(dim=1, keepdim=True)
    selected = above | (ties & (ties.cumsum(dim=1) <= room))
    return _gather(x, selected.view(-1)[: x.numel()])


def accumulate_topk(
    addition: Addition, k: int, chunk: int | None = None
) -> tuple[Tensor, Tensor, bool | Tensor]:
    """Add, select the largest magnitudes of the sum, and keep the rest in the scratch.

    One pass over the vectors. The scratch is 0 where an entry was selected.

    Parameters
    ----------
    addition
        What to add, and where the sum goes.
    k
        How many to select, at least 0.
    chunk
        Select k of every ``chunk`` consecutive entries; None for k of all.

    Returns
    -------
    indices, values
        The selected entries; values in the dtype of the memory.
    finite
        Whether the whole sum was finite. If not, the selection and the scratch are meaningless. On
        a GPU it stays there if nothing was selected.
    """
    memory, scratch = addition.memory, addition.scratch
    scratch.copy_(addition.gradient)  # not converted inside of a sum, which would copy all of it
    if addition.scale != 1:
        scratch.mul_(addition.scale)
    if addition.velocity is not None:
        scratch.add_(torch.mul(addition.velocity, addition.momentum, out=addition.entering))
    if addition.entering is not None:
        addition.entering.copy_(scratch)
    scratch.add_(memory)
    if addition.clear:
        addition.gradient.zero_()
    finite = bool(torch.isfinite(scratch).all())
    indices, values = topk(scratch, k) if chunk is None else topk_chunked(scratch, k, chunk)
    scratch[indices.long()] = 0
    return indices, values, finite


def threshold_select(x: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Select the nonzero entries whose magnitude is at least ``threshold``.

    Parameters
    ----------
    x
        Dense vector ``[n]``, float16, bfloat16, float32 or float64.
    threshold
        At least 0; rounded to the dtype of ``x`` before it is compared.

    Returns
    -------
    indices, values
        The selected entries; NaN is always selected.
    """
    limit = magnitude_bits(torch.tensor([threshold], dtype=x.dtype, device=x.device))
    bits = magnitude_bits(x)
    return _gather(x, (bits >= limit) & (bits != 0))


def magnitude_histogram(x: Tensor, shift: int, bins: int, prefix: int | None = None) -> Tensor:
    """Count one field of the bits of ``|x|``, for a radix select over several ranks.

    With ``m`` the bits of ``|x|`` read as an integer (15, 31 or 63 bits) and ``bins = 2**b``, bin
    ``j`` counts the entries, other than zeros, with ``(m >> shift) % bins == j`` and, when a prefix
    is given, ``m >> (shift + b) == prefix``. A radix select over float32 asks for
    ``(20, 2048)``, then ``(10, 1024, first)``, then ``(0, 1024, first << 10 | second)``.

    Parameters
    ----------
    x
        Dense vector ``[n]``, float16, bfloat16, float32 or float64.
    shift
        Number of bits below the field.
    bins
        A power of two: the number of values that the field can take.
    prefix
        Required value of the bits above the field; None if there are none.

    Returns
    -------
    Tensor
        int64 ``[bins]``.
    """
    bits = magnitude_bits(x)
    counted = bits != 0
    if prefix is not None:
        counted &= bits >> (shift + bins.bit_length() - 1) == prefix
    field = (bits[counted] >> shift) & (bins - 1)
    return torch.bincount(field, minlength=bins)


def in_bin(values: Tensor, lowest: int, width: int, most: int) -> tuple[int, int, Tensor]:
    """Find the magnitudes whose bits are in ``[lowest, lowest + width)``.

    Parameters
    ----------
    values
        ``[m]``, float16, bfloat16, float32 or float64.
    most
        How many to list. The caller knows that there are no more, or wants none.

    Returns
    -------
    larger, inside
        How many magnitudes are above, and how many inside.
    listed
        int64 ``[inside]`` on the host, or ``[0]``: their bits less ``lowest``, in any order.
    """
    above = magnitude_bits(values).long() - lowest
    candidates = above[(above >= 0) & (above < width)]
    larger = int((above >= width).sum())
    return larger, candidates.numel(), candidates[:most].cpu()


def magnitude_ends(x: Tensor) -> Tensor:
    """Return the mean and the largest of the magnitudes, between which `bracket` may search.

    On the CPU they depend neither on the number of threads nor on the instruction set.

    Parameters
    ----------
    x
        Dense vector ``[n]``, n > 0, float16, bfloat16, float32 or float64.

    Returns
    -------
    Tensor
        float64 ``[2]``. Where the sum of the magnitudes overflows float64, the mean is the largest.
    """
    norm = torch.linalg.vector_norm
    peak = norm(x, torch.inf, dtype=torch.float64)
    mean = norm(x, 1, dtype=torch.float64) / x.numel()
    return torch.stack([torch.minimum(mean, peak), peak])


def bracket(x: Tensor, thresholds: Tensor, k: int) -> Tensor:
    """Find the two of many thresholds between which the (k+1)-th largest magnitude lies.

    They are counted in one pass, and nothing is sorted.

    Parameters
    ----------
    x
        Dense vector ``[n]``, float16, bfloat16, float32 or float64.
    thresholds
        ``[m]``, 2 <= m <= 2048, of the dtype of ``x``, at least 0 and ascending. Zeros of ``x``
        reach none of them.
    k
        At least 0.

    Returns
    -------
    Tensor
        int64 ``[3]``, on the device of ``x``: a place ``p < m - 1``, and how many reach thresholds
        p and p + 1. More than k reach threshold p, unless p is 0, and at most k reach threshold
        p + 1, unless that is the last.
    """
    bits = magnitude_bits(x)
    reached = torch.bucketize(bits[bits != 0], magnitude_bits(thresholds), right=True)
    found = torch.bincount(reached, minlength=thresholds.numel() + 1)[1:]  # not those below all
    return bracket_of(found, k)


def bracket_of(found: Tensor, k: int) -> Tensor:
    """Return what `bracket` does; ``found``: how many reach each threshold and none above it."""
    reaching = found.flip(0).cumsum(0).flip(0)
    place = (reaching[1:-1] > k).sum().view(1)
    return torch.cat([place, reaching.index_select(0, place), reaching.index_select(0, place + 1)])


def _gather(x: Tensor, selected: Tensor) -> tuple[Tensor, Tensor]:
    positions = selected.nonzero().view(-1)
    return positions.to(index_dtype(x.numel())), x[positions]
