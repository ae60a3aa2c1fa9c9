"""The definition of each kernel, in plain torch; runs on any device.

Magnitudes are compared by the bits of ``|x|`` read as an integer. This orders all values,
NaN > Inf > finite numbers > 0, so every selection is well defined. `sparcel.kernels` documents
arguments and results; the functions here have the same signatures.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sparcel.kernels.addition import Addition
from sparcel.kernels.philox import uniform
from sparcel.ops import Op

CHUNK = 1 << 17
"""Entries of a vector whose squares are summed by themselves."""

_MOST_LOW_BITS = 57  # so many can be read at once, from any bit of a byte on

_BITS_DTYPE = {2: torch.int16, 4: torch.int32, 8: torch.int64}

# Streams of half precision are reduced in float32 and rounded once, at the end.
_WIDE_DTYPE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


def index_dtype(size: int) -> torch.dtype:
    """Return int32 if it can count ``size`` coordinates, else int64."""
    return torch.int32 if size <= 2**31 - 1 else torch.int64


def magnitude_bits(x: Tensor) -> Tensor:
    """Return the bits of ``|x|`` as integers of the same width; they order like magnitudes."""
    dtype = _BITS_DTYPE[x.element_size()]
    return x.view(dtype) & torch.iinfo(dtype).max


def topk(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Select the largest magnitudes of the whole vector: one chunk of its length."""
    return topk_chunked(x, k, max(1, x.numel()))


def topk_chunked(x: Tensor, k: int, chunk: int) -> tuple[Tensor, Tensor]:
    """Select the largest magnitudes of every ``chunk`` consecutive entries."""
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
) -> tuple[Tensor, Tensor, bool]:
    """Add, select from the sum, and clear what was selected."""
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
    """Select the entries of at least a given magnitude."""
    limit = magnitude_bits(torch.tensor([threshold], dtype=x.dtype, device=x.device))
    bits = magnitude_bits(x)
    return _gather(x, (bits >= limit) & (bits != 0))


def sums_of_squares(vectors: Sequence[Tensor]) -> Tensor:
    """Square the chunks' norms, which takes few launches on a GPU, and add them in order."""
    chunks = [chunk for vector in vectors for chunk in vector.detach().split(CHUNK)]
    owners = [place for place, vector in enumerate(vectors) for _ in vector.split(CHUNK)]
    kinds = [(chunk.dtype, chunk.device) for chunk in chunks]
    squares = torch.zeros(len(chunks), dtype=torch.float64)
    for kind in dict.fromkeys(kinds):  # those of other kinds in a call may change how torch sums
        own = [place for place, other in enumerate(kinds) if other == kind]
        norms = torch._foreach_norm([chunks[place] for place in own], 2, dtype=torch.float64)
        squares[own] = torch.stack(norms).square_().cpu()
    sums = torch.zeros(len(vectors), dtype=torch.float64)
    sums.index_add_(0, torch.tensor(owners, dtype=torch.int64), squares)  # one by one on the CPU
    return sums.to(vectors[0].device) if vectors else sums


def merge(streams: Sequence[tuple[Tensor, Tensor]], op: Op) -> tuple[Tensor, Tensor]:
    """Reduce sorted streams in rounds: round r applies the r-th contribution of every index."""
    # A stable sort keeps the contributions of one index in the order of the streams.
    indices, order = torch.cat([indices for indices, _ in streams]).sort(stable=True)
    values = torch.cat([values for _, values in streams])[order]
    union, counts = torch.unique_consecutive(indices, return_counts=True)
    first = counts.cumsum(0) - counts
    result = widen(values[first])
    longest = int(counts.max()) if counts.numel() else 0
    for contribution in range(1, longest):
        slots = (counts > contribution).nonzero().view(-1)
        added = widen(values[first[slots] + contribution])
        result[slots] = op.apply(result[slots], added)
    return union, result.to(values.dtype)


def scatter_reduce(dense: Tensor, indices: Tensor, values: Tensor, op: Op) -> None:
    """Apply ``dense[i] = op(dense[i], v)`` in place."""
    positions = indices.long()
    reduced = op.apply(widen(dense[positions]), widen(values.to(dense.dtype)))
    dense[positions] = reduced.to(dense.dtype)


def scatter(dense: Tensor, indices: Tensor, values: Tensor) -> None:
    """Apply ``dense[i] = v`` in place."""
    dense[indices.long()] = values.to(dense.dtype)


def expand(dense: Tensor, indices: Tensor, values: Tensor, fill: float) -> None:
    """Fill ``dense``, then write the entries."""
    dense.fill_(fill)
    scatter(dense, indices, values)


def add_saturated(dense: Tensor, indices: Tensor, values: Tensor) -> None:
    """Apply ``dense[i] += v`` in place, within the finite numbers."""
    positions, most = indices.long(), torch.finfo(dense.dtype).max
    dense[positions] = (dense[positions] + values).clamp(-most, most)


