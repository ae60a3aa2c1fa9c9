"""SparseLoCo as its authors' code has it: averages over those who sent, clipped to the median."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparcel.formats import Expected
from sparcel.schemes.ledger import Ledger
from sparcel.schemes.selecting import Selecting
from sparcel.stream import SparseStream
from sparcel.wire import Wire


@dataclass(eq=False)
class SparseLoCo(Selecting):
    """Every rank gets all selections, and divides each coordinate by how many ranks sent it.

    A selection whose norm is above the median of all is scaled down to it; what that takes off
    stays in the rank's memory. A rank whose selection is all zero has sent nothing. Bytes grow with
    the ranks. The parameters are those of `Selecting`.
    Source: the code that accompanies Sarfi et al. 2025, SparseLoCo.
    """

    def _exchange(self, ledger: Ledger, wire: Wire) -> SparseStream:
        size = ledger.sent.size
        packet = wire.pack(ledger.sent)
        expected = [Expected.like(packet.stream, ledger.most, stays_sparse=True)] * wire.size
        streams = wire.gather(packet, expected)
        finite = all(stream.finite for stream in streams)
        total, counts = packet.stream.values.new_zeros(2, size)
        for rank, (stream, factor) in enumerate(zip(streams, _factors(streams), strict=True)):
            if not factor:
                continue
            if stream.indices is None:
                total.add_(stream.values, alpha=factor)
                counts.add_(1)
            else:
                places = stream.indices.long()
                total.index_add_(0, places, stream.values, alpha=factor)
                counts.index_add_(0, places, torch.ones_like(stream.values))
            if rank == wire.rank and factor < 1:
                clipped = stream.values * (1 - factor)
                ledger.keep(SparseStream.unchecked(stream.indices, clipped, size, stream.finite))
        total.mul_(wire.size).div_(counts.clamp_(min=1))
        return SparseStream.unchecked(None, total, size, finite)


def _factors(streams: list[SparseStream]) -> list[float]:
    """Return by what each selection is scaled so that no norm is above the median; 0 for zeros."""
    norms: Tensor = torch.stack([torch.linalg.vector_norm(one.values) for one in streams])
    if not norms.any():
        return [0.0] * len(streams)
    limit = norms[norms != 0].quantile(0.5)
    return (limit / norms).clamp(max=1).where(norms != 0, 0).tolist()
