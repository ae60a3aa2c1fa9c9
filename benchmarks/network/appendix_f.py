"""ScaleCom's appendix F: what compression brings on accelerators around a parameter server.

    python -m benchmarks.network.appendix_f

prints the table of docs/how-to/choose.md and draws figures A8 and A9 for it.
The paper's model is a framework of its authors' ([35] there). Its inputs are in the text, and so
are some of its results; here the same is computed from the inputs alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.pages.tables import save, subplots, table
from sparcel.plan import MODELS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RANKS = (8, 16, 32, 64, 128)
BANDWIDTHS = {"32 GB/s (PCIe Gen4)": 32e9, "64 GB/s (PCIe Gen5)": 64e9}
SCHEMES = ("none", "local top-k", "ScaleCom")
RATIO = 112.0
"""Compression of both schemes, as the paper assumes: bytes before by bytes after."""

_VALUE_BYTES = 2
"""The accelerators are rated in FP16."""

EFFICIENCY = 0.75
"""Share of the peak that computation reaches, which the paper does not tell: with it, waiting takes
the 55 % of a step that it says."""


@dataclass(frozen=True)
class System:
    """A number of accelerators, each with a link to the server; ResNet-50.

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

    @property
    def compute_s(self) -> float:
        """Seconds of a forward and a backward pass."""
        return self.batch * MODELS["resnet50"].flops / (EFFICIENCY * self.peak)

    def communicate_s(self, scheme: str) -> float:
        """Return the seconds that gradients take to the server, and their sum takes back.

        ``"local top-k"`` gets back what all ranks sent, one after the other, since each may have
        sent other coordinates; ``"ScaleCom"`` as much as one rank sent, and sends indices ahead.
        """
        whole = MODELS["resnet50"].parameters * _VALUE_BYTES
        up, down = {
            "none": (1.0, 1.0),
            "local top-k": (1 / RATIO, self.ranks / RATIO),
            "ScaleCom": (2 / RATIO, 1 / RATIO),
        }[scheme]
        return (up + down) * whole / self.bandwidth

    def step_s(self, scheme: str) -> float:
        """Return the seconds of a step, nothing of which overlaps."""
        return self.compute_s + self.communicate_s(scheme)

    def share(self, scheme: str) -> float:
        """Return the share of a step that is communication."""
        return self.communicate_s(scheme) / self.step_s(scheme)

    def gain(self, scheme: str, over: str = "none") -> float:
        """Return how many times as fast a step is as with another scheme."""
        return self.step_s(over) / self.step_s(scheme)


def claims() -> list[tuple[str, str, float]]:
    """Return what the text says, its number, and ours."""
    few, many = System(8), System(128)
    wide, many_wide = System(8, bandwidth=64e9), System(128, bandwidth=64e9)
    large, fast, fast_large = System(8, 32), System(8, peak=300e12), System(8, 32, peak=300e12)
    return [
        ("communication, no compression, 8 a worker", "55–56 %", 100 * few.share("none")),
        ("communication, no compression, 32 a worker", "20 %", 100 * large.share("none")),
        (
            "64 instead of 32 GB/s, no compression",
            "1.35×",
            few.step_s("none") / wide.step_s("none"),
        ),
        ("local top-k, 8 workers", "1.92×", few.gain("local top-k")),
        ("local top-k, 128 workers", "1.2×", many.gain("local top-k")),
        ("ScaleCom, 8 workers", "2×", few.gain("ScaleCom")),
        ("ScaleCom, 128 workers", "2×", many.gain("ScaleCom")),
        ("ScaleCom over top-k, 128, 32 GB/s", "1.65×", many.gain("ScaleCom", "local top-k")),
        ("ScaleCom over top-k, 128, 64 GB/s", "1.37×", many_wide.gain("ScaleCom", "local top-k")),
        ("ScaleCom, 32 a worker", "1.23×", large.gain("ScaleCom")),
        ("ScaleCom, 300 TFLOPS, 8 a worker", "4.1×", fast.gain("ScaleCom")),
        ("ScaleCom, 300 TFLOPS, 32 a worker", "1.75×", fast_large.gain("ScaleCom")),
        ("communication with ScaleCom", "< 3 %", 100 * few.share("ScaleCom")),
    ]


