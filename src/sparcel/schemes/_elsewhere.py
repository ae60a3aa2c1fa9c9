"""What the owner of a region sends instead of what it selected there, in `OkTopK`."""

from __future__ import annotations

from collections.abc import Sequence
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


def select_elsewhere(
    rest: Tensor,
    selection: SparseStream,
    shares: Sequence[Share],
    boundaries: Sequence[int],
    own: int,
) -> SparseStream:
    """Put back what a selection has of one region, and take others instead, at most as many.

    Parameters
    ----------
    rest
        ``[size]``: what the selection left. What is put back and taken changes it in place.
    selection, shares
        A sparse selection, and how many coordinates of which ranges it was made of.
    boundaries, own
        Region r is ``[boundaries[r], boundaries[r + 1])``; nothing of the region ``own`` is sent.

    If a share gives back m coordinates, it takes the m largest that are left of it in the other
    regions, but of none more than `CROWD` times an equal part.
    """
    regions, size = list(pairwise(boundaries)), selection.size
    start, stop = regions.pop(own)
    low, inside, high = selection.split([0, start, stop, size])
    assert inside.indices is not None, "selections are sparse"
    kernels.scatter(rest[start:stop], inside.indices, inside.values)
    streams = [concatenate([low, inside.empty_like(), high], SUM, dense_at=size + 1)]
    for share in shares:
        edges = [min(max(edge - start, 0), stop - start) for edge in (share.start, share.stop)]
        places = inside.indices.new_tensor(edges)
        first, last = torch.searchsorted(inside.indices, places).tolist()
        m = last - first
        parts = [(max(lo, share.start), min(hi, share.stop)) for lo, hi in regions]
        parts = [(lo, hi) for lo, hi in parts if lo < hi]
        if m and parts:
            most = min(m, -(-CROWD * m // len(regions)))
            streams.append(_take_largest(rest, parts, m, most))
    return reduce(streams, SUM, dense_at=size + 1)


def _take_largest(rest: Tensor, parts: Sequence[Range], k: int, most: int) -> SparseStream:
    """Take the k largest of increasing ranges out of a vector, ``most`` of each at most."""
    found = [kernels.topk(rest[start:stop], most) for start, stop in parts]
    size = rest.numel()
    dtype = kernels.index_dtype(size)
    indices = torch.cat(
        [places.to(dtype) + start for (places, _), (start, _) in zip(found, parts, strict=True)]
    )
    places, values = kernels.topk(torch.cat([values for _, values in found]), k)
    indices = indices.index_select(0, places)
    kernels.scatter(rest, indices, torch.zeros_like(values))
    return SparseStream.unchecked(indices, values, size)
