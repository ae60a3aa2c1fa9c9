"""Memory keyed by tensor name, whatever vectors the tensors are laid out in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparcel.core.device import read
from sparcel.core.memory import Range, wide_dtype
from sparcel.core.schemes import Layer, Scheme
from sparcel.core.side_stream import used_here
from sparcel.core.training.layout import Layout, Piece, Position, copy_pieces, layers_of, rearranged
from sparcel.core.training.ranks import Ranks

_FIRST_STEPS = 2
"""For how many steps after a checkpoint its layout is used. DDP lays out its vectors anew after the
first step of a process, or after the second."""


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
    joined
        The dtype of the memory if one selection is made over all tensors of a step, which are then
        in one vector. None if a step has several vectors, each with memory of its own dtype.
    layered
        Whether any tensor has a density of its own.

    What is remembered of a tensor has a name and one value per element: the memory, and whatever
    else `Scheme.remembers`. What the memory of an earlier scheme owes is in ``flush`` once the
    scheme of now remembers nothing.
    """

    def __init__(
        self, template: Scheme, joined: torch.dtype | None = None, layered: bool = False
    ) -> None:
        self.template, self._joined, self._layered = template, joined, layered
        self.flush = Flush()
        self._vectors: dict[str, tuple[Vector, Piece]] = {}
        self._loaded: dict[str, dict[str, Tensor]] = {}
        self._loaded_layout: Layout = {}
        self._layout_ends = 0
        self.steps = 0

    @property
    def kinds(self) -> tuple[str, ...]:
        """The names of what is remembered of every tensor."""
        return self.template.remembers

    @property
    def owed_kinds(self) -> tuple[str, ...]:
        """The names of what ranks remember of any tensor, with what some may still have to flush.

        They are the same on all ranks.
        """
        return self.kinds or (("memory",) if self.flush.pending else ())

    @property
    def waits(self) -> bool:
        """Whether coordinates may wait for later steps; else memory holds roundings at most."""
        return self.template.holds_back or self.flush.pending or self._layered

    def dtype_of(self, tensor: Tensor) -> torch.dtype:
        """Return the dtype of the memory of a tensor."""
        return self._joined or wide_dtype(tensor.dtype)

    def vectors(self, pieces: tuple[Piece, ...], gradient: Tensor) -> list[tuple[Vector, Tensor]]:
        """Return the vectors in which to exchange the pieces of a gradient, each with its tensor.

        As a rule this is one vector, whose tensor is ``gradient`` itself. But which coordinates are
        selected depends on a tensor's neighbours, and after a checkpoint a driver may begin with
        others. The first steps therefore select from copies in the loaded layout. A layout of
        several vectors is not used if one selection is made over all tensors.
        """
        others: list[tuple[tuple[Piece, ...], int]] = []
        if self.steps < self._layout_ends:
            others = rearranged(self._loaded_layout, pieces, gradient.numel())
        if not others or (self._joined is not None and len(others) > 1):
            return [(self._vector(pieces, gradient), gradient)]
        found = []
        for moved, size in others:
            flat = gradient.new_zeros(size)
            copy_pieces(gradient, pieces, flat, moved)
            found.append((self._vector(moved, flat), flat))
        return found

    def _vector(self, pieces: tuple[Piece, ...], gradient: Tensor) -> Vector:
        """Return the vector with these pieces; if it is new, bring their memory along."""
        size = gradient.numel()
        vector, _ = self._vectors.get(pieces[0].name, (None, None))
        if vector is not None and (vector.size, vector.pieces) == (size, pieces):
            return vector
        vector = Vector(size, pieces, layers_of(pieces, size), self.template.fresh())
        vector.scheme.restore({"steps": self.steps, **self._join(pieces, gradient)})
        for piece in pieces:
            self._vectors[piece.name] = (vector, piece)
            self._loaded.pop(piece.name, None)
        return vector

    def layout(self) -> Layout:
        """Return where the tensors that are made sparse lay in the last step."""
        if not self._vectors:
            return self._loaded_layout
        numbers: dict[int, int] = {}
        return {
            name: Position(numbers.setdefault(id(vector), len(numbers)), piece.start, vector.size)
            for name, (vector, piece) in self._vectors.items()
        }

    def of(self, name: str) -> dict[str, Tensor]:
        """Return what is remembered of a tensor, flat; nothing before its first step."""
        if name in self.flush.owed:
            return {"memory": self.flush.owed[name]}
        if name not in self._vectors:
            return self._loaded.get(name, {})
        vector, piece = self._vectors[name]
        return vector.scheme.coordinates(piece.start, piece.stop)

    def chosen(self) -> dict[str, str]:
        """Return the method that ``"auto"`` chose last, by tensor; empty for other schemes."""
        chosen = {name: vector.scheme.chosen for name, (vector, _) in self._vectors.items()}
        return {name: method for name, method in chosen.items() if method is not None}

    def commit(self, left: Mapping[str, Tensor], will_owe: bool) -> float:
        """Count a step whose schemes have committed; return what was flushed, as `Flush.commit`."""
        self.steps += 1
        if self.flush.pending:
            return self.flush.commit(left, will_owe)
        self.flush.steps = FLUSH_STEPS
        return 0.0

    def switch(self, template: Scheme) -> None:
        """Go on with another scheme, of the same momentum; what is owed stays owed."""
        self.flush.pending = not template.remembers and bool(self.owed_kinds)
        parts = self._parts()
        self.template, self._loaded_layout = template, self.layout()
        self._replace(parts)

    def lay_out_anew(self, steps: int) -> None:
        """Go on as after so many steps, with fresh vectors; what is owed stays owed."""
        self.steps = steps
        self._replace(self._parts())

    def load(
        self,
        residuals: dict[str, dict[str, Tensor]],
        steps: int,
        layout: Layout,
        flush_steps: int,
    ) -> None:
        """Forget everything, and go on from these residuals by tensor name.

        What the scheme does not remember, such as a velocity without momentum, is passed over, but
        what the memory owes is flushed, in ``flush_steps`` steps; 0 says that no rank owes
        anything. ``layout`` is that of the step before.
        """
        self._loaded_layout, self._layout_ends = layout, steps + _FIRST_STEPS
        self.steps = steps
        self.flush = Flush()
        if flush_steps:
            self.flush.pending, self.flush.steps = not self.kinds, flush_steps
        self._replace(residuals)

    def _parts(self) -> dict[str, dict[str, Tensor]]:
        """Return what is remembered of all tensors."""
        names = {*self._vectors, *self._loaded, *self.flush.owed}
        return {name: self.of(name) for name in names}

    def _replace(self, residuals: dict[str, dict[str, Tensor]]) -> None:
        """Remember these residuals instead of all others."""
        self._vectors.clear()
        self._loaded, self.flush.owed = {}, {}
        for name, parts in residuals.items():
            if self.kinds:
                self._loaded[name] = {kind: parts[kind] for kind in self.kinds if kind in parts}
            elif "memory" in parts:
                self.flush.owed[name] = parts["memory"]

    def _join(self, pieces: tuple[Piece, ...], gradient: Tensor) -> dict[str, Tensor]:
        """Lay out what is remembered of the pieces as the gradient is laid out."""
        wide = wide_dtype(gradient.dtype)
        joined: dict[str, Tensor] = {}
        for piece in pieces:
            for kind, part in self.of(piece.name).items():
                used_here(part)  # it may have been loaded on another stream, and is let go of now
                if kind not in joined:
                    joined[kind] = gradient.new_zeros(gradient.numel(), dtype=wide)
                piece.of(joined[kind]).copy_(part)
        return joined


