"""Memory keyed by parameter name, whatever buckets DDP lays the gradients out in."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparcel.schemes import Scheme


@dataclass(frozen=True)
class Piece:
    """A parameter's place in the flat gradient of its bucket: elements ``[start, stop)``."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class Vector:
    """The pieces of one bucket that are made sparse, and the scheme that serves the bucket."""

    pieces: tuple[Piece, ...]
    scheme: Scheme


class Residuals:
    """The schemes of all buckets. DDP may rebuild its buckets; memory follows by name.

    Parameters
    ----------
    template
        The scheme whose settings every bucket's scheme gets; all add to its cost.
    """

    def __init__(self, template: Scheme) -> None:
        self._template = template
        self._vectors: dict[str, tuple[Vector, Piece]] = {}
        self._loaded: dict[str, Tensor] = {}
        self.steps = 0

    def vector(self, pieces: tuple[Piece, ...], gradient: Tensor) -> Vector:
        """Return the vector of the bucket with these pieces, their memory brought along."""
        vector, _ = self._vectors.get(pieces[0].name, (None, None))
        if vector is not None and vector.pieces == pieces:
            return vector
        vector = Vector(pieces, self._template.fresh())
        vector.scheme.cost = self._template.cost
        memory = self._join(pieces, gradient)
        vector.scheme.load_state_dict({"steps": self.steps, "memory": memory})
        for piece in pieces:
            self._vectors[piece.name] = (vector, piece)
            self._loaded.pop(piece.name, None)
        return vector

    def of(self, name: str) -> Tensor | None:
        """Return the residual of a parameter, flat, or None while it has none."""
        if name not in self._vectors:
            return self._loaded.get(name)
        vector, piece = self._vectors[name]
        memory = vector.scheme.memory
        return None if memory is None else memory[piece.start : piece.stop]

    def load(self, residuals: dict[str, Tensor], steps: int) -> None:
        """Forget everything, and go on from these residuals by name."""
        self._vectors.clear()
        self._loaded = residuals
        self.steps = steps

    def _join(self, pieces: tuple[Piece, ...], gradient: Tensor) -> Tensor | None:
        residuals = {piece: self.of(piece.name) for piece in pieces}
        if all(residual is None for residual in residuals.values()):
            return None
        wide = wide_dtype(gradient.dtype)
        memory = torch.zeros(gradient.numel(), dtype=wide, device=gradient.device)
        for piece, residual in residuals.items():
            if residual is not None:
                memory[piece.start : piece.stop] = residual
        return memory


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the memory, and of sums, of gradients of ``dtype``."""
    return torch.float64 if dtype == torch.float64 else torch.float32
