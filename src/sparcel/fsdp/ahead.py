"""Step-ahead in sharded models: shards move on their way into the all-gather."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim import Optimizer

from sparcel.errors import InputError
from sparcel.fsdp.groups import Group, Held, initialize
from sparcel.training import Ahead, Follower

Outputs = tuple[Tensor, ...]


class AheadShards:
    """Lets a sharded model compute with moved values in training; the shards stay as they are.

    FSDP gathers a parameter when a pass needs it, and frees it afterwards. It gets the shards'
    moved values in a forward pass in training mode, and in the backward pass again if that forward
    pass got them: in between, nothing changes of which they are computed. All else gets the shards.

    Raises
    ------
    InputError
        When FSDP does not ask for the shards before it gathers them.
    """

    def __init__(self, model: nn.Module, groups: Sequence[Group], ahead: Ahead) -> None:
        self._ahead = ahead
        self._moved_in: int | None = None
        """The step of the last forward pass that moved shards, whose backward pass may follow."""
        self._gathers = [
            _Gather(group, held, ahead)
            for group in groups
            for held in group.held
            if held.name in ahead.parameters
        ]
        _check(groups)
        self._extend()
        before, after = map(torch.compiler.disable, (self._before, self._after))
        self._hooks = [
            model.register_forward_pre_hook(before, prepend=True),
            model.register_forward_hook(after, always_call=True),
        ]
        self._follower = Follower(ahead)

    def follow(self, optimizer: Optimizer) -> None:
        """See `Follower.follow`."""
        self._follower.follow(optimizer)

    def end(self) -> None:
        """Let the model compute with its parameters, from now on."""
        self._follower.end()
        for hook in self._hooks:
            hook.remove()
        self._free_unless(moved=False)
        for gather in self._gathers:
            gather.held.remove_extension()

    def _before(self, model: nn.Module, arguments: Any) -> None:
        """Prepare a forward pass of the model."""
        initialize(model)
        self._extend()
        if _in_backward():  # a checkpoint calls the model again
            return
        moves = bool(model.training and torch.is_grad_enabled())
        self._free_unless(moves)
        # An evaluation between a forward and its backward pass may have gradients enabled, too.
        decides = moves or (torch.is_grad_enabled() and self._moved_in != self._ahead.steps)
        if moves:
            self._moved_in = self._ahead.steps
        for gather in self._gathers:
            gather.begin_pass(moves, decides)

    def _after(self, model: nn.Module, arguments: Any, result: Any) -> None:
        if not _in_backward():
            for gather in self._gathers:
                gather.end_pass()

    def _extend(self) -> None:
        """Let FSDP ask for the shards, also for those that it has replaced."""
        for gather in self._gathers:
            if not gather.group.is_gathered:
                gather.held.set_extension(gather.before, gather.after)

    def _free_unless(self, moved: bool) -> None:
        """Free the values that a forward pass without a backward pass has left, if not those."""
        for gather in self._gathers:
            if gather.in_pass and gather.is_moved != moved and gather.group.is_gathered:
                gather.group.module.reshard()


class _Gather:
    """FSDP's extension of the all-gather of one parameter."""

    def __init__(self, group: Group, held: Held, ahead: Ahead) -> None:
        self.group, self.held, self._ahead = group, held, ahead
        self.is_moved = self.in_pass = False
        """Whether the last gather got moved values, and whether a pass asked for it."""
        self._passing = self._moves = self._decides = False
        """Whether a forward pass is under way, moves the shard, and decides for a backward pass."""
        self._backward_moves = False
        # The same objects each time, by which it is seen that they are in place.
        self.before, self.after = self._before, self._after

    def begin_pass(self, moves: bool, decides: bool) -> None:
        """Take note of what a forward pass is to get; the parameter may be there already."""
        self._passing, self._moves, self._decides = True, moves, decides
        if decides and self.group.is_gathered:
            self._backward_moves = self.is_moved

    def end_pass(self) -> None:
        """Gather the shard itself for whoever asks outside of a pass."""
        self._passing = self._moves = self._decides = False

    def _before(
        self,
        mesh: object,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: nn.Module,
        mp_policy: MixedPrecisionPolicy,
    ) -> tuple[Outputs, None]:
        """Return what to gather, with its padding and in the dtype to compute in."""
        moves = self._backward_moves if _in_backward() else self._moves
        moved = self._ahead.moved([self.held.name]).get(self.held.name) if moves else None
        self.is_moved, self.in_pass = moved is not None, self._passing or _in_backward()
        if self._decides and not _in_backward():
            self._backward_moves = self.is_moved
        values = self.held.padded(moved)
        return (values.to(mp_policy.param_dtype or values.dtype),), None

    def _after(
        self, outputs: Outputs, metadata: None, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, Outputs] | None:
        """Return the whole parameter; FSDP keeps it, with its memory, for the next time."""
        return None if out is not None else (outputs[0], ())


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _check(groups: Collection[Group]) -> None:
    for group in groups:
        if group.keeps_part_between:
            raise InputError(
                "step-ahead needs parameters that are either whole or sharded, and"
                " reshard_after_forward gives a number of ranks that keep them; give True or False,"
                " or pass ahead=False to attach"
            )
        if group.is_copied_to_gpu:
            raise InputError(
                "step-ahead does not reach parameters that CPUOffloadPolicy keeps on the host; pass"
                " ahead=False to attach"
            )
