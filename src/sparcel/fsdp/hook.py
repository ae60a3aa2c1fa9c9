"""The hook that FSDP calls for each parameter group: what it queues, and how a step ends."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from sparcel.errors import CommunicationError, InputError
from sparcel.fsdp.groups import Group
from sparcel.training import Averager

Copies = list[tuple[Tensor, Tensor]]
"""Gradients, each with the range of a queued vector that will hold its update."""


class Hook:
    """Turns the gradients that backward passes leave in the shards into steps of the averager.

    FSDP calls a hook with what a reduce-scatter returned, before it has made gradients of that: in
    another dtype, divided, added to those of passes before, or copied to the host. So a group is
    queued later, when the hook of the next group runs or the pass ends, from where its gradients
    are; these become the updates in place. Gradients of steps before are set aside meanwhile.
    """

    def __init__(self, groups: Sequence[Group], averager: Averager) -> None:
        self._averager, self._groups = averager, groups
        self._under_way = False
        """Whether a pass is under way that will end a step."""
        self._reduced: list[Group] = []
        """The groups whose gradients FSDP is making."""
        self._adding_up: set[Group] = set()
        """The groups whose gradients hold passes that were not averaged yet."""
        self._aside: list[tuple[torch.Tensor, Tensor]] = []
        """Parameters, each with the gradient of the steps before."""
        self._copies: Copies = []

    def install(self) -> None:
        """Let FSDP call the hook, as long as the model is there."""
        for group in self._groups:
            group.module.set_all_reduce_hook(GroupHook(self, group))

    def reduced(self, group: Group) -> None:
        """Take note that FSDP is about to make a group's gradients."""
        if self.closed:
            raise CommunicationError(
                "the handle was closed, so gradients are exchanged no more between replicas;"
                " attach again to train on"
            )
        self._queue_reduced(ended=False)
        if group not in self._adding_up:
            self._set_aside(group)
        if group.adds_up:
            self._adding_up.add(group)
            return
        self._reduced.append(group)
        if not self._under_way:
            self._under_way = True
            # FSDP has queued its own end of the pass before, which this one comes after.
            torch.autograd.Variable._execution_engine.queue_callback(self._end)

    @property
    def closed(self) -> bool:
        """Whether nothing is exchanged any more."""
        return self._averager.handle.closed

    def _end(self) -> None:
        """End the step: the gradients become the updates."""
        self._under_way = False
        # Of a group that the last pass has not used, gradients of the passes before are left.
        left = [one for one in self._groups if one in self._adding_up and not one.adds_up]
        self._reduced += [group for group in left if group not in self._reduced]
        self._queue_reduced(ended=True)
        self._averager.finish()
        with torch.no_grad():
            for gradient, update in self._copies:
                gradient.copy_(update)
            self._copies.clear()
            for parameter, before in self._aside:
                if parameter.grad is not None:
                    before += parameter.grad
                parameter.grad = before
            self._aside.clear()

    def _queue_reduced(self, ended: bool) -> None:
        """Queue the groups whose gradients are there."""
        waiting = [one for one in self._reduced if one.is_offloaded and not ended]
        for group in self._reduced:
            if group not in waiting:
                self._adding_up.discard(group)
                self._queue(group)
        self._reduced = waiting

    def _queue(self, group: Group) -> None:
        gradients = {held.name: held.gradient for held in group.held}
        found = {name: one for name, one in gradients.items() if one is not None}
        vector, starts = _end_to_end(list(found.values()))
        places = {
            name: (start, start + gradient.numel())
            for (name, gradient), start in zip(found.items(), starts, strict=True)
        }
        if vector is None:
            vector = torch.cat([gradient.flatten() for gradient in found.values()])
            self._copies += [
                (gradient, vector[slice(*places[name])].view(gradient.shape))
                for name, gradient in found.items()
            ]
        self._averager.queue(vector, places)

    def _set_aside(self, group: Group) -> None:
        for held in group.held:
            parameter = held.parameter
            if getattr(parameter, "_post_accumulate_grad_hooks", None):
                raise InputError(
                    f"{held.name!r} has a hook that runs when its gradient is there"
                    " (register_post_accumulate_grad_hook), before the replicas are averaged; call"
                    " the optimiser's step() after backward()"
                )
            if parameter.grad is not None:
                self._aside.append((parameter, parameter.grad))
                parameter.grad = None


class GroupHook:
    """What FSDP calls for one group; it does not keep the exchange alive."""

    def __init__(self, hook: Hook, group: Group) -> None:
        self.hook, self._group = hook, group

    def __call__(self, reduced: Tensor) -> None:
        """Take note that a reduce-scatter has returned."""
        self.hook.reduced(self._group)


def _end_to_end(gradients: Sequence[Tensor]) -> tuple[Tensor | None, list[int]]:
    """Return the vector that gradients are views of, and where they begin in it.

    FSDP lays out a group's gradients one after another, each with its padding, which is zero. If
    they are apart, there is no vector; they begin where each would if they were joined.
    """
    first = gradients[0]
    starts = [int(one.storage_offset()) for one in gradients]
    stops = [start + one.numel() for start, one in zip(starts, gradients, strict=True)]
    storages = {one.untyped_storage().data_ptr() for one in gradients if one.numel()}
    in_order = all(stop <= start for stop, start in zip(stops, starts[1:], strict=False))
    if len(storages) > 1 or not in_order:
        sizes = accumulate((one.numel() for one in gradients), initial=0)
        return None, list(sizes)[:-1]
    whole = first.as_strided((stops[-1] - starts[0],), (1,), starts[0])
    return whole, [start - starts[0] for start in starts]
