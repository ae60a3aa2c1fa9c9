"""One backward pass: what travels for each bucket, and the common end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sparcel.auto import all_reduce
from sparcel.comm import Communicator, Job
from sparcel.ddp.residuals import Vector
from sparcel.memory import wide_dtype
from sparcel.schemes import Meter, Request
from sparcel.stream import SparseStream
from sparcel.wire import Wire

_FEW = 1 << 16
"""Up to so many elements of small tensors, fewer rounds are worth more than fewer bytes."""


@dataclass(eq=False)
class Step:
    """What one backward pass has queued so far.

    Each bucket travels in a job of its own, in the order of the buckets. The small tensors of all
    buckets travel together in the last job; DDP gets its updates after that.
    """

    comm: Communicator
    meter: Meter
    parameters: int = 0
    """How many gradients the buckets so far hold."""
    finite: bool = True
    jobs: list[Job[None]] = field(default_factory=list)
    vectors: list[Vector] = field(default_factory=list)
    _small: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    _updates: list[tuple[torch.futures.Future[Tensor], Tensor]] = field(default_factory=list)

    def queue(self, job: Callable[[], None], device: torch.device) -> None:
        """Run ``job`` after all jobs queued before, and after what ``device`` has to do by now."""
        self.jobs.append(self.comm.submit(_following(job, device)))

    def deliver(self, future: torch.futures.Future[Tensor], update: Tensor) -> None:
        """Note what DDP gets for a bucket once all buckets are done."""
        self._updates.append((future, update))

    def take_small(self, places: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Exchange small tensors at the end, and write their averages to ``places``."""
        self._small += zip(places, gradients, strict=True)

    def exchange_vector(
        self, vector: Vector, gradient: Tensor, request: Request, scale: float
    ) -> None:
        """Turn a bucket's gradient, which a GradScaler scaled, into its update in place."""
        if scale != 1:
            gradient.div_(scale)
        self.vectors.append(vector)
        vector.scheme.begin(gradient, self.comm, request, out=gradient)
        self.finite &= vector.scheme.finite
        if scale != 1:
            gradient.mul_(scale)

    def exchange_rows(self, gradient: Tensor, future: torch.futures.Future[Tensor]) -> None:
        """Average a sparse gradient over the ranks; nothing is left out.

        Parameters
        ----------
        gradient
            Sparse COO with one sparse dimension, as ``nn.Embedding(sparse=True)`` makes it;
            repeated rows are added up before they travel. Half precisions travel as float32, so
            that sums are as exact as those of the memory.
        future
            Where the average goes.
        """
        dtype, shape = gradient.dtype, gradient.shape
        gradient = gradient.to(wide_dtype(dtype)).coalesce()
        rows = gradient.values().reshape(-1, shape[1:].numel())
        stream = SparseStream(gradient.indices()[0], rows, shape[0])
        stream.finite = bool(torch.isfinite(rows).all())
        total = self._sum(stream, "auto")
        indices = total.indices
        if indices is None:
            indices = torch.arange(shape[0], device=rows.device)
        average = total.values.reshape(-1, *shape[1:]).to(dtype)
        self.deliver(
            future,
            torch.sparse_coo_tensor(indices.long()[None], average, shape, is_coalesced=True),
        )

    def finish(self) -> None:
        """Exchange the small tensors of all buckets, then give DDP all updates."""
        if self._small:
            self._exchange_small()
        for future, update in self._updates:
            future.set_result(update)

    def _exchange_small(self) -> None:
        places, gradients = zip(*self._small, strict=True)
        doubles = any(gradient.dtype == torch.float64 for gradient in gradients)
        wide = torch.float64 if doubles else torch.float32
        vector = torch.cat([gradient.to(wide) for gradient in gradients])
        stream = SparseStream.unchecked(None, vector, vector.numel())
        stream.finite = bool(torch.isfinite(vector).all())
        total = self._sum(stream, "recursive_doubling" if vector.numel() <= _FEW else "dense")
        parts = total.values.split([place.numel() for place in places])
        for place, part in zip(places, parts, strict=True):
            place.copy_(part)

    def _sum(self, stream: SparseStream, algorithm: str) -> SparseStream:
        """Return the average over ranks of what travels whole, or NaN where one is not finite."""
        with self.meter.communicating():
            total = all_reduce(stream, Wire(self.comm), algorithm=algorithm)
        self.finite &= total.finite
        divisor = self.comm.size if total.finite else float("nan")
        return SparseStream.unchecked(total.indices, total.values / divisor, total.size)


def promise(device: torch.device) -> torch.futures.Future[Tensor]:
    """Return what DDP waits for: an update on ``device``."""
    return torch.futures.Future(devices=[device] if device.type == "cuda" else [])


def _following(job: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """Return ``job``, made to wait for what this thread has queued on a GPU so far."""
    if device.type != "cuda":
        return job
    queued = torch.cuda.current_stream(device).record_event()

    def run() -> None:
        with torch.cuda.device(device):  # a thread begins on the first GPU, whatever others use
            torch.cuda.current_stream().wait_event(queued)
            job()

    return run
