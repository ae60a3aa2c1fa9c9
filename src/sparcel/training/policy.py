"""Which tensors are exchanged densely, and how much is sent of the others."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, get_args

import torch
from torch import Tensor

from sparcel._checks import check_type
from sparcel.errors import InputError, known
from sparcel.memory import wide_dtype
from sparcel.schemes import Scheme, checked_density

Policy = Callable[[str, Tensor], bool]
"""``(name, tensor) -> whether its gradient stays dense``; the same on all ranks."""

Scope = Literal["bucket", "model"]
"""Over what one selection is made: each queued vector, or all vectors of a step."""


def stays_dense(name: str, tensor: Tensor) -> bool:
    """Keep biases, norms and tensors under 1024 elements dense: the default policy."""
    return tensor.ndim < 2 or tensor.numel() < 1024


@dataclass(frozen=True)
class Treatment:
    """How each tensor is exchanged; the same on all ranks.

    ``scope`` tells over what one selection is made. ``small`` names the tensors that are averaged
    densely, ``rows`` those whose gradients are sparse. ``remembered`` are the tensors that the
    scheme selects from, ``densities`` the densities that some of them have of their own.
    """

    scope: Scope
    tensors: Mapping[str, Tensor]
    small: frozenset[str]
    rows: frozenset[str]
    remembered: Mapping[str, Tensor]
    densities: Mapping[str, float]

    @property
    def memory_dtype(self) -> torch.dtype | None:
        """The dtype of the one memory of all tensors; None if each vector has its own."""
        if self.scope == "bucket":
            return None
        dtypes = {wide_dtype(tensor.dtype) for tensor in self.remembered.values()}
        return torch.float64 if torch.float64 in dtypes else torch.float32


def treat(
    tensors: Mapping[str, Tensor],
    scheme: Scheme,
    policy: Policy,
    patterns: Mapping[str, float],
    rows: Collection[str],
    scope: Scope,
) -> Treatment:
    """Decide how each tensor is exchanged.

    Raises
    ------
    InputError
        When a density is out of range, fits no tensor, or is given for a scheme that sends all; for
        an unknown scope.
    """
    known(scope, get_args(Scope), "scope")
    densities = own_densities(patterns, tensors)
    # A dense scheme serves small tensors as well as large ones, and remembers nothing.
    selects = bool(scheme.remembers)
    if densities and not selects:
        raise InputError(f"densities are for schemes that select, got {scheme}, which sends all")
    small = frozenset(
        name
        for name, tensor in tensors.items()
        if selects
        and (densities.get(name) == 1 or (name not in densities and policy(name, tensor)))
    )
    remembered = {
        name: tensor
        for name, tensor in tensors.items()
        if selects and name not in small and name not in rows
    }
    return Treatment(scope, tensors, small, frozenset(rows), remembered, densities)


def own_densities(patterns: Mapping[str, float], names: Collection[str]) -> dict[str, float]:
    """Return the density of each tensor whose name fits a pattern, by the first that it fits.

    Raises
    ------
    InputError
        When a pattern fits no name, or a density is out of range.
    """
    for pattern, density in patterns.items():
        check_type(pattern, str, "a pattern of densities")
        checked_density(density, f"densities[{pattern!r}]")
        if not any(fnmatchcase(name, pattern) for name in names):
            raise InputError(
                f"densities: {pattern!r} fits none of the tensors, which are named like"
                f" {next(iter(names), None)!r}"
            )
    return {
        name: next(patterns[pattern] for pattern in patterns if fnmatchcase(name, pattern))
        for name in names
        if any(fnmatchcase(name, pattern) for pattern in patterns)
    }
