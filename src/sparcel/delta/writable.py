"""Whether each element of weights can be written alone."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from sparcel.delta.parts import Part, Weights, local_of, untied
from sparcel.errors import InputError, shown


def check_writable(parts: Mapping[str, Part], target: Weights) -> None:
    """Raise InputError unless each element of each tensor can be written alone.

    Parameters
    ----------
    parts
        Those of the target.
    target
        A module's tensors must lie in its parameters and buffers.
    """
    if isinstance(target, nn.Module):
        _check_inside(target, parts)
    held = [(name, part.local) for name, part in untied(parts).items() if part.local.numel()]
    held.sort(key=lambda one: (str(one[1].device), one[1].data_ptr()))
    near: list[tuple[str, Tensor]] = []
    for name, local in held:
        if _repeats_elements(local):
            raise InputError(
                f"several elements of {shown(name)} are one in memory; pass a copy of it"
            )
        begin, device = local.data_ptr(), local.device
        near = [(n, one) for n, one in near if one.device == device and _end_of(one) > begin]
        for other, one in near:
            # Columns of a matrix lie between one another, and share nothing.
            if np.shares_memory(_in_its_place(one), _in_its_place(local)):
                raise InputError(
                    f"{shown(other)} and {shown(name)} share elements, but are not tied as one"
                    " tensor; pass a copy of one of them"
                )
        near.append((name, local))


def _check_inside(module: nn.Module, parts: Mapping[str, Part]) -> None:
    """Raise InputError unless parts of a state dict lie where the module's own tensors do."""
    own = (one for one in chain(module.parameters(), module.buffers()) if not is_lazy(one))
    dense = (local_of(one) for one in own if one.layout == torch.strided)
    memory = {one.untyped_storage().data_ptr() for one in dense if one.data_ptr()}
    for name, part in parts.items():
        if part.local.numel() and part.local.untyped_storage().data_ptr() not in memory:
            raise InputError(
                f"{shown(name)} is a copy that the module's state_dict makes, or a tensor that is"
                " no buffer, so what is written to it may not reach the module; register it, pass"
                " tensors by name, or load_state_dict what a Subscriber without tensors has"
            )


def _span(tensor: Tensor) -> int:
    """Return how many elements there are from a tensor's first to its last one in memory."""
    sides = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((count - 1) * distance for count, distance in sides)


def _end_of(tensor: Tensor) -> int:
    return tensor.data_ptr() + _span(tensor) * tensor.element_size()


def _repeats_elements(tensor: Tensor) -> bool:
    """Tell whether several elements of a tensor are one in memory."""
    end, apart = 1, True
    for distance, count in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if count > 1:
            apart = apart and distance >= end
            end += (count - 1) * distance
    if apart:  # along each dimension, what lies inside ends before the next one begins
        return False
    places = torch.arange(_span(tensor)).as_strided(tensor.shape, tensor.stride())
    return len(places.unique()) < tensor.numel()


def _in_its_place(tensor: Tensor) -> np.ndarray[Any, Any]:
    """Return an array with a tensor's addresses, which may be a GPU's: it must not be read."""
    size = tensor.element_size()
    interface = {
        "version": 3,
        "typestr": f"|V{size}",
        "data": (tensor.data_ptr(), False),
        "shape": tuple(tensor.shape),
        "strides": tuple(distance * size for distance in tensor.stride()),
    }
    return np.asarray(SimpleNamespace(__array_interface__=interface))
