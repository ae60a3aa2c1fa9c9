"""All that islands share of a model, in fragments that take turns."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby

import torch
from torch import Tensor

from sparcel.outer.method import Method
from sparcel.outer.model import Model
from sparcel.outer.vectors import Buffers, Vector, by_dtype

_CHUNK, _ODD = 1 << 18, 0x1E3779B97F4A7C15
"""How many words a sum takes at a time, and a number without a pattern in its bits."""


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
            [Vector(part, dtype, scratch) for dtype, part in by_dtype(dealt).items()]
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
        """Yield the shared values, and the outer momentum, by name."""
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
            self.model.settle()
            for name, shared, one in self.buffers.changed(self.model.buffers):
                one.add_(shared - buffers[name])

        return shift

    def put(self) -> None:
        """Let this island go on with all that is shared."""
        for vector in self._vectors:
            vector.put(self.model.parameters)
        self.model.settle()
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
