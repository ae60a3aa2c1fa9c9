"""Steps of the two exchanges on the simulated cluster, compiled or by definition."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple
from unittest.mock import patch

import torch
from hypothesis import strategies as st
from torch import Tensor

import sparcel
from sparcel import simulate
from sparcel.core import kernels
from sparcel.core.comm import SimulatedCommunicator
from sparcel.core.formats import FewBits, Format
from sparcel.core.kernels.definitions import regions
from sparcel.core.schemes import Bidirectional, Costs, Request
from tests.kernels.paths import Case, isas, using

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""The gradients that compiled passes take."""

FORMATS = (
    *(f"packed:{bits}" for bits in range(2, 9)),
    *(Format("packed", FewBits(4, block)) for block in (8, 16, 32)),
    *(Format("packed", FewBits(2, block)) for block in (8, 32)),
)

KINDS = (
    *("normal", "cauchy", "few values", "all equal", "zeros", "mostly zero", "signed zeros"),
    *("denormals", "extremes", "huge beside zeros", "ascending", "bunched"),
)

SIZES = [
    *(0, 1, 2, 5, 63, 64, 65, 127, 129, 200, 511, 513, 777, 1023, 1024, 1025, 2047, 3000, 4097),
    *(9_999, 32_768, 32_831, 70_001),
]


@dataclass(frozen=True)
class Steps:
    """A recipe for some steps; Hypothesis prints it better than their vectors."""

    ranks: int
    size: int
    dtype: torch.dtype = torch.float32
    kind: str = "normal"
    density: float = 0.1
    returned: float | None = None
    format: str | Format = "packed:4"
    scale: float = 1.0
    clip: float | None = None
    layers: tuple[tuple[int, int, float | None], ...] = ()
    withheld: tuple[tuple[int, int], ...] = ()
    apart: tuple[tuple[int, int], ...] = ()
    isa: str = "portable"
    threads: int = 1
    seed: int = 0
    steps: int = 2
    answer: str | Format | None = None

    def gradient(self, rank: int, step: int) -> Tensor:
        """Return a rank's gradient of a step; it is 0 in what is withheld."""
        seed = self.seed + 100 * step + rank
        gradient = Case(self.kind, self.size, self.dtype, seed).vector()
        if rank == 0:
            for start, stop in self.withheld:
                gradient[start:stop] = 0
        return gradient

    def request(self, rank: int) -> Request:
        """Return a rank's request; only the first rank withholds."""
        withheld = self.withheld if rank == 0 else ()
        return Request(self.layers, withheld, self.apart, scale=self.scale)

    def scheme(self) -> Bidirectional:
        """Return the scheme of a rank."""
        made = sparcel.scheme(
            "bidirectional",
            density=self.density,
            returned=self.returned,
            format=self.format,
            answer=self.answer,
            clip=self.clip,
        )
        assert isinstance(made, Bidirectional)
        return made

    def plain(self) -> Steps:
        """Return the steps with the plainest code."""
        return replace(self, isa="portable", threads=1)


class Found(NamedTuple):
    """What a rank has after its steps."""

    updates: list[Tensor]
    memories: list[Tensor | None]
    costs: Costs
    traffic: tuple[int, int, int]
    messages: list[list[Tensor]]
    """Of each exchange what it sent, by destination."""


def run(case: Steps, compiled: bool = True, stream: bool = False) -> list[Found]:
    """Do the steps; every rank's are compiled, or none."""

    def on_rank(comm: SimulatedCommunicator) -> Found:
        torch.set_num_threads(case.threads)  # simulated ranks have one unless told
        scheme, request = case.scheme(), case.request(comm.rank)
        updates, memories = [], []
        for step in range(case.steps):
            gradient = case.gradient(comm.rank, step)
            if stream:
                made = scheme.step_stream(gradient, comm, request)
                void = torch.full_like(gradient, torch.nan)
                updates.append(made.to_dense() if made.finite else void)
            else:
                updates.append(scheme.step(gradient, comm, request=request))
            memories.append(None if scheme.memory is None else scheme.memory.clone())
        one = comm.traffic
        traffic = (one.bytes_sent, one.bytes_received, one.messages_sent)
        return Found(updates, memories, request.costs, traffic, recorded[comm.rank])

    recorded: dict[int, list[list[Tensor]]] = {rank: [] for rank in range(case.ranks)}
    exchange = SimulatedCommunicator.exchange_parts

    def recording(self: SimulatedCommunicator, sends, *rest):  # type: ignore[no-untyped-def]
        parts = [torch.cat([part.clone() for part in sends[rank]]) for rank in sorted(sends)]
        recorded[self.rank].append(parts)
        return exchange(self, sends, *rest)

    with (
        using(case.isa),
        passes(compiled),
        patch.object(SimulatedCommunicator, "exchange_parts", recording),
    ):
        return list(simulate(case.ranks, on_rank).results)


@contextmanager
def passes(compiled: bool) -> Iterator[None]:
    """Do all steps with compiled passes, or all with their definition."""
    with ExitStack() as patches:
        for name in ("enter", "collect", "deliver"):
            definition = getattr(regions, name)
            if compiled:
                wrong = AssertionError("not compiled")
                patches.enter_context(patch.object(regions, name, side_effect=wrong))
            else:
                patches.enter_context(patch.object(kernels, name, definition))
        yield


@st.composite
def ranges(draw: st.DrawFn, size: int) -> Sequence[tuple[int, int]]:
    """Draw ranges of a vector that follow each other and cover it."""
    inner = draw(st.sets(st.integers(1, size - 1), max_size=4)) if size > 1 else ()
    stops = [*sorted(inner), size]
    return list(zip([0, *stops[:-1]], stops, strict=True))


@st.composite
def cases(draw: st.DrawFn, kinds: Sequence[str] = KINDS) -> Steps:
    """Draw steps."""
    ranks = draw(st.sampled_from([1, 2, 2, 3, 3, 4, 5, 8, 17]))
    size = draw(st.sampled_from(SIZES) | st.integers(0, 3000))
    density = draw(st.sampled_from([0.001, 0.01, 0.1, 0.1, 0.3, 0.9]))
    layers: tuple[tuple[int, int, float | None], ...] = ()
    if draw(st.booleans()):
        own = st.sampled_from([None, 0.01, 0.4, 1.0])
        layers = tuple((start, stop, draw(own)) for start, stop in draw(ranges(size)))
    some = st.sampled_from([(), ((size // 3, size // 2),), ((0, size // 7), (size // 2, size))])
    return Steps(
        ranks,
        size,
        draw(st.sampled_from(DTYPES)),
        draw(st.sampled_from(kinds)),
        density,
        draw(st.sampled_from([None, density, (1 + density) / 2, 1])),
        draw(st.sampled_from(FORMATS)),
        draw(st.sampled_from([1.0, 1.0, 1024.0, 0.3])),
        draw(st.sampled_from([None, None, 1e-3, 5.0])),
        layers,
        draw(some),
        draw(some),
        draw(isas),
        draw(st.sampled_from([1, 2])),
        draw(st.integers(0, 99)),
        answer=draw(st.sampled_from([None, *FORMATS])),
    )
