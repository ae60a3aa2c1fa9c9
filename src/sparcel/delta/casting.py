"""What engines serve, made of what a trainer holds, before it is compared and published."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch
from torch import Tensor

from sparcel.delta.bits import bits_of
from sparcel.delta.parts import local_of, owners, parts_of
from sparcel.errors import InputError, shown

Cast: TypeAlias = Callable[[str, Tensor], Mapping[str, Tensor]]
"""Makes of a tensor and its name those that are served, by name: values and their scales."""


@torch.no_grad()
def served(tensors: Mapping[str, Tensor], cast: Cast | None) -> Mapping[str, Tensor]:
    """Return what a cast makes of each tensor; of tied ones it makes tied ones.

    Raises
    ------
    InputError
        If it makes no tensors by name, two of the same name, or of tied tensors different ones.
    """
    if cast is None:
        return tensors
    made: dict[str, Tensor] = {}
    of_owner: dict[str, list[Tensor]] = {}
    for name, owner in owners(parts_of(tensors)).items():
        told = cast(name, tensors[name].detach())
        if not isinstance(told, Mapping) or not all(isinstance(one, str) for one in told):
            raise InputError(
                f"a cast returns tensors by name, and returned for '{shown(name)}'"
                f" {shown(repr(told))}"
            )
        twice = [one for one in told if one in made]
        if twice:
            raise InputError(
                f"the cast of '{shown(name)}' makes '{shown(twice[0])}', which that of another"
                " tensor has made; name what it makes after the tensor"
            )
        first = of_owner.setdefault(owner, list(told.values()))
        if len(first) != len(told) or not all(map(_same, told.values(), first)):
            raise InputError(
                f"the cast of '{shown(name)}' makes other tensors than that of another one which is"
                " tied to it; let it depend on the values alone"
            )
        made |= dict(zip(told, first, strict=True))
    return made


def _same(tensor: Tensor, other: Tensor) -> bool:
    if tensor is other:
        return True
    a, b = local_of(tensor), local_of(other)
    return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(bits_of(a), bits_of(b))
