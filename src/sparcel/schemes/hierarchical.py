"""Two levels: dense sums inside a node, any scheme between nodes, on a shard a rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from torch import Tensor

from sparcel import formats
from sparcel.collectives._transfer import decode_from, gather_messages, region_boundaries
from sparcel.collectives.reduce_scatter import reduce_scatter
from sparcel.comm import Communicator
from sparcel.errors import InputError
from sparcel.memory import wide_dtype
from sparcel.schemes.base import Layer, Scheme
from sparcel.stream import SparseStream, concatenate


@dataclass(eq=False)
class Hierarchical(Scheme):
    """Reduce-scatter inside the node, ``inner`` across nodes on the shard, all-gather inside.

    With g ranks a node, the rank at place j of its node serves the j-th of g shards. Memory is the
    inner scheme's, of the shard: what a node, not a rank, keeps back.

    Parameters
    ----------
    inner
        The scheme for the slow links, of which this makes a fresh one. k is counted of the shard.
    ranks_per_node
        How many consecutive ranks form a node; None asks the launcher, then the hostnames.

    Source: CommLib, Algorithm 2 (HiTopKComm), and its 2D-torus all-reduce, which this is with a
    dense inner scheme.
    """

    inner: Scheme
    ranks_per_node: int | None = None
    _layers: Sequence[Layer] = field(default=(), init=False, repr=False)
    _withheld: Sequence[tuple[int, int]] = field(default=(), init=False, repr=False)
    _size: int = field(default=0, init=False, repr=False)
    _shard: tuple[int, int] = field(default=(0, 0), init=False, repr=False)
    _loaded: dict[str, Any] | None = field(default=None, init=False, repr=False)
    """A state of whole vectors, until a step has brought its parts to the ranks they belong to."""

    def __post_init__(self) -> None:
        if not isinstance(self.inner, Scheme):
            raise InputError(f"inner must be a scheme, as sparcel.scheme makes, got {self.inner!r}")
        given = self.ranks_per_node
        if given is not None and not (isinstance(given, int) and given >= 1):
            raise InputError(f"ranks_per_node must be a whole number of at least 1, got {given}")
        self.inner = self.inner.fresh()

    @property
    def memory(self) -> Tensor | None:
        """See `Scheme.memory`; here a copy, zero outside the shard that this rank serves."""
        return self.coordinates().get("memory")

    def filter_at(self, step: int) -> float:
        """See `Scheme.filter_at`."""
        return self.inner.filter_at(step)

    @property
    def remembers(self) -> tuple[str, ...]:
        """See `Scheme.remembers`."""
        return self.inner.remembers

    def prepare(self, comm: Communicator) -> None:
        """See `Scheme.prepare`: connect the ranks of each node, and those of each shard."""
        ranks = comm.grid(self.ranks_per_node)
        self.inner.prepare(ranks.across)

    def reduce(
        self, gradient: Tensor, comm: Communicator, ranks: int | None = None
    ) -> tuple[SparseStream, int]:
        """See `Scheme.reduce`."""
        here = comm.grid(self.ranks_per_node)
        boundaries = region_boundaries(gradient.numel(), here.node.size)
        self._size = gradient.numel()
        self._shard = boundaries[here.node.rank], boundaries[here.node.rank + 1]
        with self.cost.communicating():
            self._bring_loaded(gradient, here.node)
            shard = reduce_scatter(_stream(gradient), here.node).to_dense()
        self._prepare_inner(shard)
        total, divisor = self.inner.reduce(shard, here.across, ranks or comm.size)
        with self.cost.communicating():
            whole = _gather_shards(total, here.node, boundaries)
        return whole, divisor

    def withhold(self, ranges: Sequence[tuple[int, int]]) -> None:
        """See `Scheme.withhold`."""
        self._withheld = ranges

    def divide(self, layers: Sequence[Layer]) -> None:
        """See `Scheme.divide`."""
        self._layers = layers

    def commit(self) -> None:
        """See `Scheme.commit`."""
        super().commit()
        self.inner.finite = self.finite
        self.inner.commit()
        if self.finite:
            self._loaded = None

    def coordinates(self) -> dict[str, Tensor]:
        """See `Scheme.coordinates`; copies, zero outside the shard that this rank serves."""
        if self._loaded is not None:
            return {name: self._loaded[name] for name in self.remembers if name in self._loaded}
        return self.coordinates_in(0, self._size)

    def coordinates_in(self, start: int, stop: int) -> dict[str, Tensor]:
        """See `Scheme.coordinates_in`; copies, zero outside the shard that this rank serves."""
        if self._loaded is not None:
            return super().coordinates_in(start, stop)
        shards = self.inner.coordinates()
        return {name: self._placed(shard, start, stop) for name, shard in shards.items()}

    def state_dict(self) -> dict[str, Any]:
        """See `Scheme.state_dict`."""
        inner = self._loaded or self.inner.state_dict()
        rest = {name: part for name, part in inner.items() if name not in self.remembers}
        return rest | super().state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Scheme.load_state_dict`; all ranks of the next step have loaded, or none."""
        super().load_state_dict(state)
        present = {name: part for name, part in state.items() if part is not None}
        self._loaded = {
            name: part.clone() if isinstance(part, Tensor) else part
            for name, part in present.items()
        }
        parts = [present.pop(name) for name in self.remembers if name in present]
        self._size = max(map(len, parts), default=0)
        self.inner.load_state_dict(present)

    def _check(self, gradient: Tensor) -> None:
        super()._check(gradient)
        remembers = self._loaded is not None or self.inner.memory is not None
        if remembers and self._size not in (0, gradient.numel()):
            raise InputError(
                f"this scheme remembers a vector of {self._size} coordinates, got a gradient of"
                f" {gradient.numel()}; make one scheme for each vector"
            )

    def _agree(self, gradient: Tensor, comm: Communicator) -> None:
        self.inner._agree(gradient, comm)

    def _placed(self, shard: Tensor, start: int, stop: int) -> Tensor:
        """Return the coordinates ``[start, stop)`` of what is the shard, and zero elsewhere."""
        first, last = self._shard
        lower, upper = max(first, start), max(first, start, min(last, stop))
        placed = shard.new_zeros(stop - start)
        placed[lower - start : upper - start] = shard[lower - first : upper - first]
        return placed

    def _bring_loaded(self, gradient: Tensor, node: Communicator) -> None:
        """Give the inner scheme the shard's part of a loaded state, summed over the node."""
        if self._loaded is None:
            return
        state = dict(self._loaded)
        for name in self.remembers:
            part = state.get(name)
            if part is None:  # on this rank; others may have something
                part = gradient.new_zeros(self._size, dtype=wide_dtype(gradient.dtype))
            state[name] = reduce_scatter(SparseStream.from_dense(part), node).to_dense()
        self.inner.load_state_dict(state)

    def _prepare_inner(self, shard: Tensor) -> None:
        """Pass on what concerns the shard of what this scheme was told."""
        first, last = self._shard
        layers = [(max(lo, first) - first, min(hi, last) - first, d) for lo, hi, d in self._layers]
        self.inner.divide([layer for layer in layers if layer[0] < layer[1]])
        # A rank's gradient may be zero where another's of its node is not.
        ranges = [(max(lo, first) - first, min(hi, last) - first) for lo, hi in self._withheld]
        self.inner.withhold([(lo, hi) for lo, hi in ranges if lo < hi and not shard[lo:hi].any()])
        self._withheld = ()
        self.inner.cost = self.cost


def _stream(gradient: Tensor) -> SparseStream:
    """Return the gradient as a dense stream, at the precision of memory and sums."""
    return SparseStream.unchecked(None, gradient.to(wide_dtype(gradient.dtype)), gradient.numel())


def _gather_shards(
    total: SparseStream, node: Communicator, boundaries: Sequence[int]
) -> SparseStream:
    """Join the sums of all shards."""
    at_most = formats.max_bytes(max(hi - lo for lo, hi in pairwise(boundaries)), total.dtype, None)
    messages = gather_messages(formats.encode(total.compact()), node, at_most)
    return concatenate(
        [
            decode_from(rank, message, total.empty_like(hi - lo), node)
            for rank, (message, (lo, hi)) in enumerate(
                zip(messages, pairwise(boundaries), strict=True)
            )
        ]
    )
