"""Methods that reproduce papers: settings of the schemes here, and three with own rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from sparcel.core._checks import checked_number, checked_whole
from sparcel.core.collectives.all_reduce import split_allgather
from sparcel.core.collectives.broadcast import broadcast
from sparcel.core.collectives.doubling import halving_doubling
from sparcel.core.comm import Communicator
from sparcel.core.formats import Expected, FewBits, Format
from sparcel.core.schemes.base import Scheme
from sparcel.core.schemes.dense import Dense
from sparcel.core.schemes.hierarchical import Hierarchical
from sparcel.core.schemes.selecting import Selecting, TopK, exchange_topk
from sparcel.core.schemes.sparsifier import entering
from sparcel.core.schemes.step import Selection, Step
from sparcel.core.selectors import Selector
from sparcel.core.stream import SparseStream
from sparcel.core.wire import Wire
from sparcel.errors import InputError, checked_name


def hitopk(
    density: float = 0.01,
    selector: str | Selector = "exact",
    ranks_per_node: int | None = None,
    warmup: Sequence[float] = (),
    warmup_steps: int | None = None,
    format: str | Format = "raw",
    wire: str | None = None,
) -> Scheme:
    """HiTopKComm: dense sums inside the node, top-k and all-gather across nodes.

    The paper selects with ``selector="mstopk"``. ``wire`` is the dtype of what travels inside the
    node, and ``format`` the format of what travels across. Source: CommLib, Algorithm 2.
    """
    inner = TopK(
        density, warmup, warmup_steps, format=format, selector=selector, algorithm="allgather"
    )
    return Hierarchical(inner, ranks_per_node, wire)


def torus2d(ranks_per_node: int | None = None, wire: str | None = None) -> Scheme:
    """2D-torus all-reduce: dense sums inside the node, across nodes, inside the node again.

    ``wire`` is the dtype of what travels, inside nodes and across. Source: CommLib, section 5.3
    (2DTAR), after Mikami et al. and Cho et al.
    """
    return Hierarchical(Dense(wire), ranks_per_node, wire)


def mstopk(
    density: float = 0.01,
    warmup: Sequence[float] = (),
    warmup_steps: int | None = None,
    format: str | Format = "raw",
) -> Scheme:
    """All-gather of MSTopK's selections. Source: CommLib, Algorithm 1 and section 5.5."""
    return TopK(
        density, warmup, warmup_steps, format=format, selector="mstopk", algorithm="allgather"
    )


def dgc(
    density: float = 0.001,
    momentum: float = 0.9,
    clip: float | None = None,
    warmup: Sequence[float] = (),
    warmup_steps: int | None = None,
    format: str | Format = "raw",
) -> Scheme:
    """Deep Gradient Compression: momentum correction, clipping, warm-up.

    It has a momentum of 0.9 unless another is given, so the optimiser must have none for the
    parameters that are made sparse: see `Sparsifier`. The paper warms up with
    ``[0.25, 0.0625, 0.015625, 0.004]``, an epoch each, and estimates the threshold of a selection
    from a sample. Here selections are exact, which takes less time on CPUs.
    Source: Lin et al. 2018.
    """
    return TopK(density, warmup, warmup_steps, momentum, clip, format, algorithm="allgather")


