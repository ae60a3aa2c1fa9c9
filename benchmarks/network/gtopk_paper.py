"""gTop-k's Table IV, its 32 nodes at 1 Gbit/s, beside the cost model.

    python -m benchmarks.network.gtopk_paper

prints a table. The paper gives samples a second of whole
trainings, so a step took 32·b / throughput. Its computation is not in the text: a step of gTop-k is
an upper bound of it, and serves as such. Nothing overlaps, as in the paper.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.pages.tables import table
from sparcel.cost import stated_rates
from sparcel.plan import Model, plan

RANKS, DENSITY = 32, 0.001
LATENCY_S, BANDWIDTH = 436e-6, 4 / 3.6e-8
"""The paper's α and β, measured between two machines (its Figure 8): seconds a message, and bytes a
second, from 3.6·10⁻⁵ ms an element of four bytes."""


@dataclass(frozen=True)
class Case:
    """A row of Table IV: samples a second with dense, top-k and gTop-k exchanges.

    ``batch`` is that of a worker, from Table III.
    """

    model: Model
    batch: int
    dense: float
    topk: float
    gtopk: float

    def step(self, throughput: float) -> float:
        """Return the seconds of a step."""
        return RANKS * self.batch / throughput


CASES = (
    # For CIFAR-10, with layers of 4096 units: the text says that large ones are in VGG-16.
    Case(Model("VGG-16", 33_638_218), 128, 403, 2016, 3020),
    Case(Model("ResNet-20", 272_474), 128, 9212, 22272, 25280),
    Case(Model("AlexNet", 61_100_840), 64, 39, 296, 505),
    Case(Model("ResNet-50", 25_557_032), 256, 343, 978, 1251),
)


COLUMNS = (
    *("model", "dense", "top-k", "gTop-k", "dense exchange", "top-k", "gTop-k"),
    *("g/d, paper", "g/d, model", "e, dense", "e, gTop-k"),
)


def rows() -> Iterator[Sequence[str]]:
    """Yield the cells of each row: seconds, and efficiency by equation (4)."""
    rates = stated_rates(bandwidth=BANDWIDTH, latency_s=LATENCY_S, ranks=RANKS)
    for case in CASES:
        steps = [case.step(one) for one in (case.dense, case.topk, case.gtopk)]
        compute = steps[-1]
        planned = plan(case.model, compute_s=0, density=DENSITY, rates=rates)
        by_method = {row.method: row.work + row.exchange for row in planned.rows}
        exchanges = [by_method[name] for name in ("dense fp32", "topk", "gtopk")]
        dense, _, gtopk = (compute + exchange for exchange in exchanges)
        yield (
            case.model.name,
            *(f"{step:.2f} s" for step in steps),
            *(f"{exchange:.2f} s" for exchange in exchanges),
            f"{case.gtopk / case.dense:.1f}×",
            f"{dense / gtopk:.1f}×",
            f"{compute / dense:.0%}",
            f"{compute / gtopk:.0%}",
        )


if __name__ == "__main__":
    print("\n".join(table(COLUMNS, rows())))
