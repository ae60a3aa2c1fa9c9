"""Which parameters are too small to be worth selecting from, and how much is sent of others."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from fnmatch import fnmatchcase

from torch import Tensor

from sparcel.errors import InputError
from sparcel.schemes import check_density

Policy = Callable[[str, Tensor], bool]
"""``(name, parameter) -> whether its gradient stays dense``; the same on all ranks."""


def stays_dense(name: str, parameter: Tensor) -> bool:
    """Keep biases, norms and tensors under 1024 elements dense: the default policy."""
    return parameter.ndim < 2 or parameter.numel() < 1024


def own_densities(patterns: Mapping[str, float], names: Collection[str]) -> dict[str, float]:
    """Return the density of each parameter that a pattern fits, the first one that does.

    Raises
    ------
    InputError
        When a pattern fits no parameter, or a density is out of range.
    """
    for pattern, density in patterns.items():
        check_density(density)
        if not any(fnmatchcase(name, pattern) for name in names):
            raise InputError(
                f"densities: {pattern!r} fits none of the model's parameters, which are named like"
                f" {next(iter(names), None)!r}"
            )
    return {
        name: next(patterns[pattern] for pattern in patterns if fnmatchcase(name, pattern))
        for name in names
        if any(fnmatchcase(name, pattern) for pattern in patterns)
    }
