"""Compare the pages with the records that their figures come from: a part of ``make check``."""

from __future__ import annotations

import importlib
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from io import StringIO
from itertools import zip_longest
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console

from benchmarks.data import cache, parts
from benchmarks.gpu import counts
from benchmarks.gpu import tables as gpu_tables
from benchmarks.linear import report as linear_report
from benchmarks.network import (
    algorithms_table,
    commlib_report,
    scale,
    two_tiers_bytes,
    two_tiers_report,
)
from benchmarks.pages import papers as papers_report
from benchmarks.pages import plans, tables
from benchmarks.record import RESULTS, Row, recorded, rows_of, rule_of, shown_of
from benchmarks.training import causes, convergence, norms, papers_recipes, singular
from benchmarks.training import frontier_report as frontier
from benchmarks.training import lab_report as lab
from benchmarks.training import step_factors as factors
from sparcel.core.schemes import DEFAULT, RECOMMENDED
from sparcel.tools.bench.report import tables as bench_tables
from sparcel.tools.bench.results import Results
from sparcel.tools.plan.recorded import OWN, RECORDED

ROOT = Path(__file__).parents[2]

DRAWING = (
    *("deltas.report", "linear.report"),
    *("network.algorithms_table", "network.bench_report"),
    *("network.commlib_report", "network.two_tiers_report"),
    *("training.frontier_report", "training.lab_report"),
)
"""The scripts whose ``draw_all`` draws figures."""
PROCESSOR = {
    "float32": "gloo float32",
    "bfloat16": "gloo bfloat16",
    "the default": "default",
    "10 %": "10 %, packed:4",
    "`scalecom`": "scalecom 10 %, packed:4",
}
"""What docs/how-to/choose.md calls rows of the record of processor time."""

DEFAULT_IN = {
    "demo_accuracy_digits": None,
    "demo_digits": None,
    "lab_training": "sparcel",
}
"""Records of trainings by `attach`'s default whose rows tell no rule, and what they call it."""

NO_COMMIT = (
    *("bench_8_nodes_1gbit", "bench_formats", "demo_digits", "demo_digits_10gbit"),
    "emulated_25m",
)
"""Records that tell no commit: of times, where the page that shows one says what is older, and of a
prototype."""

COUNTED = "default", "nccl"
"""A method and its carrier that are counted anew; narrower layers change no number."""

NO_RECORD = "fill_in.svg"
"""Made by examples/fill_in.py, whose training rounds differently on other processors."""

Faults = Iterator[str]


def text_of(page: str) -> str:
    return (ROOT / page).read_text()


def absent(page: str, lines: Iterable[str], at_least: int = 1) -> Faults:
    """Yield the lines that a page should have and has not."""
    lines, found = list(lines), set(text_of(page).splitlines())
    if len(lines) < at_least:
        yield f"{page}: only {len(lines)} lines are compared, at least {at_least} expected"
    yield from (f"{page} does not have: {line}" for line in lines if line not in found)


def other(page: str, lines: Iterable[str]) -> Faults:
    """Yield what `absent` does, and the rows of the page's tables that are not among the lines."""
    lines = list(lines)
    yield from absent(page, lines)
    rows = (line for line in text_of(page).splitlines() if line.startswith("|"))
    yield from (f"{page} has a row of no record: {row}" for row in rows if row not in lines)


def without(page: str, *sentences: str) -> Faults:
    """Yield the sentences that a page should have, broken into lines anyhow, and has not."""
    text = " ".join(text_of(page).split())
    yield from (f"{page} does not have: {one}" for one in sentences if one not in text)


def different(page: str, found: object, expected: object) -> Faults:
    """Yield a fault if what a page shows is not what is expected."""
    if found != expected:
        yield f"{page} shows\n{found}\nwhere this is expected:\n{expected}"


def benchmark() -> Faults:
    page, results = "docs/how-to/benchmark.md", Results.load(RESULTS / "bench_8_nodes_1gbit.json")
    console = Console(width=100, file=StringIO(), highlight=False)
    console.print(*bench_tables(results))
    printed = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    made = {line.rstrip() for line in printed}
    shown = text_of(page).split("```text\n")[1].split("```")[0].splitlines()
    yield from (f"{page} shows a line that is not printed: {one}" for one in {*shown} - made)
    (normal,) = [row for row in recorded("selection")["rows"] if row["distribution"] == "normal"]
    ms = normal["median_ms"]
    few, many = (ms[f"avx512 topk {k}"] for k in ("0.001", "0.01"))
    theirs = " and ".join(f"{ms[f'torch.topk {k}']:.0f}" for k in ("0.001", "0.01"))
    sentence = (
        f"`sparcel.topk` takes {few:.1f} ms at 0.1 % and {many:.1f} ms at 1 %, `torch.topk`"
        f" {theirs} ms, copying the vector {ms['copy']:.1f} ms"
    )
    yield from without(page, sentence)


