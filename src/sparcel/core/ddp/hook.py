"""The hook that DDP calls for each bucket: what it queues, and how a step ends.

DDP takes one hook, and can neither remove nor replace it. It rebuilds its buckets after the first
step (the second with ``static_graph``) and numbers them anew. So the hook names the parameters of
each bucket every time.
"""

# DDP looks at the annotations of its hook and takes no strings: no postponed evaluation here.

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from sparcel.core.memory import Range
from sparcel.core.training import Averager, Handle
from sparcel.core.training.names import model_name
from sparcel.errors import CommunicationError, InputError


class Hook:
    """Turns the buckets of each backward pass into a step of the averager."""

    def __init__(self, model: DistributedDataParallel, averager: Averager) -> None:
        self._averager = averager
        self._model = weakref.ref(model)  # DDP's C++ part owns the hook, so this breaks a cycle
        self._names = {id(p): model_name(name) for name, p in model.module.named_parameters()}
        self._parameters: int = model._get_ddp_logging_data()["num_parameter_tensors"]
        self._is_delayed = model.static_graph
        self._steps_to_rebuild = 2 if model.static_graph else 1
        if model.find_unused_parameters and not model.static_graph:
            self._steps_to_rebuild = 0  # DDP keeps its first buckets
        self._queued = 0
        """How many parameters the buckets of this step have held so far."""
        self._promised: list[tuple[torch.futures.Future[Tensor], str | Tensor]] = []
        """The futures of this step, each with its bucket or the name of its sparse gradient."""

    def queue_bucket(self, state: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Queue a bucket's exchange; DDP calls this for its buckets in order."""
        if self._averager.handle.closed:
            raise CommunicationError(
                "the handle was closed, so gradients are exchanged no more; wrap the module in a"
                " new DistributedDataParallel to train on"
            )
        model = self._model()
        if model is not None and model._join_config.enable:
            _check_join(model)
        gradient = bucket.buffer()
        names = [self._names[id(parameter)] for parameter in bucket.parameters()]
        future: torch.futures.Future[Tensor] = torch.futures.Future(
            devices=[gradient.device] if gradient.device.type == "cuda" else []
        )
        if gradient.is_sparse:
            (name,) = names  # DDP gives every sparse gradient a bucket of its own
            self._averager.queue_rows(name, gradient)
            self._promised.append((future, name))
        else:
            self._averager.queue(gradient, _places(names, bucket))
            self._promised.append((future, gradient))
        # Not by the bucket's index: all are 0 in the first step of a static graph.
        self._queued += len(names)
        if self._queued == self._parameters:
            self._end_after_backward()
        return future

    def _end_after_backward(self) -> None:
        """Make the step end before DDP waits for its updates.

        An error must be raised there: out of a future it would reach the user as another error.
        """
        if self._is_delayed or torch._C._current_graph_task_id() == -1:
            # DDP calls its hooks after the first backward pass of a static graph, or, in join(),
            # without a pass on a rank that is out of data. It waits as soon as they return.
            self._end()
        else:
            # DDP queues its own callback after its last hook. So this one runs before it, and in
            # the same pass if passes are nested (reentrant checkpointing).
            torch.autograd.Variable._execution_engine.queue_callback(self._end)
        self._is_delayed = False

    def _end(self) -> None:
        """End the step, and give DDP the updates."""
        promised, self._promised, self._queued = self._promised, [], 0
        rows = self._averager.finish()
        for future, update in promised:
            future.set_result(rows[update] if isinstance(update, str) else update)
        if self._steps_to_rebuild:
            self._steps_to_rebuild -= 1
            model = self._model()
            if model is not None and not self._steps_to_rebuild:
                _RebuildGuard(model, self._averager.handle)


def _places(names: list[str], bucket: GradBucket) -> dict[str, Range]:
    """Return where the parameters of a bucket lie in its buffer."""
    first = int(bucket.buffer().storage_offset())
    places = {}
    for name, gradient in zip(names, bucket.gradients(), strict=True):
        start = int(gradient.storage_offset()) - first
        places[name] = start, start + gradient.numel()
    return places


def _check_join(model: DistributedDataParallel) -> None:
    """Refuse averages over the ranks that still have data, in `DistributedDataParallel.join`."""
    if not model._divide_by_initial_world_size:
        raise InputError(
            "join(divide_by_initial_world_size=False) averages over the ranks that still have data,"
            " and sparcel averages over all ranks, which all owe what they keep back; leave it out"
        )


class _RebuildGuard:
    """Makes the ranks wait for one another before and after DDP rebuilds its buckets, once.

    DDP tells all ranks its new buckets at the start of a forward pass, by a collective of its own.
    If a rank failed meanwhile, the others would get a RuntimeError of the engine without the cause.
    Between the two waits no code of the user runs, so only a rank that is killed can fail there.
    What stays an error of the engine: that, and any failure during the broadcast of buffers (as
    BatchNorm has), which DDP repeats in every forward pass unless ``broadcast_buffers=False``.
    """

    _handle: Handle | None = None
    """None in a copy of the model, where nothing is guarded."""

    def __init__(self, model: DistributedDataParallel, handle: Handle) -> None:
        self._handle = handle
        self._hook = model.register_forward_pre_hook(self._before, prepend=True)

    def __getstate__(self) -> None:
        """Copy or pickle nothing."""

    def _before(self, model: DistributedDataParallel, arguments: Any) -> None:
        if self._handle is None or not torch.is_grad_enabled():
            return  # DDP rebuilds its buckets in a later pass
        self._hook.remove()
        # In join(), a rank may have no forward pass. A closed handle refuses the backward pass.
        if not model._join_config.enable and not self._handle.closed:
            self._handle.meet()
            self._hook = model.module.register_forward_pre_hook(self._after, prepend=True)

    def _after(self, module: nn.Module, arguments: Any) -> None:
        if self._handle is not None:
            self._hook.remove()
            self._handle.meet()
