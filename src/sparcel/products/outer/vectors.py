"""What islands average, in flat vectors: parameters, buffers, and second moments now and then."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from sparcel.core._checks import all_finite
from sparcel.core.memory import Range, wide_dtype
from sparcel.core.training import Averager
from sparcel.core.training.layout import end_to_end
from sparcel.errors import InputError
from sparcel.products.outer.model import Moment

_WORDS = 8
"""Vectors are padded to so many elements, so that they are whole numbers of 64 bits."""

_REMEMBERED = 0.1
"""How much of an average has to be left when the next one comes, so that it is worth its bytes."""


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
    tensors
        The shared values of each tensor, in its shape.
    """

    def __init__(
        self, local: Mapping[str, Tensor], dtype: torch.dtype, scratch: dict[torch.dtype, Tensor]
    ) -> None:
        self.places: dict[str, Range] = {}
        self._scratch, end = scratch, 0
        for name, tensor in local.items():
            self.places[name] = end, end + tensor.numel()
            end += tensor.numel()
        device = next((one.device for one in local.values()), None)
        padded = -(-end // _WORDS) * _WORDS
        self.shared = torch.zeros(padded, dtype=dtype, device=device)
        self.tensors: dict[str, Tensor] = {}
        for name, tensor in local.items():
            start, stop = self.places[name]
            self.tensors[name] = self.shared[start:stop].view(tensor.shape).copy_(tensor)

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
        return vector[start:stop].view(self.tensors[name].shape)

    def move(self, local: Mapping[str, Tensor]) -> list[str]:
        """Put the pseudo-gradient into ``moved``; return the tensors that are not finite."""
        moved = self.moved
        moved[max((stop for _, stop in self.places.values()), default=0) :] = 0
        for name, shared in self.tensors.items():
            one = local[name]
            if one.dtype != shared.dtype:  # what the cast takes off, this island has not moved
                shared = shared.to(one.dtype).to(moved.dtype)
            torch.sub(shared, one, out=self.view(moved, name))
        if all_finite(moved):
            return []
        return [name for name in self.places if not all_finite(self.view(moved, name))]


class Buffers:
    """Buffers that become their averages: those that any island has changed.

    Attributes
    ----------
    vectors
        What all of them were after the last outer step.
    shared
        The same, by name.
    averaged
        Whether each of them was changed by any island, and is averaged in this outer step.
    """

    def __init__(self, local: Mapping[str, Tensor]) -> None:
        self.vectors = [Vector(part, dtype, {}) for dtype, part in by_dtype(local).items()]
        self.shared = {k: one for vector in self.vectors for k, one in vector.tensors.items()}
        self.averaged = [False] * len(self.shared)
        self._moved: dict[str, Tensor] = {}
        """By how much this island has changed some of them."""
        self._averages: dict[str, Tensor] = {}

    def move(self, local: Mapping[str, Tensor]) -> list[str]:
        """Find out what this island has changed.

        Return those that are not finite any more: they count as if they had not changed.
        """
        self._moved, spoilt = {}, list[str]()
        for name, shared, one in self.changed(local):
            self._moved[name] = shared.to(one.dtype).to(shared.dtype) - one
            if all_finite(shared) and not all_finite(one):
                self._moved[name] = torch.zeros_like(shared)
                spoilt.append(name)
        return spoilt

    @property
    def flags(self) -> list[bool]:
        """Whether this island has changed each of them."""
        return [name in self._moved for name in self.shared]

    @property
    def names(self) -> set[str]:
        """Those that are averaged in this outer step."""
        return {name for name, flag in zip(self.shared, self.averaged, strict=True) if flag}

    def queue(self, averager: Averager, share: float) -> None:
        """Queue the exchange of those that are averaged, times a share.

        Raises
        ------
        InputError
            When one of them was not finite when islands began.
        """
        averaged, self._averages = self.names, {}
        for vector in self.vectors:
            parts = {}
            for name in [name for name in vector.tensors if name in averaged]:
                shared = vector.tensors[name]
                if not all_finite(shared):
                    raise InputError(
                        f"the buffer {name!r} held NaN or Inf when islands began, and has changed,"
                        " so that it cannot be averaged; keep it out of the model's buffers, or"
                        ' pass buffers="local"'
                    )
                parts[name] = self._moved.get(name, torch.zeros_like(shared)) * share
            self._averages |= _queued(averager, parts)

    def step(self) -> None:
        """Let the averages that have come take effect."""
        for name, average in self._averages.items():
            self.shared[name].sub_(average)

    def put(self, local: Mapping[str, Tensor], names: Container[str], keep: float = 0.0) -> None:
        """Let this island go on with what is shared of some, and a share of its own."""
        for name, shared, one in self.changed(local):
            if name in names:
                put(one, shared, keep)

    def changed(self, local: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield those that are not what is shared: their names, shared values, and this island's.

        A buffer that is gone, or has another shape, is this island's own.
        """
        for name, shared in self.shared.items():
            one = local.get(name)
            if one is None or one.shape != shared.shape:
                continue
            if not torch.allclose(shared.to(one.dtype), one, rtol=0, atol=0, equal_nan=True):
                yield name, shared, one


class Moments:
    """The second moments of a fragment, which become averages in an outer step.

    From few samples an island learns little of how large gradients are: where it has seen none for
    long, the next makes a step that is several times too large. All islands together know more.
    """

    def __init__(self) -> None:
        self._fragment: Sequence[Vector] = ()
        self._own: Mapping[str, Moment] = {}
        self._averages: dict[str, Tensor] = {}

    def move(
        self, fragment: Sequence[Vector], own: Mapping[str, Moment], steps: float = 0.0
    ) -> None:
        """Begin an outer step in which those of a fragment become averages; none without one.

        The next averages come after so many inner steps.
        """
        self._fragment, self._averages = fragment, {}
        self._own = {
            name: one
            for name, one in own.items()
            if one.bias and one.decay**steps >= _REMEMBERED and all_finite(one.kept)
        }

    @property
    def flags(self) -> list[bool]:
        """Whether this island brings each of them."""
        return [name in self._own for vector in self._fragment for name in vector.tensors]

    def queue(self, averager: Averager, share: float, brought: Sequence[bool]) -> None:
        """Queue the exchange of those that all bring who count, each times this island's share."""
        self._averages, flags = {}, iter(brought)
        for vector in self._fragment:
            parts = {
                entry(name): self._brings(name, like, share)
                for (name, like), all_bring in zip(vector.tensors.items(), flags, strict=False)
                if all_bring
            }
            self._averages |= _queued(averager, parts)

    def _brings(self, name: str, like: Tensor, share: float) -> Tensor:
        if not share:
            return torch.zeros_like(like)
        kept, bias, _ = self._own[name]
        return kept.to(like.dtype) * (share / bias)

    def put(self) -> list[str]:
        """Let the averages that have come take effect; return the names of their parameters."""
        averages = {key.removeprefix(_ENTRY): one for key, one in self._averages.items()}
        self._averages = {}
        for name in averages.keys() & self._own.keys():
            kept, bias, _ = self._own[name]
            kept.copy_(averages[name] * bias)
        return [*averages]


_ENTRY = "second moment of "


def entry(name: str) -> str:
    """Return the name under which a parameter's second moment is averaged."""
    return _ENTRY + name


def _queued(averager: Averager, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Queue the exchange of tensors, if there are any; return what becomes their averages."""
    if not parts:
        return {}
    flat, places = end_to_end(parts)
    averager.queue(flat, places)
    return {
        name: flat[start:stop].view(parts[name].shape) for name, (start, stop) in places.items()
    }


def put(local: Tensor, shared: Tensor, keep: float = 0.0) -> None:
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