def within(indices: Tensor, values: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """Keep the entries whose indices are among ``others``."""
    kept = torch.isin(indices, others)
    return indices[kept], values[kept]


def without(indices: Tensor, values: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """Keep the entries whose indices are not among ``others``."""
    kept = ~torch.isin(indices, others)
    return indices[kept], values[kept]


def magnitude_histogram(x: Tensor, shift: int, bins: int, prefix: int | None = None) -> Tensor:
    """Count a field of the magnitudes' bits."""
    bits = magnitude_bits(x)
    counted = bits != 0
    if prefix is not None:
        counted &= bits >> (shift + bins.bit_length() - 1) == prefix
    field = (bits[counted] >> shift) & (bins - 1)
    return torch.bincount(field, minlength=bins)


def quantize(
    x: Tensor, bits: int, bucket: int, seed: int, offset: int = 0
) -> tuple[Tensor, Tensor]:
    """Round each magnitude up or down to a level, at random, and pack the codes."""
    levels = 2 ** (bits - 1) - 1
    padding = -x.numel() % bucket
    rows = torch.nn.functional.pad(x.float(), (0, padding)).view(-1, bucket)
    scales = rows.abs().amax(dim=1)
    # A bucket with a non-finite entry becomes all NaN, because codes cannot express NaN or Inf.
    scales = torch.where(scales.isfinite(), scales, torch.nan)
    # Comparisons with NaN are false, so a NaN bucket gets codes of 0, like a bucket of zeros.
    shares = torch.where(scales[:, None] > 0, rows.abs() / scales[:, None], 0.0)
    exact = (shares * levels).view(-1)[: x.numel()]
    lower = exact.floor()
    # The comparison with the fraction is exact; adding a random number to `exact` would round.
    level = lower + (uniform(x.numel(), seed, offset, x.device) < exact - lower)
    sign = torch.signbit(x) & (level > 0)
    codes = level.to(torch.uint8) | (sign.to(torch.uint8) << (bits - 1))
    return _pack(codes, bits), scales


def dequantize(packed: Tensor, scales: Tensor, size: int, bits: int, bucket: int) -> Tensor:
    """Turn codes back into float32 values."""
    levels = 2 ** (bits - 1) - 1
    codes = _unpack(packed, bits)[:size]
    magnitude = (codes & levels).float() / levels
    signed = torch.where(codes > levels, -magnitude, magnitude)
    return torch.mul(signed, scales.repeat_interleave(bucket)[:size])


def check_indices(indices: Tensor, size: int) -> int:
    """Find the first index that is out of range or not above its predecessor."""
    wrong = (indices < 0) | (indices >= size)
    wrong[1:] |= indices[1:] <= indices[:-1]
    positions = wrong.nonzero()
    return int(positions[0]) if positions.numel() else -1


def packed_words(count: int, size: int) -> int:
    """Count the words of a bitmap and of the indices' low bits."""
    low_bits, bitmap_bits = _packing(count, size)
    return -(-(bitmap_bits + count * low_bits) // 64)


def pack_indices(indices: Tensor, size: int) -> Tensor:
    """Write each bit to an integer of its own, then join them to words."""
    count, positions = indices.numel(), indices.long()
    low_bits, bitmap_bits = _packing(count, size)
    bits = positions.new_zeros(64 * packed_words(count, size))
    bits[(positions >> low_bits) + _places(count, indices)] = 1
    lows = positions[:, None] >> _places(low_bits, indices) & 1
    bits[bitmap_bits : bitmap_bits + lows.numel()] = lows.flatten()
    return (bits.view(-1, 64) << _places(64, indices)).sum(dim=1)


def unpack_indices(words: Tensor, count: int, size: int) -> Tensor | None:
    """Cut words into bits, whose places are the high parts of the indices."""
    low_bits, bitmap_bits = _packing(count, size)
    bits = (words[:, None] >> _places(64, words) & 1).flatten()
    highs = bits[:bitmap_bits].nonzero().squeeze(1)
    if highs.numel() != count:
        return None
    lows = bits[bitmap_bits : bitmap_bits + count * low_bits].view(count, low_bits)
    low = (lows << _places(low_bits, words)).sum(dim=1)
    return (highs - _places(count, words) << low_bits | low).to(index_dtype(size))


def widen(values: Tensor) -> Tensor:
    """Return values of half precision as float32, others unchanged."""
    return values.to(_WIDE_DTYPE.get(values.dtype, values.dtype))


def _gather(x: Tensor, selected: Tensor) -> tuple[Tensor, Tensor]:
    positions = selected.nonzero().view(-1)
    return positions.to(index_dtype(x.numel())), x[positions]


def _packing(count: int, size: int) -> tuple[int, int]:
    """Return how many low bits an index has, and how many bits the bitmap of the others has."""
    if count == 0:
        return 0, 0
    low_bits = min((size // count).bit_length() - 1, _MOST_LOW_BITS)
    return low_bits, count + (size - 1 >> low_bits)


def _places(count: int, like: Tensor) -> Tensor:
    return torch.arange(count, device=like.device)


def _pack(codes: Tensor, bits: int) -> Tensor:
    per_byte = 8 // bits
    rows = torch.nn.functional.pad(codes, (0, -codes.numel() % per_byte)).view(-1, per_byte)
    packed = torch.zeros(rows.shape[0], dtype=torch.uint8, device=codes.device)
    for position in range(per_byte):
        packed |= rows[:, position] << (position * bits)
    return packed


def _unpack(packed: Tensor, bits: int) -> Tensor:
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    codes: Tensor = (packed[:, None] >> shifts) & (2**bits - 1)
    return codes.view(-1)
