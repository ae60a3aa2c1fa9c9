"""Whether the call of a model wrote what it may not: what would then differ between ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sparcel.device import read
from sparcel.errors import InputError
from sparcel.training import Ahead

_SAME_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integers of so many bytes."""


class Place(NamedTuple):
    """Where a module has a tensor: a dict, the key there, and the parameter's name."""

    table: dict[str, Any]
    key: str
    name: str


class Guard:
    """Looks at parameters before and after a call: at those that move, and frozen ones like them.

    Writes by ``.data`` show in the values alone, which are looked at in passes 1, 2, 4, 8 and so
    on: whoever does so mostly does in every pass.
    """

    def __init__(self, ahead: Ahead) -> None:
        self._ahead = ahead
        self._frozen: list[Place] = []
        self._watched: list[tuple[Place, Tensor, tuple[int, ...]]] = []
        """Places, each with its tensor and the state of that before the call."""
        self._passes = 0

    @property
    def _thoroughly(self) -> bool:
        return self._passes.bit_count() == 1

    def begin(self, model: nn.Module, tensors: Iterable[tuple[Place, Tensor]]) -> None:
        """Remember these tensors of the call that begins, and the frozen parameters."""
        self._passes += 1
        if self._thoroughly:  # some models make their momentum encoder in the first pass
            self._frozen = list(_frozen(model, self._ahead))
        frozen = ((place, place.table.get(place.key)) for place in self._frozen)
        self._watched = [
            (place, tensor, _state(tensor, self._thoroughly))
            for place, tensor in (*tensors, *frozen)
            if tensor is not None
        ]

    def check(self) -> None:
        """Raise `InputError` if the call has written them, or put others in their places."""
        for place, tensor, before in self._watched:
            here = place.table.get(place.key)
            if here is not tensor or _state(tensor, self._thoroughly) != before:
                raise InputError(
                    f"{place.name!r} is written while the model is called, and step-ahead gives the"
                    " model other values than its parameters there; pass ahead=False to attach, or"
                    " write the parameter after the call"
                )
        self._watched.clear()

    def end(self) -> None:
        """Let go of all."""
        self._watched.clear()
        self._frozen.clear()


def _frozen(model: nn.Module, ahead: Ahead) -> Iterator[Place]:
    """Yield parameters that may be averages of those that move, as a momentum encoder has them."""
    shapes = {parameter.shape for parameter in ahead.parameters.values()}
    own = {id(parameter) for parameter in ahead.parameters.values()}
    for path, module in model.named_modules():
        table = module._parameters
        for key, parameter in table.items() if isinstance(table, dict) else ():
            if parameter is None or parameter.requires_grad or id(parameter) in own:
                continue
            if parameter.shape in shapes and _is_plain(parameter):
                yield Place(table, key, f"{path}.{key}" if path else key)


def _is_plain(tensor: Tensor) -> bool:
    """Tell whether a tensor has memory of its own that can be looked at, and counts writes."""
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.layout is torch.strided
        and tensor.itemsize in _SAME_BITS
        and not (tensor.is_meta or tensor.is_quantized or tensor.is_inference())
    )


def _state(tensor: Tensor, thoroughly: bool) -> tuple[int, ...]:
    """Return what tells whether a tensor was written; ``thoroughly``, also by ``.data``."""
    state = tensor.data_ptr(), tensor._version
    if not thoroughly or not tensor.numel():
        return state
    bits = tensor.detach().view(_SAME_BITS[tensor.itemsize])
    return *state, int(read(bits.sum(dtype=torch.int64)))
