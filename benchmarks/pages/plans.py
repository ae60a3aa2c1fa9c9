"""The first table of docs/how-to/choose.md: what `sparcel plan` answers for typical clusters."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.pages.tables import table
from sparcel.core import units
from sparcel.core.cost import stated_rates
from sparcel.tools.plan import PlannedStep, model_of, plan
from sparcel.tools.plan.recorded import AT_10_PER_CENT, UNNAMED

CLUSTERS = (
    *(("resnet50", "120ms", 8, 1), ("resnet50", "120ms", 32, 1), ("resnet50", "120ms", 4, 8)),
    *(("gpt2", "600ms", 8, 1), ("gpt2", "600ms", 4, 8)),
    *(("bert-large", "250ms", 8, 1), ("bert-large", "250ms", 4, 8)),
    *(("llama-3.2-1b", "2s", 8, 1), ("llama-3.2-1b", "2s", 8, 8)),
)
"""Models, times to compute a step, machines, and GPUs of each."""

LINKS = {"100 Mbit/s": "100mbit", "1 Gbit/s": "1gbit", "10 Gbit/s": "10gbit", "25 Gbit/s": "25gbit"}
LATENCY, STEPS, DENSITY = "100us", 10_000, 0.01


def answers() -> Iterator[str]:
    """Return the lines of the table."""
    columns = "model, parameters, time to compute", "machines × GPUs", *LINKS
    return table(columns, (_row(*cluster) for cluster in CLUSTERS))


def _row(name: str, compute: str, nodes: int, each: int) -> Iterator[str]:
    model = model_of(name)
    size = f"{model.parameters / 1e6:.0f} M"
    yield from (f"{name}, {size}, {compute}", f"{nodes} × {each}")
    for bandwidth in LINKS.values():
        rates = stated_rates(
            bandwidth=units.bits_per_s(bandwidth) / 8,
            latency_s=units.seconds(LATENCY),
            ranks=nodes * each,
            ranks_per_node=each,
            node_bandwidth=units.bits_per_s("2400gbit") / 8,
            node_latency_s=units.seconds("5us"),
            memory_bandwidth=1e12,
        )
        made = plan(
            model, compute_s=units.seconds(compute), density=DENSITY, rates=rates, steps=STEPS
        )
        default = next(row for row in made.rows if row.method.startswith(UNNAMED))
        if made.instead is not None:
            yield ", ".join(_times(made.best_dense, row) for row in (made.instead, default))
        elif made.advised is made.best_dense:
            yield "dense"
        elif made.advised is default:
            yield _times(made.best_dense, default)
        else:
            others = _times(made.best_dense, made.advised), _times(made.best_dense, default)
            yield ", ".join(others)


def _times(dense: PlannedStep, row: PlannedStep) -> str:
    name = row.method.replace(UNNAMED, "default").replace(AT_10_PER_CENT, "10 %")
    name = name if row.every == 1 else f"outer/{row.every}"
    times = dense.to_loss / row.to_loss
    return f"{name} {times:.{0 if times >= 20 else 1}f}×"
