"""All that islands share of a model, its parameters and buffers, in flat vectors, and its state."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import cast

import torch
from torch import Tensor

from sparcel.core._checks import all_finite, check_type
from sparcel.core.memory import Range, wide_dtype
from sparcel.core.training import Averager, Shard
from sparcel.core.training.layout import end_to_end
from sparcel.errors import InputError
from sparcel.products.outer.method import Method
from sparcel.products.outer.model import Model

_WORDS = 8
"""Vectors are padded to so many elements, so that they are whole numbers of 64 bits."""

_CHUNK, _ODD = 1 << 18, 0x1E3779B97F4A7C15
"""How many words a sum takes at a time, and a number without a pattern in its bits."""

_WAY_OUT = "give what outer.state_dict() returned for the same model and method"


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
            self._averages |= queued(averager, parts)

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
    vectors
        The vectors of all fragments, and of the buffers.
    optimizer
        The outer optimiser. Its learning rate may be changed, alike on all islands.
    """

    def __init__(self, model: Model, method: Method) -> None:
        self.model, self.buffers = model, Buffers(model.buffers)
        scratch: dict[torch.dtype, Tensor] = {}
        self.fragments = [
            [Vector(part, dtype, scratch) for dtype, part in by_dtype(dealt).items()]
            for dealt in _dealt(model.parameters, method.fragments)
        ]
        self._parameters = [vector for fragment in self.fragments for vector in fragment]
        self.vectors = [*self._parameters, *self.buffers.vectors]
        leaves = [vector.shared for vector in self._parameters]
        self.optimizer = torch.optim.SGD(
            leaves, method.lr, method.momentum, nesterov=method.nesterov, fused=True
        )
        if method.momentum:
            for leaf in leaves:
                self.optimizer.state[leaf]["momentum_buffer"] = torch.zeros_like(leaf)
        self._rate = torch.zeros(1, dtype=torch.float64)

    @property
    def device(self) -> torch.device:
        """Where the shared values are."""
        return self.vectors[0].shared.device

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
        momenta = [one for one in map(self._momentum, self.vectors) if one is not None]
        return [*(vector.shared for vector in self.vectors), *momenta, self._rate]

    def received(self) -> None:
        """Go on with `tensors`, into which another island's have been copied."""
        self.rate = float(self._rate)

    def _momentum(self, vector: Vector) -> Tensor | None:
        """Return what the outer optimiser remembers of a vector."""
        state: dict[str, Tensor] = self.optimizer.state.get(vector.shared, {})
        return state.get("momentum_buffer")

    def by_name(self) -> dict[str, Tensor]:
        """Return the shared values by name."""
        return {name: one for vector in self.vectors for name, one in vector.tensors.items()}

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the shared values, and the outer momentum, by name."""
        for vector in self.vectors:
            momentum = self._momentum(vector)
            for name, shared in vector.tensors.items():
                yield f"shared.{name}", shared
                if momentum is not None:
                    yield f"momentum.{name}", vector.view(momentum, name)

    def shifting(self) -> Callable[[], None]:
        """Return what moves this island's values as the shared ones will have moved since now."""
        before = {name: shared.clone() for name, shared in self.by_name().items()}

        def shift() -> None:
            self.model.look()
            for vector in self._parameters:
                for name, shared in vector.tensors.items():
                    self.model.parameters[name].add_(shared - before[name])
            self.model.settle()
            for name, shared, one in self.buffers.changed(self.model.buffers):
                one.add_(shared - before[name])

        return shift

    def put(self, fragment: Sequence[Vector] | None = None, keep: float = 0.0) -> None:
        """Let this island go on with what is shared, but for a share of its own.

        All of it, unless a fragment is given: then that, and the buffers that have been averaged.
        """
        self.model.look()
        for vector in self._parameters if fragment is None else fragment:
            for name, shared in vector.tensors.items():
                put(self.model.parameters[name], shared, keep)
        self.model.settle()
        names = self.buffers.shared if fragment is None else self.buffers.names
        self.buffers.put(self.model.buffers, names, keep)

    def step(self, fragment: Sequence[Vector]) -> None:
        """Update a fragment's shared parameters, and buffers, by the averages that have come."""
        for vector in fragment:
            vector.shared.grad = vector.moved
        self.optimizer.step()
        for vector in fragment:
            vector.shared.grad = None
        self.buffers.step()

    def digest(self, vectors: Sequence[Vector]) -> int:
        """Return 62 bits that differ, as good as surely, if the shared values of islands do.

        Each word counts times an odd number of its place, so that permutations are seen.
        """
        odd, total = torch.arange(_CHUNK, device=self.device).mul_(2).add_(1).mul_(_ODD), 0
        for vector in vectors:
            words, total = vector.shared.view(torch.int64), total * 31
            for start in range(0, words.numel(), _CHUNK):
                mixed = words[start : start + _CHUNK] >> 31  # so that signs are seen, too
                mixed ^= words[start : start + _CHUNK]
                total += int(mixed.sum()) * 2 * start * _ODD
                total += int(mixed.mul_(odd[: mixed.numel()]).sum())
        return (total % (1 << 64)) >> 2


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


def copied(tensors: Iterable[tuple[str, Tensor]], shard: Shard | None) -> dict[str, Tensor]:
    """Return copies of tensors such as ``shared.{name}``, sharded as the parameters are."""
    return {
        key: shard.distributed(name, one.clone().flatten())
        if shard is not None and (name := _name(key)) in shard.tensors
        else one.clone()
        for key, one in tensors
    }


def checked(
    state: Mapping[str, Tensor], expected: Mapping[str, Tensor], shard: Shard | None
) -> dict[str, Tensor]:
    """Return what this rank has of the entries that are expected, in their shapes.

    Raises
    ------
    InputError
        When an entry is missing or does not fit.
    """
    check_type(state, Mapping, "state", _WAY_OUT)
    found: dict[str, Tensor] = {}
    for key, tensor in expected.items():
        if key not in state:
            raise InputError(f"the state has no {key!r}; {_WAY_OUT}")
        entry, name = state[key], _name(key)
        if shard is not None and name in shard.tensors:
            entry = cast("Tensor", shard.local(name, entry)).view(-1)
            tensor = tensor.view(-1)
        if entry.shape != tensor.shape:
            raise InputError(
                f"the state's {key!r} must have shape {list(tensor.shape)}, got"
                f" {list(entry.shape)}; {_WAY_OUT}"
            )
        found[key] = entry.view(expected[key].shape)
    return found


def _name(key: str) -> str:
    return key.partition(".")[2]


def by_dtype(tensors: Mapping[str, Tensor]) -> dict[torch.dtype, dict[str, Tensor]]:
    """Return the tensors of each wide dtype."""
    found: dict[torch.dtype, dict[str, Tensor]] = {}
    for name, one in tensors.items():
        found.setdefault(wide_dtype(one.dtype), {})[name] = one
    return {dtype: found[dtype] for dtype in sorted(found, key=str)}


def put(local: Tensor, shared: Tensor, keep: float = 0.0) -> None:
    """Let a tensor become what is shared, but for a share of its own."""
    if keep:
        local.lerp_(shared.to(local.dtype), 1 - keep)
    else:
        local.copy_(shared)


def queued(averager: Averager, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Queue the exchange of tensors, if there are any; return what becomes their averages."""
    if not parts:
        return {}
    flat, places = end_to_end(parts)
    averager.queue(flat, places)
    return {
        name: flat[start:stop].view(parts[name].shape) for name, (start, stop) in places.items()
    }
