"""What two papers tell of times on their clusters, beside what `sparcel plan` predicts for these.

These are tables of docs/records/papers.md. Nothing is measured: the papers' figures are inputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

from benchmarks.pages.tables import table
from sparcel.core.cost import stated_rates
from sparcel.tools.plan import MODELS, Model, PlannedStep, plan

ONE_BUCKET = 1 << 40
"""Bytes of a bucket that holds any model, so that no exchange overlaps with the computation."""


@dataclass(frozen=True)
class Accelerators:
    """ScaleCom's appendix F: accelerators around a parameter server, which train ResNet-50.

    Attributes
    ----------
    ranks, batch
        Accelerators, and samples on each.
    bandwidth
        Of each one's link, bytes a second.
    peak
        FLOPs a second of each.
    """

    ranks: int = 8
    batch: int = 8
    bandwidth: float = 32e9
    peak: float = 100e12

    EFFICIENCY = 0.75
    """Share of the peak that the computation reaches. The paper does not tell it: this one gives
    the share of the communication that it tells, without compression."""

    MEMORY = 1e12
    """Bytes a second of an accelerator's memory, which matter to the work of selecting alone."""

    RATIO = 112
    """Bytes of a gradient in float16 by those of a selection, with float32 values and indices."""

    @property
    def compute_s(self) -> float:
        """Seconds of a forward and a backward pass."""
        return self.batch * MODELS["resnet50"].flops / (self.EFFICIENCY * self.peak)

    @cached_property
    def steps(self) -> dict[str, PlannedStep]:
        """The planned steps by method."""
        rates = stated_rates(
            bandwidth=self.bandwidth, latency_s=0, ranks=self.ranks, memory_bandwidth=self.MEMORY
        )
        planned = plan(
            "resnet50",
            compute_s=self.compute_s,
            density=2 / self.RATIO / 8,
            rates=rates,
            bucket_bytes=ONE_BUCKET,
            topology="parameter-server",
        )
        return {row.method: row for row in planned.rows}

    def step_s(self, method: str, whole: bool) -> float:
        """Return the seconds of a step; with ``whole`` also of selecting and looking ahead."""
        step = self.steps[method]
        return step.step if whole else self.compute_s + step.exchange

    def share(self, method: str) -> float:
        """Return the share of computation and messages that are messages."""
        return 1 - self.compute_s / self.step_s(method, whole=False)

    def gain(self, method: str, whole: bool, over: str = "dense bf16") -> float:
        """Return how many times as fast a step is as with another method."""
        return self.step_s(over, whole) / self.step_s(method, whole)


Claim = tuple[str, str, float, float | None]
"""What the text says, its number, ours of messages alone, and ours with all work."""


@cache
def claims() -> Sequence[Claim]:
    """Return the figures in ScaleCom's appendix F, and ours."""
    few, many = Accelerators(), Accelerators(128)
    wide, many_wide = Accelerators(bandwidth=64e9), Accelerators(128, bandwidth=64e9)
    large, fast = Accelerators(batch=32), Accelerators(peak=300e12)
    fast_large = Accelerators(batch=32, peak=300e12)

    def gain(what: str, theirs: str, on: Accelerators, *method: str) -> Claim:
        name, *over = method
        return what, theirs, *(on.gain(name, whole, *over) for whole in (False, True))

    dense, both = "dense bf16", ("scalecom", "topk")
    faster = few.step_s(dense, False) / wide.step_s(dense, False)
    return [
        ("share of communication, uncompressed", "55 %", few.share(dense), None),
        ("the same, 32 samples instead of 8", "20 %", large.share(dense), None),
        ("share of communication, ScaleCom", "below 3 %", few.share("scalecom"), None),
        ("64 instead of 32 GB/s, uncompressed", "1.35×", faster, None),
        gain("local top-k, 8 workers", "1.92×", few, "topk"),
        gain("local top-k, 128 workers", "1.2×", many, "topk"),
        gain("ScaleCom, 8 workers", "2×", few, "scalecom"),
        gain("ScaleCom, 128 workers", "2×", many, "scalecom"),
        gain("ScaleCom over local top-k, 128 workers", "1.65×", many, *both),
        gain("the same at 64 GB/s", "1.37×", many_wide, *both),
        gain("ScaleCom, 32 samples", "1.23×", large, "scalecom"),
        gain("ScaleCom, 300 TFLOPS", "4.1×", fast, "scalecom"),
        gain("ScaleCom, 300 TFLOPS, 32 samples", "1.75×", fast_large, "scalecom"),
    ]


