"""Step-ahead in sharded models: shards move on their way into the all-gather."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from sparcel.core.fsdp.groups import Held, ParameterGroup, initialize
from sparcel.core.training import Ahead, Follower
from sparcel.errors import InputError

Outputs = tuple[Tensor, ...]


class AheadShards(Follower):
    """Lets a sharded model compute with moved values in training; the shards stay as they are.

    FSDP gathers a parameter when a pass needs it, and frees it afterwards. It gets the shards'
    moved values in a forward pass in training mode, and in the backward pass again if that forward
    pass got them: in between, nothing changes of which they are computed. All else gets the shards.
    A forward pass is the call of the model, or of a part of it that fully_shard was applied to.

    Raises
    ------
    InputError
        When FSDP does not ask for the shards before it gathers them.
    """

    def __init__(self, model: nn.Module, groups: Sequence[ParameterGroup], ahead: Ahead) -> None:
        for group in groups:
            group.check_ahead()
        self._model = model
        self._called: nn.Module | None = None
        """The module whose call is a forward pass that is under way, or was interrupted."""
        gathers = [_Gather(group, ahead) for group in groups]
        self._gathers = [gather for gather in gathers if gather.extensions]
        self._extend()
        before, after = map(torch.compiler.disable, (self._before, self._after))
        self._hooks, self._inside = [], dict[nn.Module, list[_Gather]]()
        self._parts: dict[nn.Module, set[nn.Module]] = {}
        for module in dict.fromkeys([model, *(one for group in groups for one in group.modules)]):
            self._parts[module] = parts = set(module.modules())
            self._inside[module] = [
                gather for gather in self._gathers if not parts.isdisjoint(gather.group.modules)
            ]
            self._hooks.append(module.register_forward_pre_hook(before, prepend=True))
            self._hooks.append(module.register_forward_hook(after, always_call=True))
        super().__init__(ahead)

    def end(self) -> None:
        """Let the model compute with its parameters, from now on."""
        super().end()
        for hook in self._hooks:
            hook.remove()
        for gather in self._gathers:
            gather.free_unless(moved=False)
            gather.remove()

    def _before(self, module: nn.Module, arguments: Any) -> None:
        """Begin a forward pass, unless it is a part of another one, or of a backward pass."""
        called = self._called
        if _in_backward() or (called and module is not called and module in self._parts[called]):
            return
        self._called = module
        if module is self._model:
            initialize(module)
        self._extend()
        for gather in self._inside[module]:
            gather.begin(module.training, torch.is_grad_enabled())

    def _after(self, module: nn.Module, arguments: Any, result: Any) -> None:
        if module is self._called:
            self._called = None
            for gather in self._inside[module]:
                gather.end()

    def _extend(self) -> None:
        """Let FSDP ask for the shards, also for those that it has replaced."""
        for gather in self._gathers:
            if not gather.group.is_gathered:
                gather.extend()


class _Gather:
    """What a group's parameters are gathered from: FSDP's extension of their all-gather.

    Attributes
    ----------
    group
        The group.
    extensions
        The parameters that can be moved, each with what FSDP calls before it gathers it.
    """

    def __init__(self, group: ParameterGroup, ahead: Ahead) -> None:
        self.group, self._ahead = group, ahead
        self.extensions = [
            (held, _Before(self, held)) for held in group.held if held.name in ahead.names
        ]
        self._is_moved = self._is_left = False
        """Whether the last gather got moved values, and whether they may be left by a pass."""
        self._passing = self._moves = self._decides = False
        """Whether a forward pass is under way, moves shards, and decides for a backward pass."""
        self._backward: tuple[bool, int] = False, -1
        """Whether the next backward pass moves shards, and the step in which that was decided."""

    def extend(self) -> None:
        """Let FSDP ask for the shards."""
        for held, before in self.extensions:
            held.set_extension(before, _after)

    def remove(self) -> None:
        """Let FSDP gather the shards as they are."""
        for held, _ in self.extensions:
            held.remove_extension()

    def begin(self, training: bool, with_gradients: bool) -> None:
        """Take note of what a forward pass is to get; the parameters may be there already."""
        moves = training and with_gradients
        self.free_unless(moves)
        # An evaluation between a forward and its backward pass may have gradients enabled, too.
        decides = moves or (with_gradients and not self._awaits_moved)
        self._passing, self._moves, self._decides = True, moves, decides
        if decides and self.group.is_gathered:
            self._backward = self._is_moved, self._ahead.steps

    def end(self) -> None:
        """Gather the shards as they are for whoever asks outside of a pass."""
        if not self._decides and self._awaits_moved:
            self.free_unless(moved=True)
        self._passing = self._moves = self._decides = False

    def free_unless(self, moved: bool) -> None:
        """Free the values that a pass has left, if they are not those."""
        if self._is_left and self._is_moved != moved and self.group.is_gathered:
            self.group.reshard()

    def values(self, held: Held) -> Tensor:
        """Return what to gather of a parameter, with its padding."""
        if _in_backward():
            moves, decided_in = self._backward
            if moves and decided_in != self._ahead.steps:
                raise InputError(
                    "a step came between a forward and its backward pass, whose moved values are"
                    " gone; call set_requires_gradient_sync(False) for all backward passes of a"
                    " step but the last, or pass ahead=False to attach"
                )
        else:  # whoever asks outside of a pass may do it for the backward pass that follows
            moves = self._moves if self._passing else self._awaits_moved
        moved = self._ahead.moved([held.name]).get(held.name) if moves else None
        self._is_moved = moved is not None
        self._is_left = self._is_moved or self._passing
        if self._decides and not _in_backward():
            self._backward = self._is_moved, self._ahead.steps
        return held.padded(moved)

    @property
    def _awaits_moved(self) -> bool:
        """Whether a backward pass may follow that needs moved values."""
        return self._backward == (True, self._ahead.steps)


class _Before:
    """What FSDP calls before it gathers a parameter.

    A shard holds it. Copying or pickling it gives None, so a copy of a shard holds values alone.
    """

    def __init__(self, gather: _Gather, held: Held) -> None:
        self._gather, self._held = gather, held

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

    @torch.no_grad()
    def __call__(
        self,
        mesh: object,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: nn.Module,
        mp_policy: MixedPrecisionPolicy,
    ) -> tuple[Outputs, None]:
        """Return what FSDP is to gather, in the dtype to compute in."""
        values = self._gather.values(self._held)
        return (values.to(mp_policy.param_dtype or values.dtype),), None


def _after(
    outputs: Outputs, metadata: None, dtype: torch.dtype, *, out: Tensor | None = None
) -> tuple[Tensor, Outputs] | None:
    """Return the whole parameter; FSDP keeps it, with its memory, for the next time."""
    return None if out is not None else (outputs[0], ())


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
