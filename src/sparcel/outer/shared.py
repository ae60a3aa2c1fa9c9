"""The parameters that islands share, and by how much an island has moved them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby

import torch
from torch import Tensor

from sparcel._checks import all_finite
from sparcel.errors import InputError
from sparcel.memory import Range, wide_dtype
from sparcel.outer.method import Method
from sparcel.outer.model import Model
from sparcel.training import Averager
from sparcel.training.layout import end_to_end

_CHUNK, _ODD = 1 << 20, 0x1E3779B97F4A7C15
"""How many elements a sum takes at a time, and a number without a pattern in its bits."""

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
        self.shared = torch.zeros(padded(end), dtype=dtype, device=device)
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
        self.vectors = [Vector(part, dtype, {}) for dtype, part in _by_dtype(local).items()]
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


class Shared:
    """All that islands share, in fragments that take turns.

    Attributes
    ----------
    model
        This island's model.
    fragments
        The vectors of each fragment of the parameters.
    buffers
        The buffers, which take their turn with the first.
    optimizer
        The outer optimiser. Its learning rate may be changed, alike on all islands.
    """

    def __init__(self, model: Model, method: Method) -> None:
        self.model, self.buffers = model, Buffers(model.buffers)
        scratch: dict[torch.dtype, Tensor] = {}
        self.fragments = [
            [Vector(part, dtype, scratch) for dtype, part in _by_dtype(dealt).items()]
            for dealt in _dealt(model.parameters, method.fragments)
        ]
        self._leaves = [torch.nn.Parameter(one.shared) for one in self._vectors]
        self.optimizer = torch.optim.SGD(
            self._leaves, method.lr, method.momentum, nesterov=method.nesterov, fused=True
        )
        if method.momentum:
            for leaf in self._leaves:
                self.optimizer.state[leaf]["momentum_buffer"] = torch.zeros_like(leaf)
        self._rate = torch.zeros(1, dtype=torch.float64)

    @property
    def device(self) -> torch.device:
        """Where the shared values are."""
        return self._leaves[0].device

    @property
    def _vectors(self) -> list[Vector]:
        return [vector for fragment in self.fragments for vector in fragment]

    @property
    def vectors(self) -> list[Vector]:
        """The vectors of all fragments, and of the buffers."""
        return [*self._vectors, *self.buffers.vectors]

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
        """Yield the shared values, and the outer momentum, by name, of shards flat."""
        momenta = {id(one): other for one, other in zip(self._vectors, self.momenta, strict=False)}
        for vector in self.vectors:
            for name in vector.places:
                yield f"shared.{name}", vector.view(vector.shared, name)
                if (momentum := momenta.get(id(vector))) is not None:
                    yield f"momentum.{name}", vector.view(momentum, name)

    def shifting(self) -> Callable[[], None]:
        """Return what moves this island's values as the shared ones will have moved since now."""
        parameters = [vector.shared.clone() for vector in self._vectors]
        buffers = {name: shared.clone() for name, shared in self.buffers}

        def shift() -> None:
            for vector, before in zip(self._vectors, parameters, strict=True):
                vector.shift(self.model.parameters, before)
            for name, shared, one in self.buffers.changed(self.model.buffers):
                one.add_(shared - buffers[name])

        return shift

    def put(self) -> None:
        """Let this island go on with all that is shared."""
        for vector in self._vectors:
            vector.put(self.model.parameters)
        self.buffers.put_all(self.model.buffers)

    def step(self, fragment: Sequence[Vector]) -> None:
        """Update a fragment's shared parameters, and buffers, by the averages that have come."""
        for vector, leaf in zip(self._vectors, self._leaves, strict=True):
            leaf.grad = vector.moved if vector in fragment else None
        self.optimizer.step()
        for leaf in self._leaves:
            leaf.grad = None
        self.buffers.step()

    def digest(self, vectors: Sequence[Vector]) -> int:
        """Return 62 bits that differ, as good as surely, if the shared values of islands do."""
        total = 0
        for vector in vectors:
            for start in range(0, vector.shared.numel(), _CHUNK):
                words = vector.shared[start : start + _CHUNK].view(torch.int64)
                places = torch.arange(words.numel(), device=words.device).add_(start)
                # Each word times an odd number of its place; the shift lets signs count, too.
                mixed = (words ^ (words >> 31)).mul_(places.mul_(2).add_(1).mul_(_ODD))
                total = (total * 31 + int(mixed.sum())) % (1 << 64)
        return total >> 2


def _put(local: Tensor, shared: Tensor, keep: float = 0.0) -> None:
    """Let a tensor become what is shared, but for a share of its own."""
    if keep:
        local.lerp_(shared.to(local.dtype), 1 - keep)
    else:
        local.copy_(shared)


def padded(size: int) -> int:
    """Return a multiple of some elements that is at least ``size``."""
    return -(-size // _WORDS) * _WORDS


def _by_dtype(tensors: Mapping[str, Tensor]) -> dict[torch.dtype, dict[str, Tensor]]:
    """Return the tensors of each wide dtype."""
    found: dict[torch.dtype, dict[str, Tensor]] = {}
    for name, one in tensors.items():
        found.setdefault(wide_dtype(one.dtype), {})[name] = one
    return {dtype: found[dtype] for dtype in sorted(found, key=str)}


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