def compare() -> Iterator[str]:
    """Yield the lines of a table with the numbers in the text beside ours."""
    return table(
        ("what the text says", "paper", "here"),
        (
            (what, paper, f"{ours:.3g}{' %' if '%' in paper else '×'}")
            for what, paper, ours in claims()
        ),
    )


def draw_all() -> None:
    """Draw figures A8 and A9."""
    speed, panels = subplots(1, 2, size=(6.8, 3.9), sharey=True)
    for axes, (title, bandwidth) in zip(panels, BANDWIDTHS.items(), strict=True):
        _speed(axes, title, bandwidth)
    panels[0].set_ylabel("samples a second and worker,\n1: uncompressed, 8 workers, 32 GB/s")
    names, labels = panels[1].get_legend_handles_labels()
    speed.legend(names, labels, loc="outside lower center", ncols=len(SCHEMES))
    save(speed, "scalecom_a8")
    shares, (upper, lower) = subplots(2, size=(6.4, 6.8))
    _shares_by_batch(upper)
    _cost_by_ranks(lower)
    save(shares, "scalecom_a9")


def _speed(axes: Axes, title: str, bandwidth: float) -> None:
    """Draw figure A8: groups of bars, a group for each number of workers."""
    basis = System(8).step_s("none")
    for place, scheme in enumerate(SCHEMES):
        heights = [basis / System(ranks, bandwidth=bandwidth).step_s(scheme) for ranks in RANKS]
        _bars(axes, heights, place, len(SCHEMES), f"C{place}", _label(scheme))
    axes.set_xticks(range(len(RANKS)), [str(ranks) for ranks in RANKS])
    axes.set(xlabel="workers", title=title)


def _shares_by_batch(axes: Axes) -> None:
    """Draw figure A9a: a step's computation and communication, and what ScaleCom gains."""
    systems = [System(8, batch, peak=peak) for peak in (100e12, 300e12) for batch in (8, 32)]
    for place, scheme in enumerate(("none", "ScaleCom")):
        wholes = [system.step_s("none") for system in systems]
        compute = [s.compute_s / whole for s, whole in zip(systems, wholes, strict=True)]
        waiting = [s.communicate_s(scheme) / w for s, w in zip(systems, wholes, strict=True)]
        at = [x + 0.4 * place - 0.2 for x in range(len(systems))]
        axes.bar(at, compute, 0.38, color="#bbbbbb", label=None if place else "computation")
        axes.bar(
            at, waiting, 0.38, bottom=compute, color="C0" if place == 0 else "C2",
            label=f"communication, {_label(scheme)}",
        )  # fmt: skip
    for x, system in enumerate(systems):
        top = system.compute_s / system.step_s("none") + 0.04
        axes.text(x + 0.2, top, f"{system.gain('ScaleCom'):.2f}×", ha="center")
    axes.set_xticks(
        range(len(systems)), [f"{s.batch} a worker\n{s.peak / 1e12:g} TFLOPS" for s in systems]
    )
    axes.set(ylabel="time of a step, 1: uncompressed", ylim=(0, 1.45), title="A9a: 8 workers")
    axes.legend(loc="upper left")


def _cost_by_ranks(axes: Axes) -> None:
    """Draw figure A9b: the share of a step that is communication, against the workers."""
    for place, scheme in enumerate(("local top-k", "ScaleCom"), start=1):
        for batch, style in ((8, "-o"), (32, "--s")):
            shares = [100 * System(ranks, batch).share(scheme) for ranks in RANKS]
            axes.plot(RANKS, shares, style, color=f"C{place}", label=f"{scheme}, {batch} a worker")
    axes.set_xscale("log", base=2)
    axes.set_xticks(RANKS, [str(ranks) for ranks in RANKS])
    axes.set(xlabel="workers", ylabel="communication, % of a step", ylim=(0, None), title="A9b")
    axes.legend()


def _bars(
    axes: Axes, heights: Sequence[float], place: int, groups: int, colour: str, label: str
) -> None:
    width = 0.8 / groups
    at = [x + (place - (groups - 1) / 2) * width for x in range(len(heights))]
    axes.bar(at, heights, 0.95 * width, color=colour, label=label)


def _label(scheme: str) -> str:
    return "no compression" if scheme == "none" else scheme


if __name__ == "__main__":
    print("\n".join(compare()))
    draw_all()