@dataclass(eq=False)
class SparCML(Selecting):
    """The sum of the ranks' top-k selections, in few bits; without ``bits``, `TopK`.

    Parameters
    ----------
    bits
        2 to 8: values travel in so many bits, rounded at random and without bias, with one
        float32 scale for 512 of them (QSGD), by split and all-gather: those that each rank
        selected, and their sum. Section 6 of the paper rounds the sum alone, where that is dense.
        Who rounds keeps the rounding error in its memory; the paper drops it. With 2 bits the
        errors exceed the values, and the memory grows to many times its size.
        The formats of `Selecting`, which round to nearest and have a scale for 64 values, train
        better. None: `Selecting`'s ``format``.
    seed
        Decides the random rounding, with the step, the rank and the value's position; the same on
        all ranks. By default 0; refused without ``bits``.

    The others are those of `Selecting`.
    Source: SparCML, Algorithm 1 and sections 6 and 8.3. Deviations: ranks select the largest of
    the whole vector; ``selector="bucketed"`` is that of the paper's experiments, the largest of
    every 512 coordinates, which spreads the entries evenly, takes longer, and trains worse. The
    memory holds gradients, where Algorithm 1 accumulates them times the learning rate.
    """

    bits: int | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.seed is not None:
            self.seed = checked_whole(self.seed, "seed")
        if self.bits is not None:
            self.bits, self.seed = checked_whole(self.bits, "bits"), self.seed or 0
            if self.format not in (Format(), _paper_format(self.bits, self.seed)):
                raise InputError(
                    f"bits={self.bits} is a format of its own; leave out bits, or format"
                )
            self.format = _paper_format(self.bits, self.seed)
        elif self.seed is not None:
            raise InputError(
                f"seed={self.seed} decides the rounding to few bits, and needs bits; pass bits=4,"
                " or leave out seed"
            )

    def _exchange(self, selection: Selection, wire: Wire) -> SparseStream:
        if self.bits is None:
            return exchange_topk(selection, wire)
        return split_allgather(selection.sent, wire, max_nnz=selection.most)


def _paper_format(bits: int, seed: int) -> Format:
    """Return the format of SparCML's experiments."""
    return Format("raw", FewBits(bits, 512, "float32", stochastic=True, seed=seed))


@dataclass(eq=False)
class SparseLoCo(Selecting):
    """Every rank gets all selections, and divides each coordinate by how many ranks sent it.

    A selection whose norm is above the median of all is scaled down to it; what that takes off
    stays in the rank's memory. A rank whose selection is all zero has sent nothing. Bytes grow with
    the ranks. The parameters are those of `Selecting`.
    Source: the code that accompanies Sarfi et al. 2025, SparseLoCo.
    """

    def _exchange(self, selection: Selection, wire: Wire) -> SparseStream:
        size = selection.sent.size
        packet = wire.pack(selection.sent)
        expected = [Expected.like(packet.stream, selection.most, stays_sparse=True)] * wire.size
        streams = wire.gather(packet, expected)
        finite = all(stream.finite for stream in streams)
        total, counts = packet.stream.values.new_zeros(2, size)
        for rank, (stream, factor) in enumerate(zip(streams, _factors(streams), strict=True)):
            if not factor:
                continue
            if stream.indices is None:
                total.add_(stream.values, alpha=factor)
                counts.add_(1)
            else:
                places = stream.indices.long()
                total.index_add_(0, places, stream.values, alpha=factor)
                counts.index_add_(0, places, torch.ones_like(stream.values))
            if rank == wire.rank and factor < 1:
                clipped = stream.values * (1 - factor)
                selection.put_back(
                    SparseStream.unchecked(stream.indices, clipped, size, stream.finite)
                )
        total.mul_(wire.size).div_(counts.clamp_(min=1))
        return SparseStream.unchecked(None, total, size, finite)


def _factors(streams: list[SparseStream]) -> list[float]:
    """Return by what each selection is scaled so that no norm is above the median; 0 for zeros."""
    norms: Tensor = torch.stack([torch.linalg.vector_norm(one.values) for one in streams])
    if not norms.any():
        return [0.0] * len(streams)
    limit = norms[norms != 0].quantile(0.5)
    return (limit / norms).clamp(max=1).where(norms != 0, 0).tolist()


