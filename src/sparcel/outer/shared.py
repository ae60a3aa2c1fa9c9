"""The parameters that islands share, and by how much an island has moved them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

import torch
from torch import Tensor

from sparcel._checks import all_finite
from sparcel.memory import Range, wide_dtype
from sparcel.outer.method import Method

_CHUNK, _ODD = 1 << 20, 0x1E3779B97F4A7C15
"""How many elements a sum takes at a time, and a number without a pattern in its bits."""

_WORDS = 8
"""Vectors are padded to so many elements, so that they are whole numbers of 64 bits."""


class Vector:
    """Tensors of a model that are exchanged as one vector; all have the same wide dtype.

    Attributes
    ----------
    shared
        Their values after the last outer step, the same on all islands, float32 or float64
        ``[size]``.
    moved
        The pseudo-gradient, ``[size]``: shared less local. Exchanging replaces it by the average.
        Vectors of other fragments use the same memory.
    places
        Where each tensor lies.
    optimized
        How many of the first elements the outer optimiser updates. The rest are buffers, which
        become their average.
    """

    def __init__(
        self, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], moved: Tensor
    ) -> None:
        self._local = {**parameters, **buffers}
        self.places: dict[str, Range] = {}
        end = 0
        for name, tensor in self._local.items():
            self.places[name] = end, end + tensor.numel()
            end += tensor.numel()
        self.optimized = sum(tensor.numel() for tensor in parameters.values())
        self.shared = moved.new_zeros(padded(end))
        self.moved = moved[: padded(end)]
        self.share()

    def view(self, vector: Tensor, name: str) -> Tensor:
        """Return a tensor's elements of a vector, in its shape."""
        start, stop = self.places[name]
        return vector[start:stop].view(self._local[name].shape)

    def share(self) -> None:
        """Let the shared values be this island's."""
        for name, local in self._local.items():
            self.view(self.shared, name).copy_(local)

    def move(self) -> bool:
        """Put the pseudo-gradient into ``moved``; return whether it is finite."""
        self.moved[max((stop for _, stop in self.places.values()), default=0) :] = 0
        for name, local in self._local.items():
            shared = self.view(self.shared, name)
            if local.dtype != shared.dtype:  # what the cast takes off, this island has not moved
                shared = shared.to(local.dtype).to(shared.dtype)
            torch.sub(shared, local, out=self.view(self.moved, name))
        return all_finite(self.moved)

    def put(self, keep: float = 0.0) -> None:
        """Let this island go on with the shared values, and a share of its own."""
        for name, local in self._local.items():
            shared = self.view(self.shared, name).to(local.dtype)
            if keep:
                local.lerp_(shared, 1 - keep)
            else:
                local.copy_(shared)

    def shift(self, before: Tensor) -> None:
        """Move this island's values as the shared ones have moved since ``before``."""
        for name, local in self._local.items():
            local.add_(self.view(self.shared, name) - self.view(before, name))


