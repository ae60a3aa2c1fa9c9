"""Which tensors are exchanged densely, and how much is sent of the others."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import pairwise
from typing import Literal, get_args

import torch
from torch import Tensor

from sparcel.core._checks import FLOAT_DTYPES, check_type
from sparcel.core.memory import Range, wide_dtype
from sparcel.core.schemes import Scheme, checked_density
from sparcel.core.training.layout import Arrangement, Piece
from sparcel.errors import InputError, checked_name, warn_on_rank_0

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

    ``scope`` tells over what one selection is made, ``rows`` names the tensors whose gradients are
    sparse. Any scheme that selects does so from the tensors ``eligible``; ``own_densities`` are
    those that tensors have of their own. ``selects`` tells whether the scheme of now is one: it may
    be switched.
    """

    scope: Scope
    tensors: Mapping[str, Tensor]
    rows: frozenset[str]
    eligible: Mapping[str, Tensor]
    own_densities: Mapping[str, float]
    selects: bool

    @cached_property
    def small(self) -> frozenset[str]:
        """The names of the tensors that are averaged densely, apart from the others.

        A dense scheme serves small tensors as well as large ones.
        """
        if not self.selects:
            return frozenset()
        return frozenset(self.tensors.keys() - self.eligible.keys() - self.rows)

    @property
    def sparse(self) -> Mapping[str, Tensor]:
        """The tensors that the scheme of now selects from, and remembers."""
        return self.eligible if self.selects else {}

    def arranged(self, places: Mapping[str, Range], size: int) -> Arrangement:
        """Return how tensors are exchanged that lie in these places of a vector.

        It is made, and the places are checked, when they are others than those in which the first
        of these tensors was found before: steps repeat one another.

        Raises
        ------
        InputError
            When the places fit no tensor, or overlap.
        """
        given = size, tuple(places.items())
        first = next(iter(places), "")
        before, arrangement = self._arrangements.get(first, (None, None))
        if arrangement is None or before != given:
            self._check_places(places, size)
            densities = self.own_densities if self.selects else {}
            # Tensors without elements, as a rank's shard may be, have no updates.
            pieces = [
                Piece(name, start, stop, densities.get(name))
                for name, (start, stop) in places.items()
                if start < stop
            ]
            arrangement = Arrangement(
                tuple(piece for piece in pieces if piece.name in self.small),
                tuple(piece for piece in pieces if piece.name not in self.small),
            )
            self._arrangements[first] = given, arrangement
        return arrangement

    @cached_property
    def _arrangements(self) -> dict[str, tuple[object, Arrangement]]:
        return {}

    def _check_places(self, places: Mapping[str, Range], size: int) -> None:
        """Raise `InputError` unless a flat vector can hold these tensors in these places."""
        ordered = sorted(places.values())
        if any(stop > start for (_, stop), (start, _) in pairwise(ordered)):
            raise InputError(f"places of tensors must not overlap, got {dict(places)}")
        for name, (start, stop) in places.items():
            self._check_known(name)
            elements = self.tensors[name].numel()
            if not (start >= 0 and stop - start == elements and stop <= size):
                raise InputError(
                    f"{name!r} has {elements} elements, which do not fit in [{start}, {stop}) of a"
                    f" vector of {size}"
                )

    def check_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        """Raise `InputError` unless the gradients are like the tensors that they are to update."""
        check_type(gradients, Mapping, "gradients")
        if gradients.keys() != self.tensors.keys():
            missing = sorted(self.tensors.keys() - gradients.keys())
            unknown = sorted(gradients.keys() - self.tensors.keys())
            raise InputError(
                f"gradients must have the names of the averager's tensors; missing {missing},"
                f" unknown {unknown}; give zeros for a tensor that was not used"
            )
        for name, gradient in gradients.items():
            self.check_gradient(name, gradient)

    def check_gradient(self, name: str, gradient: Tensor) -> None:
        """Raise `InputError` unless a gradient is like the tensor that it is to update."""
        self._check_known(name)
        check_type(gradient, Tensor, f"the gradient {name!r}")
        tensor = self.tensors[name]
        expected = tensor.shape, tensor.dtype, tensor.device, name in self.rows
        found = gradient.shape, gradient.dtype, gradient.device, gradient.is_sparse
        if found != expected:
            raise InputError(
                f"the gradient {name!r} must be {_described(*expected)}, got {_described(*found)};"
                " name sparse gradients in rows="
            )

    def _check_known(self, name: str) -> None:
        """Raise `InputError` unless the averager was made for a tensor of that name."""
        if name not in self.tensors:
            raise InputError(f"the averager was not made for a tensor named {name!r}")

    @property
    def memory_dtype(self) -> torch.dtype | None:
        """The dtype of the one memory of all tensors; None if each vector has its own."""
        if self.scope == "bucket":
            return None
        dtypes = {wide_dtype(tensor.dtype) for tensor in self.eligible.values()}
        return torch.float64 if torch.float64 in dtypes else torch.float32

    def described(self) -> str:
        """Return how many tensors are exchanged in which way, in words."""
        kinds = {
            "made sparse": self.sparse.keys(),
            "sent whole": self.tensors.keys() - self.sparse.keys() - self.rows,
            "with sparse gradients": self.rows,
        }
        return ", ".join(
            f"{len(names)} {kind} ({sum(self.tensors[name].numel() for name in names):,} elements)"
            for kind, names in kinds.items()
            if names
        )

    def under(self, scheme: Scheme) -> Treatment:
        """Return how the tensors are exchanged by another scheme."""
        return replace(self, selects=bool(scheme.remembers))


