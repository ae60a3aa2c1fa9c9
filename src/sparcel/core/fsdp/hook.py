"""The hook that FSDP calls for each parameter group: what it queues, and how a step ends."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from sparcel.core.fsdp.groups import ParameterGroup, call_after_backward, was_interrupted
from sparcel.core.memory import Range
from sparcel.core.training import Averager
from sparcel.core.training.layout import end_to_end
from sparcel.errors import CommunicationError, InputError


class Hook:
    """Turns the gradients that backward passes leave in the shards into steps of the averager.

    FSDP calls a hook with what a reduce-scatter returned, before it has made gradients of that: in
    another dtype, divided, added to those of passes before, or copied to the host. So a group is
    queued later, when the hook of the next group runs or the pass ends, from where its gradients
    are; these become the updates in place. The hook itself must not wait: on the CPU it would
    block the backward pass. Gradients of steps before are set aside meanwhile, because FSDP would
    add to them what is not averaged yet. So those that are there now are those of this pass.
    """

    def __init__(
        self, model: nn.Module, groups: Sequence[ParameterGroup], averager: Averager
    ) -> None:
        self._averager: Averager | None = averager
        self._groups = groups
        self._reduced: list[ParameterGroup] = []
        """The groups whose gradients FSDP is making."""
        self._queued: set[str] = set()
        """The names of what was queued in the pass under way."""
        self._adding_up: set[ParameterGroup] = set()
        """The groups whose gradients hold passes that were not averaged yet."""
        self._aside: dict[ParameterGroup, list[tuple[DTensor, DTensor]]] = {}
        """The parameters of groups, each with its gradient of the steps before."""
        self._copies: list[tuple[Tensor, Tensor]] = []
        """Gradients, each with the range of a queued vector that will hold its update."""
        for group in groups:
            group.module.set_all_reduce_hook(GroupHook(self, group))
        self._undo = call_after_backward(model, self._end)
        before = torch.compiler.disable(self._begin)
        self._forward = model.register_forward_pre_hook(before, prepend=True)

    @property
    def closed(self) -> bool:
        """Whether nothing is exchanged any more."""
        return self._averager is None

    def close(self) -> None:
        """Exchange nothing more."""
        self._averager = None
        self._undo()
        self._forward.remove()
        self._give_back(list(self._aside))

    def take_note_of(self, group: ParameterGroup) -> None:
        """Take note that FSDP is about to make a group's gradients."""
        if self.closed:
            raise CommunicationError(
                "the handle was closed, so gradients are exchanged no more between replicas;"
                " attach again to train on"
            )
        self._queue_reduced(ended=False)
        if group in self._adding_up and not group.gradients:  # zero_grad() was called
            self._adding_up.discard(group)
            self._aside.pop(group, None)
        if group not in self._adding_up:
            self._aside.setdefault(group, []).extend(group.set_aside())
        if group.adds_up:
            self._adding_up.add(group)
        else:
            self._reduced.append(group)

    def _begin(self, model: nn.Module, arguments: object) -> None:
        """Refuse a forward pass after a backward pass that never ended."""
        if torch._C._current_graph_task_id() != -1:
            return
        if self._reduced or self._queued or was_interrupted(model):
            raise CommunicationError(
                "the backward pass before was ended by an error, and other ranks may wait for what"
                " it had begun; call zero_grad(), close() the handle, attach again on all ranks,"
                " and give the new handle the state_dict() of the old one"
            )

    def _end(self) -> None:
        """End the step, if there is one: the gradients become the updates."""
        # Of a group that the last pass has not used, gradients of the passes before are left.
        left = [one for one in self._groups if one in self._adding_up and not one.adds_up]
        self._reduced += [group for group in left if group not in self._reduced]
        self._queue_reduced(ended=True)
        if self._averager is None or not self._queued:
            return
        try:
            self._averager.finish()
            with torch.no_grad():
                for gradient, update in self._copies:
                    gradient.copy_(update)
        finally:
            self._give_back([one for one in self._aside if one not in self._adding_up])

    def _give_back(self, groups: Iterable[ParameterGroup]) -> None:
        """Add the gradients of the pass to those of the steps before; nothing is under way."""
        with torch.no_grad():
            for parameter, before in chain.from_iterable(self._aside.pop(one) for one in groups):
                if parameter.grad is not None:
                    before.add_(parameter.grad)
                parameter.grad = before
        self._copies.clear()
        self._queued.clear()
        self._reduced.clear()

    def _queue_reduced(self, ended: bool) -> None:
        """Queue the groups whose gradients are there."""
        waiting = [one for one in self._reduced if one.is_offloaded and not ended]
        for group in self._reduced:
            if group not in waiting:
                if ended:
                    group.wait_for_gradients()
                self._adding_up.discard(group)
                self._queue(group.gradients)
        self._reduced = waiting

    def _queue(self, gradients: Mapping[str, Tensor]) -> None:
        if not gradients or self._averager is None:
            return
        if twice := sorted(self._queued.intersection(gradients)):
            raise InputError(
                f"FSDP reduced the gradient of {twice[0]!r} twice in one pass, and sparcel has sent"
                " the first part already; apply fully_shard to this module alone, and call the"
                " module once in a pass"
            )
        self._queued.update(gradients)
        found = _where_they_are(gradients)
        vector, places = found or end_to_end(gradients)
        if found is None:
            self._copies += [
                (gradient, vector[slice(*places[name])].view(gradient.shape))
                for name, gradient in gradients.items()
            ]
        self._averager.queue(vector, places)


class GroupHook:
    """What FSDP calls for one group."""

    def __init__(self, hook: Hook, group: ParameterGroup) -> None:
        self.hook, self._group = hook, group

    def __call__(self, reduced: Tensor) -> None:
        """Take note that a reduce-scatter has returned."""
        self.hook.take_note_of(self._group)


def _where_they_are(gradients: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Range]] | None:
    """Return the vector that gradients are views of, and their places; None if they are apart.

    FSDP lays out a group's gradients one after another, each with its padding, which is zero.
    """
    parts = list(gradients.values())
    starts = [int(one.storage_offset()) for one in parts]
    stops = [start + one.numel() for start, one in zip(starts, parts, strict=True)]
    storages = {one.untyped_storage().data_ptr() for one in parts if one.numel()}
    in_order = all(stop <= start for stop, start in zip(stops, starts[1:], strict=False))
    if len(storages) > 1 or not in_order:
        return None
    first = starts[0]
    vector = parts[0].as_strided((stops[-1] - first,), (1,), first)
    places = ((start - first, stop - first) for start, stop in zip(starts, stops, strict=True))
    return vector, dict(zip(gradients, places, strict=True))