class Shared:
    """All that islands share, in fragments that take turns.

    Attributes
    ----------
    fragments
        The vectors of each fragment.
    optimizer
        The outer optimiser. Its learning rate may be changed, alike on all islands.
    """

    def __init__(
        self, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], method: Method
    ) -> None:
        dealt = _dealt(parameters, method.fragments)
        everything = (*parameters.values(), *buffers.values())
        dtypes = sorted({wide_dtype(one.dtype) for one in everything}, key=str)
        self.fragments: list[list[Vector]] = [[] for _ in dealt]
        for dtype in dtypes:
            parts = [
                (_of_dtype(part, dtype), _of_dtype(buffers if number == 0 else {}, dtype))
                for number, part in enumerate(dealt)
            ]
            sizes = [sum(one.numel() for group in part for one in group.values()) for part in parts]
            scratch = torch.zeros(padded(max(sizes)), dtype=dtype, device=everything[0].device)
            for fragment, (own, averaged), size in zip(self.fragments, parts, sizes, strict=True):
                if size:
                    fragment.append(Vector(own, averaged, scratch))
        self._leaves = [torch.nn.Parameter(one.shared[: one.optimized]) for one in self.vectors]
        self.optimizer = torch.optim.SGD(
            self._leaves, method.lr, method.momentum, nesterov=method.nesterov, fused=True
        )
        if method.momentum:
            for leaf in self._leaves:
                self.optimizer.state[leaf]["momentum_buffer"] = torch.zeros_like(leaf)
        self._rate = torch.zeros(1, dtype=torch.float64)

    @property
    def vectors(self) -> list[Vector]:
        """The vectors of all fragments."""
        return [vector for fragment in self.fragments for vector in fragment]

    @property
    def momenta(self) -> list[Tensor]:
        """What the outer optimiser remembers of each vector; nothing without momentum."""
        state = self.optimizer.state
        return [state[leaf]["momentum_buffer"] for leaf in self._leaves if state.get(leaf)]

    @property
    def rate(self) -> float:
        """The learning rate of the outer optimiser."""
        return float(self.optimizer.param_groups[0]["lr"])

    @rate.setter
    def rate(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    @property
    def tensors(self) -> list[Tensor]:
        """What makes an outer step on this island the same as on the others; see `received`."""
        self._rate.fill_(self.rate)
        return [*(vector.shared for vector in self.vectors), *self.momenta, self._rate]

    def received(self) -> None:
        """Go on with `tensors`, into which another island's have been copied."""
        self.rate = float(self._rate)

    def by_name(self) -> dict[str, Tensor]:
        """Return the shared values by name."""
        return {
            name: vector.view(vector.shared, name)
            for vector in self.vectors
            for name in vector.places
        }

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the shared values, and the outer momentum, by name."""
        momenta = self.momenta
        for number, vector in enumerate(self.vectors):
            for name, (_, stop) in vector.places.items():
                yield f"shared.{name}", vector.view(vector.shared, name)
                if momenta and stop <= vector.optimized:
                    yield f"momentum.{name}", vector.view(momenta[number], name)

    def step(self, fragment: Sequence[Vector]) -> None:
        """Update the shared values by the averages that have come."""
        for vector, leaf in zip(self.vectors, self._leaves, strict=True):
            chosen = vector in fragment
            leaf.grad = vector.moved[: vector.optimized] if chosen else None
            if chosen:
                vector.shared[vector.optimized :].sub_(vector.moved[vector.optimized :])
        self.optimizer.step()
        for leaf in self._leaves:
            leaf.grad = None

    def digest(self, fragment: Sequence[Vector]) -> int:
        """Return 62 bits that differ, as good as surely, if the shared values of islands do."""
        total = 0
        for vector in fragment:
            for start in range(0, vector.shared.numel(), _CHUNK):
                words = vector.shared[start : start + _CHUNK].view(torch.int64)
                places = torch.arange(words.numel(), device=words.device).add_(start)
                # Each word times an odd number of its place; the shift lets signs count, too.
                mixed = (words ^ (words >> 31)).mul_(places.mul_(2).add_(1).mul_(_ODD))
                total = (total * 31 + int(mixed.sum())) % (1 << 64)
        return total >> 2


def padded(size: int) -> int:
    """Return a multiple of some elements that is at least ``size``."""
    return -(-size // _WORDS) * _WORDS


def _of_dtype(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: one for name, one in tensors.items() if wide_dtype(one.dtype) == dtype}


def _dealt(tensors: Mapping[str, Tensor], fragments: int) -> list[dict[str, Tensor]]:
    """Deal the layers of a model to fragments in turn."""
    hands: list[dict[str, Tensor]] = [{} for _ in range(fragments)]
    for turn, (_, names) in enumerate(groupby(tensors, _layer)):
        hands[turn % fragments].update({name: tensors[name] for name in names})
    return [hand for hand in hands if hand]


def _layer(name: str) -> str:
    """Return the layer of a parameter: an element of a list of modules, or else its module."""
    element = re.match(r"(?:.*?\.)?\d+(?=\.)", name)
    return element[0] if element else name.rpartition(".")[0]
