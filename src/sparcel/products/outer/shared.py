"""All that islands share of a model, in fragments that take turns, and how it is saved."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import cast

import torch
from torch import Tensor

from sparcel.core._checks import check_type
from sparcel.core.training import Shard
from sparcel.errors import InputError
from sparcel.products.outer.method import Method
from sparcel.products.outer.model import Model
from sparcel.products.outer.vectors import Buffers, Vector, by_dtype, put

_CHUNK, _ODD = 1 << 18, 0x1E3779B97F4A7C15
"""How many words a sum takes at a time, and a number without a pattern in its bits."""

_WAY_OUT = "give what outer.state_dict() returned for the same model and method"


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


def of_rank(memory: Mapping[str, Tensor], rank: int, size: int) -> dict[str, Tensor]:
    """Return an averager's state of one rank as that of another, of so many."""
    renamed = {
        re.sub(r"^(rank|velocity)\d+\.", rf"\g<1>{rank}.", name): tensor
        for name, tensor in memory.items()
    }
    return {**renamed, "world_size": torch.tensor(size)}


def _name(key: str) -> str:
    return key.partition(".")[2]