def treat(
    tensors: Mapping[str, Tensor],
    scheme: Scheme,
    policy: Policy,
    patterns: Mapping[str, float],
    rows: Collection[str],
    scope: Scope,
    copied: Collection[str] = (),
) -> Treatment:
    """Decide how each tensor is exchanged; those that are ``copied`` stay dense in any case.

    Raises
    ------
    InputError
        When a density is out of range or fits no tensor; for an unknown scope.

    Warns
    -----
    SparcelWarning
        When densities are given for a scheme that sends all.
    """
    checked_name(scope, get_args(Scope), "scope")
    densities = _checked_densities(patterns, tensors)
    selects = bool(scheme.remembers)
    if densities and not selects:
        warn_on_rank_0(
            f"densities are for schemes that select, got {scheme}, which sends all; they wait for a"
            " switch to one that selects"
        )
    eligible = {
        name: tensor
        for name, tensor in tensors.items()
        if name not in rows
        and name not in copied
        and (densities[name] < 1 if name in densities else not policy(name, tensor))
    }
    return Treatment(scope, tensors, frozenset(rows), eligible, densities, selects)


def _checked_densities(patterns: Mapping[str, float], names: Collection[str]) -> dict[str, float]:
    """Return the density of each tensor whose name fits a pattern, by the first that it fits.

    Raises
    ------
    InputError
        When a pattern fits no name, or a density is out of range.
    """
    found: dict[str, float] = {}
    for pattern, density in patterns.items():
        check_type(pattern, str, "a pattern of densities")
        checked_density(density, f"densities[{pattern!r}]")
        fitting = [name for name in names if fnmatchcase(name, pattern)]
        if not fitting:
            raise InputError(
                f"densities: {pattern!r} fits none of the tensors, which are named like"
                f" {next(iter(names), None)!r}"
            )
        found = dict.fromkeys(fitting, density) | found
    return found


def check_vector(vector: Tensor, places: Mapping[str, Range], device: torch.device) -> None:
    """Raise `InputError` unless a vector holds floats there, end to end, and places are a mapping.

    An error that a job raised would end the communicator.
    """
    check_type(vector, Tensor, "vector")
    check_type(places, Mapping, "places")
    if vector.dtype not in FLOAT_DTYPES or vector.layout != torch.strided:
        raise InputError(
            f"a vector of tensors must be dense, of one of {FLOAT_DTYPES}, got {vector.dtype},"
            f" {vector.layout}"
        )
    if vector.device != device:
        raise InputError(
            f"the averager was made for tensors on {device}, got a vector on {vector.device}"
        )
    if vector.ndim != 1 or not vector.is_contiguous():
        raise InputError(
            f"a vector of tensors must be one-dimensional and contiguous, got shape"
            f" {tuple(vector.shape)}, strides {vector.stride()}; flatten it first"
        )


def _described(shape: torch.Size, dtype: torch.dtype, device: torch.device, sparse: bool) -> str:
    return f"{'sparse' if sparse else 'dense'} {dtype} of shape {tuple(shape)} on {device}"
