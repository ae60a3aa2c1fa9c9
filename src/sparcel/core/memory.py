"""Memory: the residual that a rank keeps back, so that nothing is lost (error feedback)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparcel.core import kernels
from sparcel.core.device import all_of
from sparcel.core.selectors import Selector
from sparcel.core.stream import SparseStream
from sparcel.errors import InputError

Range = tuple[int, int]
"""Consecutive coordinates ``[start, stop)`` of a vector."""


@dataclass(frozen=True)
class Share:
    """Coordinates ``[start, stop)`` of which a selector takes about ``k``."""

    start: int
    stop: int
    selector: Selector
    k: int

    @property
    def most(self) -> int:
        """The most entries that the selector can take."""
        return self.selector.most(self.k, self.stop - self.start)


class Entering(NamedTuple):
    """What enters a memory in a step.

    Attributes
    ----------
    gradient
        ``[size]``, any float dtype; the same size at every step.
    ranks
        How many ranks there are.
    withheld
        Ranges of which nothing is taken, and where the gradient is zero.
    clear
        Whether the gradient is set to zero as it is read.
    scale
        What the gradient was multiplied by, and is divided by as it enters.
    """

    gradient: Tensor
    ranks: int
    withheld: Sequence[Range] = ()
    clear: bool = False
    scale: float = 1.0


class Memory:
    """A residual and one scratch vector, which change places when a step commits.

    The residual is what the rank owes to later updates. A step computes ``scratch = residual +
    gradient − selected``, to which `keep` adds what an exchange has returned, and leaves the
    residual as it was until `commit`. Both are float32, or float64 for float64 gradients.

    Parameters
    ----------
    momentum
        Unless it is 0, the velocity ``momentum·velocity + gradient`` enters the memory instead of
        the gradient. It is reset to 0 at coordinates that were applied.
        Source: Deep Gradient Compression (Lin et al. 2018), momentum correction and factor
        masking.
    clip
        The largest norm of the average over the ranks. A rank's gradient is scaled down to a norm
        of ``clip·√P`` before it enters the memory; the average then has the norm ``clip`` if the
        ranks' gradients are uncorrelated. Source: the same paper, local gradient clipping, which
        has clip/√P because its gradients are divided by P.

    Attributes
    ----------
    filter
        β of ScaleCom's low-pass filter: a step takes what it sends out of ``β·residual +
        gradient``, and the rest of the residual waits. 1 is no filter. The paper's memory is
        ``β·residual``. Source: ScaleCom, Algorithm 1.
    """

    def __init__(self, momentum: float = 0.0, clip: float | None = None) -> None:
        self.momentum, self.clip, self.filter = momentum, clip, 1.0
        self.residual: Tensor | None = None
        self.velocity: Tensor | None = None
        self._before: Tensor | None = None
        self._scratch: Tensor | None = None
        self._entering: Tensor | None = None
        self._partial: Tensor | None = None
        self._withheld: Sequence[Range] = ()

    def select(self, entering: Entering, shares: Sequence[Share], step: int) -> SparseStream:
        """Take the selectors' choice out of residual + gradient, and leave the rest in scratch.

        Parameters
        ----------
        shares
            What to take of which coordinates; together they cover all.
        step
            How many steps have committed.

        Returns
        -------
        SparseStream
            What to send, sparse. Not finite, and empty, where residual + gradient is not finite.

        Raises
        ------
        InputError
            When the gradient's size or device is not that of the step before.
        """
        with self.entered(entering) as addition:
            streams = [
                share.selector.take(addition.part(share.start, share.stop), share.k, step)
                for share in shares
            ]
        return _joined(streams, shares, entering.gradient.numel())

    def accumulate(self, entering: Entering) -> SparseStream:
        """Leave all of residual + gradient in scratch, and return it as a dense stream.

        The stream shares the scratch's storage. The caller takes out what is sent of it.
        """
        with self.entered(entering) as addition:
            *_, finite = kernels.accumulate_topk(addition, 0)
        scratch = addition.scratch
        return SparseStream.unchecked(None, scratch, scratch.numel(), finite)

    @property
    def kept(self) -> Tensor:
        """What the step keeps back, ``[size]``."""
        assert self._scratch is not None, "kept follows select"
        return self._scratch

    def take(self, indices: Tensor) -> Tensor:
        """Take out what the step keeps back at ``indices`` (``[nnz]``, unique); return it."""
        values = self.kept.index_select(0, indices)
        kernels.scatter(self.kept, indices, torch.zeros_like(values))
        return values

    def keep(self, stream: SparseStream, start: int = 0) -> None:
        """Add a stream of coordinates from ``start`` on to what the step keeps back.

        Sums are limited to the largest finite number, because Inf may not enter memory and the
        other ranks have finished the step already.
        """
        part = self.kept[start : start + stream.size]
        if stream.indices is None:
            saturate(part.add_(stream.values))
        else:
            kernels.add_saturated(part, stream.indices, stream.values)

    def forget_velocity(self, indices: Tensor) -> None:
        """Reset the velocity of these coordinates (``[nnz]``, unique) to 0."""
        assert self._entering is not None, "what enters under momentum is a velocity"
        kernels.scatter(self._entering, indices, self._entering.new_zeros(indices.numel()))

    def dtype(self, gradient: Tensor) -> torch.dtype:
        """Return the dtype of the residual, also of one that a gradient will begin."""
        residual = self.residual
        return wide_dtype(gradient.dtype) if residual is None else residual.dtype

    def commit(self) -> None:
        """Make what the step keeps back the residual."""
        scratch, before, entering = self._scratch, self._before, self._entering
        assert scratch is not None and before is not None, "commit follows select"
        for start, stop in self._withheld:
            saturate(scratch[start:stop].add_(before[start:stop], alpha=self.filter))
            if entering is not None and self.velocity is not None:
                entering[start:stop] = self.velocity[start:stop]
        if self.filter != 1:
            saturate(scratch.add_(before, alpha=1 - self.filter))
        self.residual, self._scratch = scratch, before
        if self.momentum:
            self.velocity, self._entering = entering, self.velocity

    def coordinates(self) -> dict[str, Tensor]:
        """Return the memory and the velocity, ``[size]`` each, by name; not what does not exist."""
        parts = {"memory": self.residual, "velocity": self.velocity}
        return {name: part for name, part in parts.items() if part is not None}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over copies of what `coordinates` returned; forget what is missing or None."""
        memory, velocity = state.get("memory"), state.get("velocity")
        self.residual = None if memory is None else memory.clone()
        self.velocity = velocity.clone() if self.momentum and velocity is not None else None
        self._scratch = self._before = self._entering = None

    def check(self, gradient: Tensor) -> None:
        """Raise `InputError` when the gradient's size or device is not that of the residual."""
        residual = self.residual
        if residual is None:
            return
        if (residual.numel(), residual.device) != (gradient.numel(), gradient.device):
            raise InputError(
                f"this scheme remembers a vector of {residual.numel()} coordinates on"
                f" {residual.device}, got a gradient of {gradient.numel()} on {gradient.device};"
                " make one scheme for each vector"
            )

    def entered(self, entering: Entering) -> AbstractContextManager[kernels.Addition]:
        """Return a block that gets the addition of what enters to the residual.

        Withheld ranges are zero in the block. Whoever adds up leaves in scratch what is kept back.
        """
        gradient, withheld = entering.gradient, entering.withheld
        self.check(gradient)
        before = self.residual
        if before is None:
            before = gradient.new_zeros(gradient.numel(), dtype=wide_dtype(gradient.dtype))
        self._before, self._withheld = before, withheld
        self._scratch = _like(before, self._scratch)
        self._entering = _like(before, self._entering) if self.momentum else None
        return self._without(entering) if withheld else nullcontext(self._addition(entering))

    @contextmanager
    def _without(self, entering: Entering) -> Iterator[kernels.Addition]:
        """Do what `entered` does where ranges are withheld."""
        with ExitStack() as ranges:
            for part in (self._before, self.velocity):
                if part is not None:
                    ranges.enter_context(emptied(part, entering.withheld))
            yield self._addition(entering)

    def _addition(self, one: Entering) -> kernels.Addition:
        before, scratch = self._before, self._scratch
        assert before is not None and scratch is not None, "entered has made them"
        return kernels.Addition(
            before if self.filter == 1 else self._filtered(before),
            one.gradient,
            scratch,
            scale=1 / one.scale if self.clip is None else self._factor(self.clip, one),
            momentum=self.momentum,
            velocity=self.velocity,
            entering=self._entering,
            clear=one.clear,
        )

    def _filtered(self, residual: Tensor) -> Tensor:
        """Return what of the residual takes part in a step."""
        self._partial = _like(residual, self._partial)
        return torch.mul(residual, self.filter, out=self._partial)

    def _factor(self, clip: float, one: Entering) -> float:
        """Return the factor that undoes the gradient's scale and clips it."""
        norm = kernels.norm(one.gradient) / one.scale
        if math.isinf(norm):  # no factor scales it down, so the step is void
            return math.nan
        limit = clip * math.sqrt(one.ranks)
        return (limit / norm if norm > limit else 1.0) / one.scale


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the memory, and of sums, of gradients of ``dtype``."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _joined(streams: Sequence[SparseStream], shares: Sequence[Share], size: int) -> SparseStream:
    """Join the streams of all shares to one stream."""
    if len(streams) == 1:
        return streams[0]
    finite = all_of([stream.finite for stream in streams])
    dtype = kernels.index_dtype(size)
    indices, values = [], []
    for share, stream in zip(shares, streams, strict=True):
        assert stream.indices is not None, "selections are sparse"
        indices.append(stream.indices.to(dtype) + share.start)
        values.append(stream.values)
    joined = SparseStream.unchecked(torch.cat(indices), torch.cat(values), size, finite)
    return joined if finite is not False else joined.empty_like()


@contextmanager
def emptied(vector: Tensor, ranges: Sequence[Range]) -> Iterator[None]:
    """Set ``ranges`` of a vector to zero during the block, and restore them after it."""
    if not ranges:
        yield
        return
    parts = [vector[start:stop] for start, stop in ranges]
    saved = torch.cat(parts)
    torch._foreach_zero_(parts)
    try:
        yield
    finally:
        torch._foreach_copy_(parts, saved.split([part.numel() for part in parts]))


def saturate(sums: Tensor) -> Tensor:
    """Replace infinite numbers by the largest finite ones, in place, and return the tensor."""
    kernels.saturate(sums)
    return sums


def _like(vector: Tensor, kept: Tensor | None) -> Tensor:
    """Return ``kept`` if it is like a vector, else an uninitialised tensor that is."""
    facts = vector.shape, vector.dtype, vector.device
    if kept is not None and (kept.shape, kept.dtype, kept.device) == facts:
        return kept
    return torch.empty_like(vector)
