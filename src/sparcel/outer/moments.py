"""Second moments that inner optimisers keep: what they are, and how they become averages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from sparcel._checks import all_finite
from sparcel.memory import Range
from sparcel.outer.vectors import Vector
from sparcel.training import Averager
from sparcel.training.layout import end_to_end

_KEYS = "exp_avg_sq", "square_avg"
"""What Adam and RMSprop, and those made after them, call the mean of squared gradients."""

_REMEMBERED = 0.1
"""How much of an average has to be left when the next one comes, so that it is worth its bytes."""


class Moment(NamedTuple):
    """What an optimiser keeps of a parameter's squared gradients.

    Attributes
    ----------
    kept
        The decaying mean as it is kept.
    bias
        What the optimiser divides it by, because it began with zero.
    decay
        What it is multiplied by in each step.
    """

    kept: Tensor
    bias: float
    decay: float


def moments_of(optimizers: Sequence[Optimizer]) -> dict[Tensor, Moment]:
    """Return the second moments that optimisers keep, by the parameter."""
    found = dict[Tensor, Moment]()
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                state = optimizer.state.get(parameter, {})
                kept = next((state[key] for key in _KEYS if key in state), None)
                if isinstance(kept, Tensor) and kept.shape == parameter.shape:
                    decay, bias = group.get("alpha", 1.0), 1.0
                    if "betas" in group and "step" in state:
                        decay = group["betas"][1]
                        bias -= decay ** float(state["step"])
                    found[parameter] = Moment(kept, bias, decay)
    return found


class Moments:
    """The second moments of a fragment, which become averages in an outer step.

    From few samples an island learns little of how large gradients are: where it has seen none for
    long, the next makes a step that is several times too large. All islands together know more.
    """

    def __init__(self) -> None:
        self._fragment: Sequence[Vector] = ()
        self._own: Mapping[str, Moment] = {}
        self._queued: list[tuple[Tensor, Mapping[str, Range]]] = []

    def move(
        self, fragment: Sequence[Vector], own: Mapping[str, Moment], steps: float = 0.0
    ) -> None:
        """Begin an outer step in which those of a fragment become averages; none without one.

        The next averages come after so many inner steps.
        """
        self._fragment, self._queued = fragment, []
        self._own = {
            name: one
            for name, one in own.items()
            if one.bias and one.decay**steps >= _REMEMBERED and all_finite(one.kept)
        }

    @property
    def flags(self) -> list[bool]:
        """Whether this island brings each of them."""
        return [name in self._own for vector in self._fragment for name in vector.places]

    def queue(self, averager: Averager, share: float, brought: Sequence[bool]) -> None:
        """Queue the exchange of those that all bring who count, each times this island's share."""
        self._queued, flags = [], iter(brought)
        for vector in self._fragment:
            parts = {
                entry(name): self._brings(vector, name, share)
                for name, all_bring in zip(vector.places, flags, strict=False)
                if all_bring
            }
            if parts:
                flat, places = end_to_end(parts)
                averager.queue(flat, places)
                self._queued.append((flat, places))

    def _brings(self, vector: Vector, name: str, share: float) -> Tensor:
        like = vector.view(vector.shared, name)
        if not share:
            return torch.zeros_like(like)
        kept, bias, _ = self._own[name]
        return kept.to(like.dtype) * (share / bias)

    def put(self) -> list[str]:
        """Let the averages that have come take effect; return the names of their parameters."""
        names = list[str]()
        for flat, places in self._queued:
            for key, (start, stop) in places.items():
                name = key.removeprefix(_ENTRY)
                if name in self._own:
                    kept, bias, _ = self._own[name]
                    kept.copy_((flat[start:stop] * bias).view(kept.shape))
                names.append(name)
        self._queued = []
        return names


_ENTRY = "second moment of "


def entry(name: str) -> str:
    """Return the name under which a parameter's second moment is averaged."""
    return _ENTRY + name