def commlib() -> Faults:
    yield from absent("docs/records/commlib.md", commlib_report.tables())


def data() -> Faults:
    page = "docs/how-to/data.md"
    yield from absent(page, cache.cache_table(rows_of("data_cache")), at_least=6)
    yield from without(page, parts.parts_sentence(rows_of("data_parts")))


def demo() -> Faults:
    steps = recorded("demo_digits")["methods"]
    by_seed = recorded("demo_accuracy_digits")["by_seed"]
    seconds = {step["method"]: step["step_s"] for step in steps}
    lines = []
    for step in steps:
        method = step["method"]
        speedups = [f"{seconds[one] / seconds[method]:.1f}×" for one in ("DDP", "DDP bf16")]
        time = f"{1000 * seconds[method]:.0f} ms"
        sent = f"{step['wire_bytes'] / 1e6:.1f} MB"
        exchange = f"{1000 * step['exposed_s']:.0f} ms"
        accuracy, loss = (mean(by_seed[method][one]) for one in ("accuracy", "loss"))
        cells = [method, time, exchange, sent, *speedups, f"{100 * accuracy:.1f} %", f"{loss:.3f}"]
        lines.append(f"| {' | '.join(cells)} |")
    yield from absent("README.md", lines)
    fast = recorded("demo_digits_10gbit")["methods"]
    sentence = ", ".join(f"{step['method']} {1000 * step['step_s']:.0f} ms" for step in fast)
    yield from without("README.md", sentence)


def trainings() -> Faults:
    """Compare the pages on what training ends at."""
    names = "causes", "convergence", "convergence_sweeps", "search"
    rows = {name: shown_of(name) for name in names}
    runs = frontier.all_rows()
    yield from other(
        "docs/explanation/results.md",
        [
            *frontier.default_table(runs),
            *frontier.chosen_table(runs),
            *frontier.bits_table(runs),
            *frontier.size_table(shown_of("emulated_25m")),
        ],
    )
    yield from other(
        "docs/explanation/why.md",
        [
            *causes.causes_table(rows["causes"]),
            *singular.errors_table(shown_of("singular")),
        ],
    )
    yield from other(
        "docs/records/training.md",
        [
            *convergence.suite_table(rows["convergence"]),
            *convergence.sweeps_table(rows["convergence_sweeps"], rows["convergence"]),
            *frontier.other_settings_table(runs),
            *frontier.search_table([*runs, *rows["search"]]),
            *lab.trainings_table(lab.lab_rows()),
            *factors.steps_table(runs),
        ],
    )
    more = {name: one.perplexity for name, one in RECORDED.items() if name not in OWN}
    several = [more[name] for name, one in RECORDED.items() if name in more and one.seeds == 3]
    yield from without(
        "docs/explanation/why.md",
        f"`words` has {min(several):.0f} to {max(several):.1f} % more perplexity with the methods"
        f" that ran with three seeds, and {more['oktopk']} % with `oktopk`",
    )


def ages() -> Faults:
    """Find records that are older than the code that they speak of, as far as this shows.

    What training ends at depends on rules: rows tell theirs, and those of others are not shown
    (`benchmarks.record`). Counts are counted anew, for few ranks. Times say when they were taken.
    """
    pages = "\n".join(
        text_of(str(path)) for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"))
    )
    for name in sorted({*re.findall(r"results/(\w+)\.json", pages), *DEFAULT_IN}):
        told = {key for key in ("commit", "date") if _holds(recorded(name), key)}
        if name not in NO_COMMIT and told != {"commit", "date"}:
            yield f"{name}.json does not tell its commit and date"
    default = rule_of(DEFAULT, RECOMMENDED)
    known = [row["date"] for row in shown_of("frontier") if row.get("rule") == default]
    for name, method in DEFAULT_IN.items():
        record = recorded(name)
        rows = [row for row in record.get("rows", ()) if row.get("method") == method]
        dates = [row.get("date", record["date"]) for row in rows] or [record["date"]]
        if min(dates) < min(known, default="none"):
            yield f"{name}.json has trainings by a default of {min(dates)}, whose rule is not known"
    for row in recorded("two_tiers_bytes")["rows"]:
        if (row["nodes"], row["ranks_per_node"]) == (2, 4):
            yield from _counted("two_tiers_bytes", row, two_tiers_bytes.count(row["method"], 2, 4))
    record = recorded("scale")
    for row in record["rows"]:
        if row["ranks"] == 4:
            found = scale.measure(row["algorithm"], 4, record["size"], record["count"])
            yield from _counted("scale", row, found)