@dataclass(eq=False)
class ScaleCom(Selecting):
    """The sum of all ranks' values at the coordinates that the step's leader selects (CLT-k).

    Ranks lead in turns. The bytes that a rank receives do not grow with the number of ranks.

    Parameters
    ----------
    beta
        The memory's low-pass filter, in (0, 1]; 1 is no filter. The paper uses 0.1 for large
        batches.
    beta_steps
        The step from which β is 1, as in the late part of the paper's training; None: never.
        Refused if ``beta`` is 1.
    beta_switch
        What stays the same when β becomes 1. ``"owed"``, the default: what is owed, which is the
        memory here and the paper's memory over β. ``"memory"``: the paper's memory, so what is owed
        is multiplied by β. Refused without ``beta_steps``.

    The others are those of `Selecting`.
    Source: ScaleCom, Algorithm 1 and section 4. Deviation: the leader selects the largest of the
    whole vector; ``selector="chunkwise"`` is the paper's, which takes one from each chunk.
    """

    selector: str | Selector = "exact"
    beta: float = 1.0
    beta_steps: int | None = None
    beta_switch: str | None = None

    def __post_init__(self) -> None:
        self.beta = checked_number(self.beta, "beta", above=0, at_most=1, hint="1 filters nothing")
        if self.beta_steps is not None:
            self.beta_steps = checked_whole(self.beta_steps, "beta_steps", at_least=1)
            if self.beta == 1:
                raise InputError(
                    f"beta_steps={self.beta_steps} ends the filter, but beta=1 filters nothing;"
                    " pass beta below 1, or leave out beta_steps"
                )
            if self.beta_switch is None:
                self.beta_switch = "owed"
        if self.beta_switch is not None:
            checked_name(self.beta_switch, ["owed", "memory"], "beta_switch")
            if self.beta_steps is None:
                raise InputError(
                    f"beta_switch={self.beta_switch!r} says what stays the same when beta becomes"
                    " 1, and needs beta_steps; pass beta below 1 and beta_steps, or leave out"
                    " beta_switch"
                )
        super().__post_init__()
        self._set_filter()

    @override
    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore(state)
        self._set_filter()

    def _take_effect(self) -> None:
        before = self._memory.filter
        super()._take_effect()
        self._set_filter()
        if self.beta_switch == "memory" and self._memory.filter != before:
            assert self.memory is not None, "the step made it"
            self.memory.mul_(before)

    def _set_filter(self) -> None:
        """Filter the memory by β until ``beta_steps``."""
        ends = self.beta_steps is not None and self.steps >= self.beta_steps
        self._memory.filter = 1.0 if ends else self.beta

    def _take(self, step: Step) -> SparseStream:
        """Select, on the leader; the others learn in the exchange what to take."""
        if step.comm.rank == self._leader(step.comm):
            return super()._take(step)
        own = entering(step, clear=step.out is step.gradient)
        return self._memory.accumulate(own).empty_like()

    def _exchange(self, selection: Selection, wire: Wire) -> SparseStream:
        own, leader, indices = selection.sent, self._leader(wire), None
        if wire.rank == leader:  # they travel without values, as rows of width 0
            rows = own.values.new_empty(own.nnz, 0)
            indices = SparseStream.unchecked(own.indices, rows, own.size, own.finite)
        expected = Expected(own.size, own.dtype, 0, selection.most, stays_sparse=True)
        chosen = broadcast(indices, wire.exact, leader, expected)
        if not chosen.finite:
            return own.void_like()
        assert chosen.indices is not None, "the leader selects"
        if wire.rank != leader:
            selection.take(chosen.indices)
        values = selection.sent.values
        sums = halving_doubling(
            SparseStream.unchecked(None, values, values.numel(), own.finite), wire
        )
        for start, lost in wire.take_lost():
            places = chosen.indices[start : start + lost.size]
            selection.put_back(SparseStream.unchecked(places, lost.values, chosen.size))
        return SparseStream.unchecked(chosen.indices, sums.values, chosen.size, sums.finite)

    def _leader(self, ranks: Communicator | Wire) -> int:
        return self.steps % ranks.size
