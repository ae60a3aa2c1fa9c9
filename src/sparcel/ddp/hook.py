"""The hook that DDP calls for each bucket: what it queues, and how a step ends."""

# DDP looks at the annotations of its hook and takes no strings: no postponed evaluation here.

from collections.abc import Collection, Mapping

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from sparcel.comm import Communicator
from sparcel.ddp.residuals import Piece, Residuals
from sparcel.ddp.step import Step, promise
from sparcel.errors import CommunicationError
from sparcel.schemes import Meter, Request


class Hook:
    """Turns the buckets of each backward pass into a step.

    Parameters
    ----------
    model
        Whose buckets these are.
    comm, meter
        What carries them, and what counts and times the steps.
    residuals
        Memory by name.
    small, densities
        Names of the parameters that stay dense; densities of parameters that have their own.
    scaler
        What the loss is scaled by, or None.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        comm: Communicator,
        meter: Meter,
        residuals: Residuals,
        small: Collection[str],
        densities: Mapping[str, float],
        scaler: torch.amp.GradScaler | None,
    ) -> None:
        self._comm, self._meter, self._residuals = comm, meter, residuals
        self._small, self._densities, self._scaler = small, densities, scaler
        self._names = {id(p): name for name, p in model.module.named_parameters()}
        self._parameters: int = model._get_ddp_logging_data()["num_parameter_tensors"]
        self._may_be_unused = model.find_unused_parameters or model.static_graph
        self._is_delayed = model.static_graph
        self._step: Step | None = None
        self.closed = False

    def queue_bucket(self, state: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Queue a bucket's exchange; DDP calls this for its buckets in order."""
        if self.closed:
            raise CommunicationError(
                "the handle was closed, so gradients are exchanged no more; wrap the module in a"
                " new DistributedDataParallel to train on"
            )
        # Not by the bucket's index: all are 0 in the first step of a static graph.
        step = self._step = self._step or Step(self._comm, self._meter)
        step.parameters += len(bucket.parameters())
        gradient = bucket.buffer()
        future = promise(gradient.device)
        if gradient.is_sparse:
            step.queue(lambda: step.exchange_rows(gradient, future), gradient.device)
        else:
            pieces = self._pieces(bucket)
            step.queue(lambda: self._exchange(step, pieces, gradient, future), gradient.device)
        if step.parameters == self._parameters:
            step.queue(step.finish, gradient.device)
            self._end_after_backward()
        return future

    def _end_after_backward(self) -> None:
        """See to it that the step ends before DDP waits for its updates.

        An error must come up here: from a future it would reach the user as another.
        """
        if self._is_delayed or torch._C._current_graph_task_id() == -1:
            # DDP calls its hooks after the first backward pass of a static graph, or, in join(),
            # without any on a rank that is out of data. It waits as soon as they return.
            self._end()
        else:
            # DDP queues its own callback after its last hook, so that this one runs before it, and
            # in the same pass, whichever of nested ones (reentrant checkpointing) that is.
            torch.autograd.Variable._execution_engine.queue_callback(self._end)
        self._is_delayed = False

    def _end(self) -> None:
        """Wait for all exchanges of the step, then commit all of them, or none and raise."""
        step, self._step = self._step, None
        assert step is not None, "queued by the last bucket"
        for job in step.jobs:
            job.wait()
        if step.finite:
            for vector in step.vectors:
                vector.scheme.commit()
            self._residuals.steps += 1

    def _exchange(
        self,
        step: Step,
        pieces: list[Piece],
        gradient: Tensor,
        future: torch.futures.Future[Tensor],
    ) -> None:
        """Turn a bucket's gradient into its update, but for the small tensors, in place."""
        step.deliver(future, gradient)
        small = [piece for piece in pieces if piece.name in self._small]
        large = tuple(piece for piece in pieces if piece.name not in self._small)
        places = [gradient[piece.start : piece.stop] for piece in small]
        own = [place.clone() for place in places]
        if not large:
            step.take_small(places, own)
            return
        vector = self._residuals.vector(large, gradient)
        # DDP throws the update of a parameter away that no rank used, so none may be sent.
        unused = [
            (piece.start, piece.stop)
            for piece in large
            if self._may_be_unused and not gradient[piece.start : piece.stop].any()
        ]
        apart = [(piece.start, piece.stop) for piece in small]
        request = Request(vector.layers, unused, apart, meter=self._meter)
        # Asked here and not in the backward pass, which would have to wait for a GPU to answer.
        scale = 1.0 if self._scaler is None else self._scaler.get_scale()
        step.exchange_vector(vector, gradient, request, scale)
        if not vector.scheme.sent_whole:
            step.take_small(places, own)

    def _pieces(self, bucket: GradBucket) -> list[Piece]:
        first = int(bucket.buffer().storage_offset())
        pieces = []
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            start = int(gradient.storage_offset()) - first
            name = self._names[id(parameter)]
            density = self._densities.get(name)
            pieces.append(Piece(name, start, start + parameter.numel(), density))
        return pieces
