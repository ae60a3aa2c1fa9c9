"""One backward pass: what travels for each bucket, and the common end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sparcel import collectives
from sparcel.comm import Communicator
from sparcel.comm import Handle as Job
from sparcel.ddp.residuals import Vector
from sparcel.stream import SparseStream


@dataclass(eq=False)
class Step:
    """What one backward pass has queued so far.

    Each bucket travels in a job of its own, in the order of the buckets. The small tensors of all
    buckets travel together in the last job; DDP gets its updates after that.
    """

    comm: Communicator
    finite: bool = True
    jobs: list[Job[None]] = field(default_factory=list)
    vectors: list[Vector] = field(default_factory=list)
    _small: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    _updates: list[tuple[torch.futures.Future[Tensor], Tensor]] = field(default_factory=list)

    def queue(self, job: Callable[[], None]) -> None:
        """Run ``job`` after all jobs queued before."""
        self.jobs.append(self.comm.submit(job))

    def deliver(self, future: torch.futures.Future[Tensor], update: Tensor) -> None:
        """Note what DDP gets for a bucket once all buckets are done."""
        self._updates.append((future, update))

    def take_small(self, gradient: Tensor) -> None:
        """Move a small tensor's gradient out of its bucket, to travel at the end."""
        self._small.append((gradient, gradient.clone()))
        gradient.zero_()

    def exchange_vector(self, vector: Vector, gradient: Tensor, scale: float) -> None:
        """Turn a bucket's gradient, which a GradScaler scaled, into its update in place."""
        if scale != 1:
            gradient.div_(scale)
        self.vectors.append(vector)
        vector.scheme.begin(gradient, self.comm, out=gradient)
        self.finite &= vector.scheme.finite
        if scale != 1:
            gradient.mul_(scale)

    def exchange_rows(self, gradient: Tensor) -> Tensor:
        """Return the average over ranks of a sparse gradient; nothing is left out.

        Parameters
        ----------
        gradient
            Sparse COO with one sparse dimension, as ``nn.Embedding(sparse=True)`` makes it;
            repeated rows are added up before they travel.
        """
        gradient = gradient.coalesce()
        rows, shape = gradient.values(), gradient.shape
        stream = SparseStream(gradient.indices()[0], rows.reshape(len(rows), -1), shape[0])
        stream.finite = bool(torch.isfinite(rows).all())
        total = collectives.all_reduce(stream, self.comm)
        self.finite &= total.finite
        divisor = self.comm.size if total.finite else float("nan")
        average = (total.values / divisor).reshape(-1, *shape[1:])
        indices = torch.arange(shape[0]) if total.indices is None else total.indices.long()
        return torch.sparse_coo_tensor(
            indices.unsqueeze(0).to(rows.device), average, shape, is_coalesced=True
        )

    def finish(self) -> None:
        """Exchange the small tensors of all buckets, then give DDP all updates."""
        if self._small:
            self._exchange_small()
        for future, update in self._updates:
            future.set_result(update)

    def _exchange_small(self) -> None:
        places, gradients = zip(*self._small, strict=True)
        wide = torch.float64 if any(g.dtype == torch.float64 for g in gradients) else torch.float32
        vector = torch.cat([gradient.to(wide) for gradient in gradients])
        stream = SparseStream.unchecked(None, vector, vector.numel())
        stream.finite = bool(torch.isfinite(vector).all())
        total = collectives.all_reduce(stream, self.comm, algorithm="recursive_doubling")
        self.finite &= total.finite
        average = total.values / (self.comm.size if total.finite else float("nan"))
        parts = average.split([place.numel() for place in places])
        for place, part in zip(places, parts, strict=True):
            place.copy_(part)