def _counted(name: str, row: Row, found: Row) -> Faults:
    """Yield what was recorded and is counted otherwise now; times of the machine are no counts."""
    counts = {key: value for key, value in found.items() if key not in ("wall_s", "peak_rss_mb")}
    of = row.get("algorithm") or row["method"]
    yield from (
        f"{name}.json has {row[key]} {key} of {of}, where {value} are counted now"
        for key, value in counts.items()
        if row[key] != value
    )


def _holds(part: Any, key: str) -> bool:
    """Return whether a record has a key anywhere, with a value."""
    if isinstance(part, dict):
        return bool(part.get(key)) or any(_holds(one, key) for one in part.values())
    return isinstance(part, list) and any(_holds(one, key) for one in part)


def figures() -> Faults:
    """Draw all figures anew, and compare them with those of docs/ and with the gallery."""
    folder: Path = tables.FIGURES
    script: dict[str, str] = {}
    with TemporaryDirectory() as name:
        tables.FIGURES = Path(name)
        for one in DRAWING:
            importlib.import_module(f"benchmarks.{one}").draw_all()
            script |= {path.name: one for path in Path(name).iterdir() if path.name not in script}
        tables.FIGURES = folder
        for figure, one in script.items():
            kept = folder / figure
            if not kept.exists() or kept.read_bytes() != (Path(name) / figure).read_bytes():
                yield f"docs/figures/{figure} is not what benchmarks.{one} draws"
    yield from different(
        "docs/figures", {path.name for path in folder.iterdir()}, {NO_RECORD, *script}
    )
    for entry in text_of("docs/gallery.md").split("\n## ")[1:]:
        for figure in re.findall(r"\]\(figures/(.*?)\)", entry):
            command = f"`python -m benchmarks.{script.get(figure)}`"
            if command not in entry:
                yield f"docs/gallery.md does not say that {command} draws {figure}"
    sentence = lab.front_sentence(lab.lab_rows())
    for path in (ROOT / "README.md", *ROOT.glob("docs/**/*.md")):
        text = " ".join(path.read_text().split())
        if "figures/front.svg" in text and sentence not in text:
            yield f"{path.relative_to(ROOT)} shows front.svg and does not say: {sentence}"


def fsdp() -> Faults:
    networks = {
        "2×4 ranks, 1 Gbit/s": "fsdp_2x4",
        "4×2 ranks, 1 Gbit/s": "fsdp_4x2",
        "2×4 ranks, 100 Mbit/s": "fsdp_2x4_100mbit",
    }
    lines = []
    for network, name in networks.items():
        rows = [row for row in recorded(name)["rows"] if row["what"] == "exchange"]
        largest = rows[-5:]  # a model has five methods, two of them HSDP's
        cells = [f"{row['ms']:.0f} ms" for row in largest]
        for number, row in enumerate(largest[2:], 2):
            cells[number] += f", {row['speedup']:.{0 if row['speedup'] > 9.5 else 1}f}×"
        lines.append(f"| {' | '.join([network, *cells])} |")
    yield from absent("docs/how-to/fsdp.md", lines, at_least=3)


def gpu() -> Faults:
    page = "docs/how-to/gpu.md"
    yield from absent(page, gpu_tables.all_tables(), at_least=14)
    whole, selected = gpu_tables.room()["default"], gpu_tables.room()["10 %"]
    sentence = f"{whole:.1f} bytes for each of its parameters for messages, {selected:.1f} at 10 %"
    yield from without(page, sentence, gpu_tables.launches())
    for row in recorded("gpu_counts")["rows"]:
        if (row["method"], row["carrier"]) == COUNTED and row["commit"] != gpu_tables.BEFORE:
            (found,) = counts.everywhere(counts.RANKS, 36, *([one] for one in COUNTED))
            shown = {part: row[part] for part in found}
            yield from different("gpu_counts.json", shown, found)


def linear() -> Faults:
    lines = (line for line in linear_report.all_tables() if line.startswith("|"))
    yield from absent("docs/records/linear.md", lines, at_least=45)