def claims_table() -> Iterator[str]:
    """Yield the lines of the table of ScaleCom's appendix F."""

    def shown(theirs: str, ours: float | None) -> str:
        if ours is None:
            return ""
        return f"{ours:.2f}×" if theirs.endswith("×") else f"{100 * ours:.1f} %"

    return table(
        ("ScaleCom, appendix F", "the text", "messages alone", "with all work"),
        (
            (what, theirs, shown(theirs, alone), shown(theirs, whole))
            for what, theirs, alone, whole in claims()
        ),
    )


@dataclass(frozen=True)
class Throughput:
    """A row of gTop-k's Table IV: samples a second with dense, top-k and gTop-k exchanges.

    ``batch`` is that of a worker, from Table III.
    """

    model: Model
    batch: int
    dense: float
    topk: float
    gtopk: float

    RANKS = 32
    DENSITY = 0.001
    LATENCY_S = 436e-6
    BANDWIDTH = 4 / 3.6e-8
    """The paper's α and β, measured between two machines (Figure 8): seconds a message, and bytes a
    second, from 3.6·10⁻⁵ ms an element of four bytes."""

    def step(self, throughput: float) -> float:
        """Return the seconds of a step."""
        return self.RANKS * self.batch / throughput

    def exchanges(self, ranks: int = RANKS) -> dict[str, float]:
        """Return the seconds of messages that our exchanges take, by method."""
        rates = stated_rates(bandwidth=self.BANDWIDTH, latency_s=self.LATENCY_S, ranks=ranks)
        planned = plan(
            self.model, compute_s=0, density=self.DENSITY, rates=rates, bucket_bytes=ONE_BUCKET
        )
        return {row.method: row.exchange for row in planned.rows}


CASES = (
    # For CIFAR-10, with layers of 4096 units: the text says that large ones are in VGG-16.
    Throughput(Model("VGG-16", 33_638_218), 128, 403, 2016, 3020),
    Throughput(Model("ResNet-20", 272_474), 128, 9212, 22272, 25280),
    Throughput(Model("AlexNet", 61_100_840), 64, 39, 296, 505),
    Throughput(Model("ResNet-50", 25_557_032), 256, 343, 978, 1251),
)


@cache
def throughputs() -> Sequence[tuple[str, dict[str, float], float, float]]:
    """Return each model, its exchanges, and gTop-k's gain over dense exchanges: theirs and ours.

    A step of gTop-k stands for the computation, which the paper does not tell.
    """
    found = []
    for case in CASES:
        computed, exchanges = case.step(case.gtopk), case.exchanges()
        ours = (computed + exchanges["dense fp32"]) / (computed + exchanges["gtopk"])
        found.append((case.model.name, exchanges, case.gtopk / case.dense, ours))
    return found


def throughput_table() -> Iterator[str]:
    """Yield the lines of gTop-k's Table IV, with steps from its throughputs, and ours."""
    methods = "dense fp32", "topk", "gtopk"
    columns = (
        *("gTop-k, Table IV", "dense step", "top-k", "gTop-k", "our dense exchange"),
        *("top-k", "gTop-k", "gain, theirs", "ours"),
    )
    rows = zip(CASES, throughputs(), strict=True)
    return table(
        columns,
        (
            (
                name,
                *(f"{case.step(one):.2f} s" for one in (case.dense, case.topk, case.gtopk)),
                *(f"{exchanges[method]:.3f} s" for method in methods),
                f"{theirs:.1f}×",
                f"{ours:.1f}×",
            )
            for case, (name, exchanges, theirs, ours) in rows
        ),
    )


@cache
def sums() -> Sequence[tuple[int, Sequence[float], Sequence[float]]]:
    """Return ranks and the seconds of top-k and gTop-k of gTop-k's Figure 9: theirs, and ours.

    Theirs are its Table I: log₂P·α + 2(P − 1)kβ, and 2·log₂P·α + 4k·log₂P·β.
    """
    case = Throughput(Model("25 M", 25_000_000), 1, 1, 1, 1)
    k = case.DENSITY * case.model.parameters
    word_s = 4 / case.BANDWIDTH
    found = []
    for power in range(2, 8):
        ranks = 1 << power
        theirs = (
            power * case.LATENCY_S + 2 * (ranks - 1) * k * word_s,
            2 * power * case.LATENCY_S + 4 * k * power * word_s,
        )
        ours = case.exchanges(ranks)
        found.append((ranks, theirs, (ours["topk"], ours["gtopk"])))
    return found


def sums_table() -> Iterator[str]:
    """Yield the lines of gTop-k's Figure 9, on the left."""
    return table(
        ("P", "top-k, their formula", "ours", "gTop-k, their formula", "ours"),
        (
            (
                str(ranks),
                *(f"{1e3 * one:.1f} ms" for pair in zip(theirs, ours, strict=True) for one in pair),
            )
            for ranks, theirs, ours in sums()
        ),
    )
