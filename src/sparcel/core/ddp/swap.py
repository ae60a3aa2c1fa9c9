"""What modules have inside of a call alone: moved values in the place of their parameters."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import partial
from itertools import repeat
from operator import setitem
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

_INSIDE = "inside"
_REDUCE = "__reduce_ex__"
"""What copies and pickles of an object are made of."""
_AT_ONCE = 2**64 - 1
"""The sequence number of the nodes by which autograd accumulates gradients."""


class Slot(NamedTuple):
    """A parameter's place: a module and its attributes, the key there, and the full name."""

    module: weakref.ref[nn.Module]
    attributes: dict[str, Any]
    key: str
    name: str
    parameter: Tensor

    @property
    def table(self) -> dict[str, Any]:
        """The module's table of parameters."""
        found: dict[str, Any] = self.attributes["_parameters"]
        return found

    @property
    def may_move(self) -> bool:
        """Whether the parameter is trained now, and nothing else stands in its place."""
        return self.parameter.requires_grad and self.table.get(self.key) is self.parameter


class Swap(NamedTuple):
    """Attributes that modules have inside of a call alone: their dicts, keys there, and values.

    If it ``hides``, modules lack them inside of a call alone.
    """

    attributes: list[dict[str, Any]]
    keys: list[str]
    values: list[Any]
    hides: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether nothing moves: the mark of the call stands alone."""
        return self.keys == [_INSIDE]

    def put(self) -> Iterator[Any]:
        """Return an iterator that gives the modules these attributes, in C code alone."""
        return map(setitem, self.attributes, self.keys, self.values)

    def take(self) -> Iterator[Any]:
        """Return an iterator that takes them away, in C code alone."""
        return map(dict.pop, self.attributes, self.keys, repeat(None))


def swap_of(slots: Sequence[Slot], standing: Mapping[str, Tensor], flag: dict[str, Any]) -> Swap:
    """Return what puts tensors into slots, by name, and marks that a call is under way."""
    modules = {id(slot.attributes): slot for slot in slots}.values()
    return Swap(
        [*(slot.attributes for slot in (*slots, *modules)), flag],
        [*(slot.key for slot in slots), *repeat(_REDUCE, len(modules)), _INSIDE],
        [
            *(standing[slot.name] for slot in slots),
            *(partial(_reduce, slot.module) for slot in modules),
            True,
        ],
    )


def stand_in(parameter: Tensor, values: Tensor) -> Tensor:
    """Return a tensor with these values whose gradient goes to the parameter.

    A parameter has one such tensor in a pass, so `torch.autograd.grad` finds all that it was used
    for. In the model's own code it passes for the parameter: isinstance says Parameter, and it has
    the attributes that users gave the parameter. A deep copy of it is a copy of the parameter.
    Hooks and ``requires_grad_`` go to the parameter. torch.compile takes it for a parameter, too,
    by which it finds DDP's buckets. It has the same class in all steps, so nothing is compiled
    twice.
    """
    standing: Any = torch.ops.aten._unsafe_view(parameter, parameter.shape)
    # Autograd goes through what was made last first. These were made before all of the pass. With
    # this number their gradients are accumulated once complete, and not all at the end.
    standing.grad_fn._set_sequence_nr(_AT_ONCE)
    standing.data = values
    standing.__dict__.update(
        parameter.__dict__,
        _is_param=True,
        __deepcopy__=partial(deepcopy, parameter),
        register_hook=parameter.register_hook,
        requires_grad_=parameter.requires_grad_,
    )
    found: Tensor = standing
    return found


def _reduce(module: weakref.ref[nn.Module], protocol: int) -> Any:
    """Return what a copy or a pickle of a module is made of: of what it has outside of a call."""
    found = module()
    assert found is not None
    inside = {
        key: found.__dict__.pop(key)
        for key in (*found._parameters, _REDUCE)
        if key in found.__dict__
    }
    try:
        reduced = found.__reduce_ex__(protocol)
        if isinstance(reduced, str):
            return reduced
        # A module's own __getstate__ may give the very dict of its attributes.
        return tuple(part.copy() if part is found.__dict__ else part for part in reduced)
    finally:
        found.__dict__.update(inside)


def hidden(slots: Iterable[Slot]) -> Swap | None:
    """Return what hides moved values where the call that is under way put something else.

    So it may have frozen a parameter: the gradient of a GAN's generator is not to reach the
    discriminator.
    """
    found = [slot for slot in slots if slot.key in slot.attributes and not slot.may_move]
    if not found:
        return None
    return Swap(
        [slot.attributes for slot in found],
        [slot.key for slot in found],
        [slot.attributes[slot.key] for slot in found],
        hides=True,
    )