def optimizers() -> Faults:
    page = "docs/how-to/optimizers.md"
    yield from absent(page, norms.all_tables())
    shapes = {name: list(model()) for name, model in norms.MODELS.items()}
    sizes = {name: sum(map(math.prod, of)) for name, of in shapes.items()}
    resnet = len(shapes["ResNet-50"]), sizes["ResNet-50"]
    yield from different("the ResNet-50 of benchmarks/training/norms.py", resnet, (161, 25_557_032))
    for words in (
        f"{round(sizes['transformer'] / 1e6)} million parameters",
        f"{sizes['small CNN'] // 1000} thousand",
    ):
        if words not in text_of(page):
            yield f"{page} does not have: {words}"


def papers() -> Faults:
    """Compare the cells that are ours with the records, row by row, and the tables."""
    page = "docs/records/papers.md"
    yield from absent(page, filter(None, papers_report.all_tables()), at_least=60)
    yield from absent(page, papers_recipes.recipes_table(shown_of("papers_recipes")))
    yield from absent(page, algorithms_table.tables(), at_least=13)
    yield from without(page, algorithms_table.rounds_of_oktopk())
    for paper, ours in papers_report.PAPERS.items():
        section = text_of(page).split(f"\n## {paper}\n")[1].split("\n## ")[0]
        rows = [line for line in section.splitlines() if line.startswith("| [")]
        for line, (figure, shown, record) in zip_longest(rows, ours(), fillvalue=("",) * 3):
            if not (f"| [{figure}" in line and f"| {shown} |" in line and record in line):
                yield f"{page}, {paper}: {figure} is not {shown} of {record} in {line}"


def plan() -> Faults:
    page = "docs/how-to/choose.md"
    yield from absent(page, plans.answers())
    rows = recorded("core_time")["rows"]
    took = {row["name"]: row["core_ns"] for row in rows if row["ranks"] == 4}
    sentence = ", ".join(f"{label} {took[name]:.1f}" for label, name in PROCESSOR.items())
    yield from without(page, sentence)


def rounding() -> Faults:
    """How large memory becomes where `sparcml` rounds, in the mean of what was looked at."""
    rows = shown_of("rounding")
    if rows != recorded("rounding")["rows"]:
        yield "the rule of sparcml has changed: run benchmarks.streams.rounding again"
        return
    grown = {(row["settings"]["density"], row["settings"]["bits"]): row["grown"] for row in rows}
    most = max(*grown[0.03, 4], *grown[0.25, 4])
    sentence = (
        f"4 bits make it up to {100 * (most - 1):.0f} % larger; with 2 bits errors exceed the"
        f" values, and it is {mean(grown[0.03, 2]):.1f} and {mean(grown[0.25, 2]):.0f} times as"
        " large at densities of 3 and 25 %"
    )
    yield from without("docs/explanation/algorithms.md", sentence)


def schedule() -> Faults:
    """What flushing a memory at once is, beside flushing it in 16 steps, by setting and seed."""
    found: dict[tuple[Any, ...], dict[int, dict[int, Any]]] = {}
    for row in recorded("flush")["rows"]:
        setting = row["lars"], row["task"], row["density"], row["switch"]
        found.setdefault(setting, {}).setdefault(row["steps"], {})[row["seed"]] = row
    larger, higher = [], []
    for (lars, *_), ways in found.items():
        first = [mean(row["norms"][10] for row in ways[steps].values()) for steps in (1, 16)]
        if not lars:
            larger.append(first[0] / first[1])
        elif 0 in ways:
            for steps in (0, 1):
                over = [row["loss"] - ways[16][seed]["loss"] for seed, row in ways[steps].items()]
                higher.append(f"{mean(over):.3f} higher")
    page = "docs/how-to/schedule.md"
    times = f"({min(larger):.1f} to {max(larger):.0f} times as large with SGD)"
    yield from without(page, times, *higher)


def two_tiers() -> Faults:
    yield from absent("docs/records/two-tiers.md", two_tiers_report.tables())


CHECKS: tuple[Callable[[], Faults], ...] = (
    ages,
    benchmark,
    commlib,
    data,
    demo,
    figures,
    fsdp,
    gpu,
    linear,
    optimizers,
    papers,
    plan,
    rounding,
    schedule,
    trainings,
    two_tiers,
)


def main() -> None:
    faults = [fault for check in CHECKS for fault in check()]
    for fault in faults:
        print(fault, file=sys.stderr)
    if faults:
        sys.exit(f"{len(faults)} differences between the pages and their records")


if __name__ == "__main__":
    main()
