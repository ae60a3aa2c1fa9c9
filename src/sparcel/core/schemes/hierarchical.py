"""Two levels: dense sums inside a node, any scheme between nodes, on a shard a rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from sparcel.core import patterns
from sparcel.core._checks import checked_whole
from sparcel.core.collectives.all_reduce import reduce_scatter, sum_regions
from sparcel.core.comm import Communicator
from sparcel.core.formats import Expected
from sparcel.core.memory import emptied, wide_dtype
from sparcel.core.schemes.base import Scheme
from sparcel.core.schemes.dense import wired_dtype
from sparcel.core.schemes.step import Outcome, Request, Step, averaged
from sparcel.core.stream import SparseStream
from sparcel.core.wire import Wire
from sparcel.errors import InputError


@dataclass(eq=False)
class Hierarchical(Scheme):
    """Reduce-scatter inside the node, ``inner`` across nodes on the shard, all-gather inside.

    With g ranks a node, the rank at place j of its node serves the j-th of g shards. The inner
    scheme remembers what the node has kept back of this rank's shard.

    Parameters
    ----------
    inner
        The scheme for the slow links; a fresh one is made. Its densities are shares of the shard.
    ranks_per_node
        How many consecutive ranks form a node. None uses the launcher's variables, or else the
        hostnames.
    wire
        ``"bfloat16"``, ``"float16"`` or ``"float32"``: the dtype in which gradients and averages
        travel inside the node; None for the gradient's own. Sums are float32 or wider. Nobody
        keeps what this rounding takes.

    Source: CommLib, Algorithm 2 (HiTopKComm). With a dense inner scheme this is CommLib's 2D-torus
    all-reduce.
    """

    inner: Scheme
    ranks_per_node: int | None = None
    wire: str | None = None
    _size: int = field(default=0, init=False, repr=False)
    _shard: tuple[int, int] = field(default=(0, 0), init=False, repr=False)
    _loaded: dict[str, Any] | None = field(default=None, init=False, repr=False)
    """A loaded state of whole vectors; the next step gives each rank its shard of it."""

    def __post_init__(self) -> None:
        if not isinstance(self.inner, Scheme):
            raise InputError(f"inner must be a scheme, as sparcel.scheme makes, got {self.inner!r}")
        if self.ranks_per_node is not None:
            self.ranks_per_node = checked_whole(self.ranks_per_node, "ranks_per_node", at_least=1)
        wired_dtype(self.wire, torch.float32)
        self.inner = self.inner.fresh()

    @override
    def __str__(self) -> str:
        nodes = "" if self.ranks_per_node is None else f", ranks_per_node={self.ranks_per_node}"
        wire = "" if self.wire is None else f", wire={self.wire!r}"
        return f"Hierarchical({self.inner}{nodes}{wire})"

    @property
    def memory(self) -> Tensor | None:
        """See `Scheme.memory`; here a copy, zero outside the shard that this rank serves."""
        return self.coordinates().get("memory")

    @property
    @override
    def remembers(self) -> tuple[str, ...]:
        return self.inner.remembers

    @property
    @override
    def holds_back(self) -> bool:
        return self.inner.holds_back

    @property
    @override
    def momentum(self) -> float:
        return self.inner.momentum

    @override
    def connect(self, comm: Communicator) -> None:
        self.inner.connect(comm.grid(self.ranks_per_node).across)

    @override
    def reduce(self, step: Step) -> Outcome:
        gradient, comm, request, _, out = step
        here = comm.grid(self.ranks_per_node)
        node, wired = Wire(here.node), gradient.dtype
        if here.node.size > 1:
            wired = wired_dtype(self.wire, wired)
        boundaries = patterns.cuts(gradient.numel(), here.node.size)
        self._size = gradient.numel()
        self._shard = boundaries[here.node.rank], boundaries[here.node.rank + 1]
        with emptied(gradient, request.apart):  # where a node has one rank, that is the shard
            with request.costs.communicating():
                self._bring_loaded(gradient, here.node)
                shard = sum_regions(gradient, node, wide_dtype(gradient.dtype), wired)
            of_shard = self._of_shard(request, shard, comm)
            inner = self.inner._begin(shard, here.across, of_shard, None, agree=False)
        with request.costs.communicating():
            average = inner.average
            if average.finite is False:
                average = average.void_like()
            if average.dtype != wired:
                average = averaged(average, 1, wired)
            whole = _gather_shards(average, node, boundaries, gradient.dtype, out)
        if out is gradient and whole.indices is not None:
            gradient.zero_()
        return inner._replace(
            average=whole,
            finite=whole.finite,
            coordinates=request.count(gradient.numel()),
            entries=whole.nnz,
            sent_whole=False,
        )

    def _take_effect(self) -> None:
        super()._take_effect()
        self.inner._take_effect()
        self._loaded = None

    def coordinates(self, start: int = 0, stop: int | None = None) -> dict[str, Tensor]:
        """See `Scheme.coordinates`; copies, zero outside the shard that this rank serves."""
        if self._loaded is not None:
            names = [name for name in self.remembers if name in self._loaded]
            return {name: self._loaded[name][start:stop] for name in names}
        stop = self._size if stop is None else stop
        shards = self.inner.coordinates()
        return {name: self._placed(shard, start, stop) for name, shard in shards.items()}

    @override
    def forget(self) -> None:
        self._loaded = None
        self.inner.forget()

    @override
    def state_dict(self) -> dict[str, Any]:
        inner = self._loaded or self.inner.state_dict()
        rest = {name: part for name, part in inner.items() if name not in self.remembers}
        return rest | super().state_dict()

    def _check_state(self, state: Mapping[str, Any]) -> None:
        self.inner._check_state(state)

    def restore(self, state: Mapping[str, Any]) -> None:
        """See `Scheme.restore`; all ranks of the next step have loaded, or none."""
        super().restore(state)
        present = {name: part for name, part in state.items() if part is not None}
        self._loaded = {
            name: part.clone() if isinstance(part, Tensor) else part
            for name, part in present.items()
        }
        parts = [present.pop(name) for name in self.remembers if name in present]
        self._size = max(map(len, parts), default=0)
        self.inner.restore(present)

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
        """Return the coordinates ``[start, stop)`` of the vector, zero outside the shard."""
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
            if part is None:  # other ranks may have loaded something
                part = gradient.new_zeros(self._size, dtype=wide_dtype(gradient.dtype))
            whole = SparseStream.unchecked(None, part, part.numel())
            state[name] = reduce_scatter(whole, Wire(node)).to_dense()
        self.inner.restore(state)

    def _of_shard(self, request: Request, shard: Tensor, comm: Communicator) -> Request:
        """Return the part of a request that concerns the shard of this rank."""
        first, last = self._shard

        def inside(ranges: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
            return [
                (max(lo, first) - first, min(hi, last) - first, *rest)
                for lo, hi, *rest in ranges
                if max(lo, first) < min(hi, last)
            ]

        return replace(
            request,
            layers=inside(request.layers),
            # Where this rank's gradient is zero, that of another rank of the node may not be.
            withheld=[(lo, hi) for lo, hi in inside(request.withheld) if not shard[lo:hi].any()],
            apart=inside(request.apart),
            ranks=request.divisor(comm),
            tensors=(),  # the vector's call names them
        )


def _gather_shards(
    average: SparseStream,
    wire: Wire,
    boundaries: Sequence[int],
    dtype: torch.dtype,
    out: Tensor | None,
) -> SparseStream:
    """Join the averages of all shards in ``dtype``; a dense result is written to ``out``, if given.

    They travel in the dtype that they have.
    """
    expected = [Expected.like(average, size=stop - start) for start, stop in pairwise(boundaries)]
    shards = wire.gather(wire.pack_region(average), expected)
    if average.dtype == dtype:
        return wire.concatenate(shards, out=out)
    whole = wire.concatenate(shards)
    if whole.indices is not None or out is None:
        out = whole.values.to(dtype)
    else:
        out.copy_(whole.values)
    return SparseStream.unchecked(whole.indices, out, whole.size, whole.finite)
