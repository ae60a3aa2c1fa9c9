"""What lets an averager exchange the gradients of a DistributedDataParallel model: DDP's hook.

DDP takes one hook, and can neither remove nor replace it. It calls the hook for each bucket. It
rebuilds its buckets after the first step (the second with ``static_graph``) and numbers them anew.
So the hook names the parameters of each bucket every time.
"""

# DDP looks at the annotations of its hook and takes no strings: no postponed evaluation here.

import weakref
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed._composable.contract import _get_registry
from torch.nn.parallel import DistributedDataParallel

from sparcel.core._checks import check_type
from sparcel.core.comm import Group
from sparcel.core.ddp.ahead import AheadCalls
from sparcel.core.memory import Range
from sparcel.core.training import Averager, Handle, Shard
from sparcel.core.training.ahead import Arrange
from sparcel.core.training.driver import Unaveraged, check_group, model_name
from sparcel.errors import CommunicationError, InputError

_WAS_LATE = "was frozen when the model was wrapped, or was no part of it"
_WAY_OUT = "close() the handle, wrap the module in a new DistributedDataParallel, attach again"


class DDPDriver:
    """What an averager needs to know of a DDP model, and what starts it: a `Driver`.

    Raises
    ------
    InputError
        For a model whose gradients do not all go through one hook; for a group of other ranks.
    """

    shard: Shard | None = None

    def __init__(self, model: object, group: Group) -> None:
        self._model = model = _checked_model(model)
        self.group: Group = model.process_group if group is None else group
        check_group(self.group, dist.get_world_size(model.process_group))
        self.parameters: Mapping[str, Tensor] = {
            model_name(name): parameter
            for name, parameter in model.module.named_parameters()
            if parameter.requires_grad and name not in model.parameters_to_ignore
        }
        self.tensors: Mapping[str, Tensor] = self.parameters
        self.rows: Collection[str] = _parameters_with_rows(model.module)
        # DDP throws away the update of a parameter that no rank used, so none may be sent.
        self.withhold_zeros: bool = model.find_unused_parameters or model.static_graph

    def move_ahead(self, averager: Averager, names: Collection[str]) -> AheadCalls:
        """Let the model compute with moved values of these parameters."""
        movable = {name: self.parameters[name] for name in names}
        ahead = averager.ahead(movable, arrange=_as_in_buckets(movable.values()))
        return AheadCalls(self._model.module, ahead)

    def start(self, averager: Averager) -> None:
        """Let the averager exchange gradients from now on."""
        self._model.register_comm_hook(None, Hook(self._model, averager).queue_bucket)
        # This list is for DDP's Python reducer alone, and would bring the hook into copies of the
        # model, whose own reducer never calls it.
        self._model._comm_hooks.clear()
        averaged = {id(parameter) for parameter in self.parameters.values()}
        ignored = {model_name(name) for name in self._model.parameters_to_ignore}
        late = Unaveraged(self._model.module, lambda: averaged, ignored, _WAS_LATE, _WAY_OUT)
        averager.on_close(late.end)


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


def _as_in_buckets(parameters: Iterable[Tensor]) -> Arrange:
    """Return how memory lies: as DDP lays gradients into buckets.

    DDP keeps the strides of a parameter whose elements fill a range of memory, in whatever order,
    and lays all others in rows. torch's ``empty_like`` has the same rule.
    """
    strides = {
        id(one): one.stride()
        for one in parameters
        if torch.empty_like(one, device="meta").stride() == one.stride()
    }

    def arrange(memory: Tensor, parameter: Tensor) -> Tensor:
        if id(parameter) in strides:
            return memory.as_strided(parameter.shape, strides[id(parameter)])
        return memory.view(parameter.shape)

    return arrange


def _parameters_with_rows(module: nn.Module) -> set[str]:
    """Return the names of the parameters whose gradients are sparse, by the rule that DDP has."""
    weights = {
        id(layer.weight)
        for layer in module.modules()
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.sparse
    }
    return {
        model_name(name)
        for name, parameter in module.named_parameters()
        if id(parameter) in weights
    }


