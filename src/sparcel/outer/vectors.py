"""What islands share, in flat vectors: parameters, and buffers that become their averages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from sparcel._checks import all_finite
from sparcel.errors import InputError
from sparcel.memory import Range, wide_dtype
from sparcel.training import Averager
from sparcel.training.layout import end_to_end

_WORDS = 8
"""Vectors are padded to so many elements, so that they are whole numbers of 64 bits."""


class Vector:
    """Tensors that are exchanged as one vector; all have the same wide dtype.

    Methods take this island's tensors by name, which may be more than those of the vector.

    Attributes
    ----------
    shared
        Their values after the last outer step, the same on all islands, float32 or float64
        ``[size]``.
    places
        Where each tensor lies.
    """

    def __init__(
        self, local: Mapping[str, Tensor], dtype: torch.dtype, scratch: dict[torch.dtype, Tensor]
    ) -> None:
        self._shapes = {name: tensor.shape for name, tensor in local.items()}
        self.places: dict[str, Range] = {}
        self._scratch, end = scratch, 0
        for name, tensor in local.items():
            self.places[name] = end, end + tensor.numel()
            end += tensor.numel()
        device = next((one.device for one in local.values()), None)
        padded = -(-end // _WORDS) * _WORDS
        self.shared = torch.zeros(padded, dtype=dtype, device=device)
        for name, tensor in local.items():
            self.view(self.shared, name).copy_(tensor)

    @property
    def moved(self) -> Tensor:
        """The pseudo-gradient, ``[size]``: shared less local.

        Exchanging replaces it by the average. All vectors of a dtype use the same memory.
        """
        size, dtype = self.shared.numel(), self.shared.dtype
        if (scratch := self._scratch.get(dtype)) is None or scratch.numel() < size:
            self._scratch[dtype] = scratch = torch.zeros_like(self.shared)
        return scratch[:size]

    def view(self, vector: Tensor, name: str) -> Tensor:
        """Return a tensor's elements of a vector, in its shape."""
        start, stop = self.places[name]
        return vector[start:stop].view(self._shapes[name])

    def move(self, local: Mapping[str, Tensor]) -> list[str]:
        """Put the pseudo-gradient into ``moved``; return the tensors that are not finite."""
        moved = self.moved
        moved[max((stop for _, stop in self.places.values()), default=0) :] = 0
        for name in self.places:
            shared, one = self.view(self.shared, name), local[name]
            if one.dtype != shared.dtype:  # what the cast takes off, this island has not moved
                shared = shared.to(one.dtype).to(moved.dtype)
            torch.sub(shared, one, out=self.view(moved, name))
        if all_finite(moved):
            return []
        return [name for name in self.places if not all_finite(self.view(moved, name))]

    def put(self, local: Mapping[str, Tensor], keep: float = 0.0) -> None:
        """Let this island go on with the shared values, and a share of its own."""
        for name in self.places:
            _put(local[name], self.view(self.shared, name), keep)

    def shift(self, local: Mapping[str, Tensor], before: Tensor) -> None:
        """Move this island's values as the shared ones have moved since ``before``."""
        for name in self.places:
            local[name].add_(self.view(self.shared, name) - self.view(before, name))


class Buffers:
    """Buffers that become their averages: those that any island has changed.

    Attributes
    ----------
    vectors
        What all of them were after the last outer step.
    moved
        By how much this island has changed some of them, by name.
    averaged
        Whether each of them was changed by any island, and is averaged in this outer step.
    """

    def __init__(self, local: Mapping[str, Tensor]) -> None:
        self.vectors = [Vector(part, dtype, {}) for dtype, part in by_dtype(local).items()]
        self.moved: dict[str, Tensor] = {}
        self.averaged = [False] * len([*self])
        self._queued: list[tuple[Vector, Tensor, Mapping[str, Range]]] = []

    def move(self, local: Mapping[str, Tensor]) -> list[str]:
        """Find out what this island has changed.

        Return those that are not finite any more: they count as if they had not changed.
        """
        self.moved, spoilt = {}, list[str]()
        for name, shared, one in self.changed(local):
            self.moved[name] = shared.to(one.dtype).to(shared.dtype) - one
            if all_finite(shared) and not all_finite(one):
                self.moved[name] = torch.zeros_like(shared)
                spoilt.append(name)
        return spoilt

    @property
    def flags(self) -> list[bool]:
        """Whether this island has changed each of them."""
        return [name in self.moved for name, _ in self]

    def queue(self, averager: Averager, share: float) -> None:
        """Queue the exchange of those that are averaged, times a share.

        Raises
        ------
        InputError
            When one of them was not finite when islands began.
        """
        averaged = self._averaged
        self._queued = []
        for vector in self.vectors:
            parts = {}
            for name in [name for name in vector.places if name in averaged]:
                shared = vector.view(vector.shared, name)
                if not all_finite(shared):
                    raise InputError(
                        f"the buffer {name!r} held NaN or Inf when islands began, and has changed,"
                        " so that it cannot be averaged; keep it out of the model's buffers, or"
                        ' pass buffers="local"'
                    )
                parts[name] = self.moved.get(name, torch.zeros_like(shared)) * share
            if parts:
                moved, places = end_to_end(parts)
                averager.queue(moved, places)
                self._queued.append((vector, moved, places))

    def step(self) -> None:
        """Let the averages that have come take effect."""
        for vector, moved, places in self._queued:
            for name, (start, stop) in places.items():
                shared = vector.view(vector.shared, name)
                shared.sub_(moved[start:stop].view(shared.shape))

    def put(self, local: Mapping[str, Tensor], keep: float = 0.0) -> None:
        """Let this island go on with the averages that have come, and a share of its own."""
        averaged = self._averaged
        for name, shared, one in self.changed(local):
            if name in averaged:
                _put(one, shared, keep)

    def put_all(self, local: Mapping[str, Tensor]) -> None:
        """Let this island go on with the shared values of all of them."""
        for _, shared, one in self.changed(local):
            _put(one, shared)

    def changed(self, local: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield those that are not what is shared: their names, shared values, and this island's.

        A buffer that is gone, or has another shape, is this island's own.
        """
        for name, shared in self:
            one = local.get(name)
            if one is None or one.shape != shared.shape:
                continue
            if not torch.allclose(shared.to(one.dtype), one, rtol=0, atol=0, equal_nan=True):
                yield name, shared, one

    @property
    def _averaged(self) -> set[str]:
        return {name for (name, _), flag in zip(self, self.averaged, strict=True) if flag}

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for vector in self.vectors:
            for name in vector.places:
                yield name, vector.view(vector.shared, name)


def _put(local: Tensor, shared: Tensor, keep: float = 0.0) -> None:
    """Let a tensor become what is shared, but for a share of its own."""
    if keep:
        local.lerp_(shared.to(local.dtype), 1 - keep)
    else:
        local.copy_(shared)


def by_dtype(tensors: Mapping[str, Tensor]) -> dict[torch.dtype, dict[str, Tensor]]:
    """Return the tensors of each wide dtype."""
    found: dict[torch.dtype, dict[str, Tensor]] = {}
    for name, one in tensors.items():
        found.setdefault(wide_dtype(one.dtype), {})[name] = one
    return {dtype: found[dtype] for dtype in sorted(found, key=str)}
