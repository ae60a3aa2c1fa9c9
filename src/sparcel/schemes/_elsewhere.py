"""What the owner of a region sends instead of what it selected there, in `OkTopK`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from sparcel import kernels
from sparcel.memory import Range, Share
from sparcel.ops import SUM
from sparcel.stream import SparseStream, concatenate, reduce

CROWD = 4
"""A rank takes of one region at most this many times an equal part of what it takes elsewhere. This
bounds what the region's owner receives, and leaves most choices free."""


@dataclass(frozen=True)
class Elsewhere:
    """A choice outside of one region: ``sent = selection − unsent + instead``, all sparse.

    ``unsent`` is what the selection has of the region, and is numbered from the region's start.
    """

    sent: SparseStream
    unsent: SparseStream
    instead: SparseStream


def select_elsewhere(
    rest: Tensor,
    selection: SparseStream,
    shares: Sequence[Share],
    boundaries: Sequence[int],
    own: int,
) -> Elsewhere:
    """Leave out what a selection has of one region, and take others instead, at most as many.

    Parameters
    ----------
    rest
        ``[size]``: what the selection left.
    selection, shares
        A sparse selection, and how many coordinates of which ranges it was made of.
    boundaries, own
        Region r is ``[boundaries[r], boundaries[r + 1])``; nothing of the region ``own`` is sent.

    If a share leaves out m coordinates, it takes the m largest that are left of it in the other
    regions, but of none more than `CROWD` times an equal part.
    """
    regions, size = list(pairwise(boundaries)), selection.size
    start, stop = regions.pop(own)
    ends = {edge for share in shares for edge in (share.start, share.stop)}
    edges = [start, *sorted(edge for edge in ends if start < edge < stop), stop]
    low, *pieces, high = selection.split([0, *edges, size])
    inside = pieces[0] if len(pieces) == 1 else concatenate(pieces, dense_at=stop - start + 1)
    outside = concatenate([low, inside.empty_like(), high], SUM, dense_at=size + 1)
    others = [selection.empty_like()]
    for share in shares:
        left_out = [
            piece.nnz
            for piece, (lo, hi) in zip(pieces, pairwise(edges), strict=True)
            if share.start <= lo < hi <= share.stop
        ]
        m = sum(left_out)
        parts = [(max(lo, share.start), min(hi, share.stop)) for lo, hi in regions]
        parts = [(lo, hi) for lo, hi in parts if lo < hi]
        if m and parts:
            most = min(m, -(-CROWD * m // len(regions)))
            others.append(_largest(rest, parts, m, most))
    instead = reduce(others, SUM, dense_at=size + 1)
    sent = reduce([outside, instead], SUM, dense_at=size + 1, disjoint=True)
    return Elsewhere(sent, inside, instead)


def _largest(rest: Tensor, parts: Sequence[Range], k: int, most: int) -> SparseStream:
    """Return the k largest of increasing ranges of a vector, ``most`` of each at most."""
    found = kernels.topk_each(rest, parts, most)
    size = rest.numel()
    dtype = kernels.index_dtype(size)
    indices = torch.cat(
        [places.to(dtype) + start for (places, _), (start, _) in zip(found, parts, strict=True)]
    )
    places, values = kernels.topk(torch.cat([values for _, values in found]), k)
    return SparseStream.unchecked(indices.index_select(0, places), values, size)