def _checked_model(model: object) -> DistributedDataParallel:
    """Return the model if one hook gets all of its gradients; raise `InputError` otherwise."""
    if isinstance(model, nn.Module):
        _check_wrappers(model)
    way_out = "wrap it first: DistributedDataParallel(model), or fully_shard with replicate="
    check_type(model, DistributedDataParallel, "model", way_out)
    assert isinstance(model, DistributedDataParallel)
    _check_options(model)
    return model


def _check_wrappers(model: nn.Module) -> None:
    """Refuse other wrappers than one DDP around the whole model.

    Wrapping such a model in DDP once more would not help: what is wrapped inside goes on
    exchanging densely, and is averaged twice.
    """
    inside = []
    for path, module in model.named_modules():
        if wrapper := _other_wrapper(module):
            place = f"the model's {path!r}" if path else "the model"
            raise InputError(f"{place} is wrapped by {wrapper}")
        if isinstance(module, DistributedDataParallel) and module is not model:
            inside.append(path)
    if not inside:
        return
    if isinstance(model, DistributedDataParallel):
        raise InputError(
            f"the model holds another DistributedDataParallel, {inside[0]!r}, which would exchange"
            " its gradients densely as well; wrap only once, the whole module"
        )
    if hasattr(model, "_orig_mod"):
        raise InputError(
            "the model is a compiled DistributedDataParallel; attach before it is compiled:"
            " sparcel.attach(ddp, ...) and then torch.compile(ddp)"
        )
    raise InputError(
        f"the model is a {type(model).__name__} that holds a DistributedDataParallel; attach to"
        f" that one: model.get_submodule({inside[0]!r})"
    )


def _other_wrapper(module: nn.Module) -> str | None:
    """Return the wrapper other than DDP that is on a module itself, with the way out."""
    from torch.distributed.fsdp import FullyShardedDataParallel  # takes seconds to import

    applied = _get_registry(module) or {}
    plain = "wrap the plain module in DistributedDataParallel instead"
    if isinstance(module, FullyShardedDataParallel):
        return f"FullyShardedDataParallel (FSDP1, HSDP), which shards gradients; {plain}"
    if "fully_shard" in applied:
        return (
            "fully_shard (FSDP2), which averages gradients itself; attach to the plain model of"
            " fully_shard instead, with replicate="
        )
    if "replicate" in applied:
        return f"replicate, which has no hook for sparcel; {plain}"
    if isinstance(module, nn.DataParallel):
        return f"DataParallel; start a process for each device, and {plain}"
    return None


def _check_options(model: DistributedDataParallel) -> None:
    """Refuse what DDP does to gradients besides averaging them."""
    if any(hasattr(parameter, "_in_backward_optimizers") for parameter in model.parameters()):
        raise InputError(
            "the optimisers of _apply_optimizer_in_backward need DDP's own exchange; make an"
            " optimiser without it, and call its step() after backward()"
        )
    if getattr(model, "skip_all_reduce_unused_params", False):
        raise InputError(
            "skip_all_reduce_unused_params leaves buckets out, and sparcel waits for all of them;"
            " wrap the model without it"
        )
    if model.mixed_precision is not None:
        raise InputError(
            "DDP's mixed_precision casts gradients itself; use torch.autocast instead, which"
            " sparcel works with"
        )
    if model._use_python_reducer:
        raise InputError(
            "DDP's Python reducer calls hooks for single parameters; set"
            ' torch._dynamo.config.optimize_ddp to another value than "python_reducer"'
        )
    hook = model._get_ddp_logging_data().get("comm_hook")
    if hook:
        raise InputError(
            f"the model has a communication hook already ({hook}) and DDP takes only one; wrap"
            " its module anew: DistributedDataParallel(model.module)"
        )
