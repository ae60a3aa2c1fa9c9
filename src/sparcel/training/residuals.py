"""Memory keyed by tensor name, whatever vectors the tensors are laid out in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

from sparcel.memory import wide_dtype
from sparcel.schemes import Auto, Layer, Scheme, filter_of


@dataclass(frozen=True)
class Piece:
    """A tensor's place in a flat vector: elements ``[start, stop)``.

    ``density`` is the tensor's own, or None for that of the scheme.
    """

    name: str
    start: int
    stop: int
    density: float | None = None


@dataclass(frozen=True)
class Vector:
    """A flat vector: the pieces that are made sparse, their layers, and the scheme that does it."""

    size: int
    pieces: tuple[Piece, ...]
    layers: Sequence[Layer]
    scheme: Scheme


class Residuals:
    """The schemes of all vectors. Tensors may change their places; memory follows by name.

    Parameters
    ----------
    template
        The scheme whose settings every vector's scheme gets.

    What is remembered of a tensor has a name and one value per element: the memory, and whatever
    else `Scheme.remembers`.
    """

    def __init__(self, template: Scheme) -> None:
        self.template = template
        self._vectors: dict[str, tuple[Vector, Piece]] = {}
        self._loaded: dict[str, dict[str, Tensor]] = {}
        self.steps = 0

    @property
    def filter(self) -> float:
        """The memory's low-pass filter β; 1 is none."""
        return filter_of(self.template, self.steps)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The names of what is remembered of every tensor."""
        return self.template.remembers

    def vector(self, pieces: tuple[Piece, ...], gradient: Tensor) -> Vector:
        """Return the vector with these pieces; if it is new, bring their memory along."""
        size = gradient.numel()
        vector, _ = self._vectors.get(pieces[0].name, (None, None))
        if vector is not None and (vector.size, vector.pieces) == (size, pieces):
            return vector
        vector = Vector(size, pieces, _layers(pieces, size), self.template.fresh())
        vector.scheme.load_state_dict(
            {"steps": self.steps, "memory": None, **self._join(pieces, gradient)}
        )
        for piece in pieces:
            self._vectors[piece.name] = (vector, piece)
            self._loaded.pop(piece.name, None)
        return vector

    def of(self, name: str) -> dict[str, Tensor]:
        """Return what is remembered of a tensor, flat; nothing before its first step."""
        if name not in self._vectors:
            return self._loaded.get(name, {})
        vector, piece = self._vectors[name]
        return vector.scheme.coordinates(piece.start, piece.stop)

    def chosen(self) -> dict[str, str]:
        """Return the method that ``"auto"`` chose last, by tensor; empty for other schemes."""
        schemes = {name: vector.scheme for name, (vector, _) in self._vectors.items()}
        return {
            name: scheme.chosen
            for name, scheme in schemes.items()
            if isinstance(scheme, Auto) and scheme.chosen is not None
        }

    def load(
        self, residuals: dict[str, dict[str, Tensor]], steps: int, beta: float | None = None
    ) -> None:
        """Forget everything, and go on from these residuals by tensor name.

        What the scheme does not remember, such as a velocity without momentum, is passed over.
        ``beta`` is the filter that the residuals were saved under.
        """
        self._vectors.clear()
        self._loaded = {
            name: {kind: part for kind, part in parts.items() if kind in self.kinds}
            for name, parts in residuals.items()
        }
        self.steps = steps
        if beta is not None and beta != self.filter:  # memory/β, which is owed, stays the same
            for parts in self._loaded.values():
                parts["memory"] = parts["memory"] * (self.filter / beta)

    def _join(self, pieces: tuple[Piece, ...], gradient: Tensor) -> dict[str, Tensor]:
        """Lay out what is remembered of the pieces as the gradient is laid out."""
        wide = wide_dtype(gradient.dtype)
        joined: dict[str, Tensor] = {}
        for piece in pieces:
            for kind, part in self.of(piece.name).items():
                if kind not in joined:
                    joined[kind] = gradient.new_zeros(gradient.numel(), dtype=wide)
                joined[kind][piece.start : piece.stop] = part
        return joined


def _layers(pieces: Sequence[Piece], size: int) -> list[Layer]:
    """Return the layers of a vector, none if no tensor has a density of its own.

    Small tensors between two pieces are exchanged separately. Their slots are zero here and count
    as part of the preceding piece.
    """
    if all(piece.density is None for piece in pieces):
        return []
    ordered = sorted(pieces, key=lambda piece: piece.start)
    starts = [0, *(piece.start for piece in ordered[1:]), size]
    return [
        (start, stop, piece.density)
        for piece, (start, stop) in zip(ordered, pairwise(starts), strict=True)
    ]