FLUSH_STEPS = 16
"""Over how many steps memory is flushed."""


class Flush:
    """What is owed, by tensor name, and the steps in which it is paid in equal shares.

    A step adds its share to the gradients that are exchanged. When it takes effect, what the
    gradients have gained is no longer owed. The last step adds all that is left, and frees the
    memory of the tensors that it has added.
    """

    def __init__(self) -> None:
        self.owed: dict[str, Tensor] = {}
        self.pending = False
        """Whether some rank may still have to flush something; the same on all ranks."""
        self.steps = FLUSH_STEPS
        """How many steps are left, or will be needed if nothing is flushed yet; the same on all
        ranks. A rank whose gradients were withheld repeats the last one."""

    def add_to(
        self, vector: Tensor, pieces: Iterable[Piece], withheld: Sequence[Range], scale: float
    ) -> dict[str, Tensor]:
        """Add this step's share, times ``scale``, to the gradients in a flat vector.

        Nothing is added to ``withheld`` ranges, whose updates the driver may throw away. These
        tensors are flushed whole once they take part again.

        Returns
        -------
        dict
            What these tensors owe if the step takes effect. A share that a gradient in half
            precision is too large to gain stays owed.
        """
        left = {}
        for piece in pieces:
            if piece.name in self.owed and piece.place not in withheld:
                owed, gradient = self.owed[piece.name], piece.of(vector)
                rest = gradient.to(owed.dtype, copy=True)
                gradient.add_(owed, alpha=scale / self.steps)
                left[piece.name] = rest.sub_(gradient).div_(scale).add_(owed)
        return left

    def will_owe(self, left: Mapping[str, Tensor], ranks: Ranks) -> bool:
        """Return whether some rank may owe something after this step.

        All ranks call, inside a job, if something is pending. Only the last step asks them.
        """
        if self.steps > 1:
            return True
        kept = len(self.owed.keys() - left.keys())
        return any(ranks.gather("flush", kept))

    def commit(self, left: Mapping[str, Tensor], pending: bool) -> float:
        """Let a step take effect, and return by how much the sum of what is owed shrank, in |x|.

        ``left`` is what `add_to` returned of all vectors, ``pending`` what `will_owe` did. The
        result is NaN where the sum overflows.
        """
        shrunk: list[Tensor] = []
        for name, rest in left.items():
            shrunk.append(self.owed.pop(name).abs().sum())
            if self.steps > 1:
                self.owed[name] = rest
                shrunk.append(-rest.abs().sum())
        self.steps = max(1, self.steps - 1) if pending else FLUSH_STEPS
        self.pending = pending
        return sum(read(torch.stack(shrunk)).tolist()) if shrunk else 0.0
