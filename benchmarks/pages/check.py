"""Compare the pages with the records that their figures come from: a part of ``make check``."""

from __future__ import annotations

import importlib
import json
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

from benchmarks.record import shown_of
from sparcel.bench.report import tables
from sparcel.bench.results import Results

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parents[1] / "results"
PROSE = ("| stage |", "| what | then |")
"""How the tables of docs/how-to/data.md begin that have no numbers."""

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
    "everything in 4 bits": "all, 4 bits",
    "`scalecom`": "scalecom 10 %, packed:4",
}
"""What docs/how-to/choose.md calls rows of the record of processor time."""

NO_RECORD = "fill_in.svg"
"""Made by examples/fill_in.py, whose training rounds differently on other processors."""

Faults = Iterator[str]


def text_of(page: str) -> str:
    return (ROOT / page).read_text()


def recorded(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def absent(page: str, lines: Iterable[str], at_least: int = 1) -> Faults:
    """Yield the lines that a page should have and has not."""
    lines, found = list(lines), set(text_of(page).splitlines())
    if len(lines) < at_least:
        yield f"{page}: only {len(lines)} lines are compared, at least {at_least} expected"
    yield from (f"{page} does not have: {line}" for line in lines if line not in found)


def different(page: str, found: object, expected: object) -> Faults:
    """Yield a fault if what a page shows is not what is expected."""
    if found != expected:
        yield f"{page} shows\n{found}\nwhere this is expected:\n{expected}"


def algorithms() -> Faults:
    report: Any = importlib.import_module("benchmarks.network.algorithms_table")
    yield from absent("docs/explanation/algorithms.md", report.tables(), at_least=40)


def benchmark() -> Faults:
    page, results = "docs/how-to/benchmark.md", Results.load(RESULTS / "bench_8_nodes_1gbit.json")
    console = Console(width=100, file=StringIO(), highlight=False)
    console.print(*tables(results))
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
    if sentence not in " ".join(text_of(page).split()):
        yield f"{page} does not have: {sentence}"


def commlib() -> Faults:
    report: Any = importlib.import_module("benchmarks.network.commlib_report")
    yield from absent("docs/records/commlib.md", report.tables())


def data() -> Faults:
    report: Any = importlib.import_module("benchmarks.data.report")
    made, shown = (
        re.findall(r"(?:^\|.*\n?)+", f"{text}\n", re.MULTILINE)
        for text in ("\n".join(report.all_tables()), text_of("docs/how-to/data.md"))
    )
    yield from different(
        "docs/how-to/data.md", [one for one in shown if not one.startswith(PROSE)], made
    )


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
    if sentence not in " ".join(text_of("README.md").split()):
        yield f"README.md does not have: {sentence}"


def trainings() -> Faults:
    """Compare the pages on what training ends at."""
    frontier: Any = importlib.import_module("benchmarks.training.frontier_report")
    lab: Any = importlib.import_module("benchmarks.training.lab_report")
    suite: Any = importlib.import_module("benchmarks.training.convergence_report")
    names = "causes", "convergence", "convergence_sweeps", "papers_recipes", "search"
    rows = {name: shown_of(name) for name in names}
    runs = frontier.all_rows()
    yield from absent(
        "docs/explanation/results.md",
        [*frontier.default_table(runs), *frontier.chosen_table(runs)],
    )
    yield from absent(
        "docs/explanation/why.md",
        [*suite.causes_table(rows["causes"]), *suite.recipes_table(rows["papers_recipes"])],
    )
    yield from absent(
        "docs/records/training.md",
        [
            *suite.suite_table(rows["convergence"]),
            *suite.sweeps_table(rows["convergence_sweeps"], rows["convergence"]),
            *frontier.other_settings_table(runs),
            *frontier.search_table([*runs, *rows["search"]]),
            *lab.trainings_table(lab.lab_rows()),
        ],
    )


def figures() -> Faults:
    """Draw all figures anew, and compare them with those of docs/ and with the gallery."""
    pages: Any = importlib.import_module("benchmarks.pages.tables")
    folder: Path = pages.FIGURES
    script: dict[str, str] = {}
    with TemporaryDirectory() as name:
        pages.FIGURES = Path(name)
        for one in DRAWING:
            importlib.import_module(f"benchmarks.{one}").draw_all()
            script |= {path.name: one for path in Path(name).iterdir() if path.name not in script}
        pages.FIGURES = folder
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
    report: Any = importlib.import_module("benchmarks.training.lab_report")
    sentence = report.front_sentence(report.lab_rows())
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


def linear() -> Faults:
    report: Any = importlib.import_module("benchmarks.linear.report")
    lines = (line for line in report.all_tables() if line.startswith("|"))
    yield from absent("docs/records/linear.md", lines, at_least=45)


def optimizers() -> Faults:
    norms: Any = importlib.import_module("benchmarks.training.norms")
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
    report: Any = importlib.import_module("benchmarks.pages.papers")
    yield from absent(page, filter(None, report.all_tables()), at_least=60)
    for paper, ours in report.PAPERS.items():
        section = text_of(page).split(f"\n## {paper}\n")[1].split("\n## ")[0]
        rows = [line for line in section.splitlines() if line.startswith("| [")]
        for line, (figure, shown, record) in zip_longest(rows, ours(), fillvalue=("",) * 3):
            if not (f"| [{figure}" in line and f"| {shown} |" in line and record in line):
                yield f"{page}, {paper}: {figure} is not {shown} of {record} in {line}"


def plan() -> Faults:
    page = "docs/how-to/choose.md"
    plans: Any = importlib.import_module("benchmarks.pages.plans")
    yield from absent(page, plans.answers())
    rows = recorded("core_time")["rows"]
    took = {row["name"]: row["core_ns"] for row in rows if row["ranks"] == 4}
    sentence = ", ".join(f"{label} {took[name]:.1f}" for label, name in PROCESSOR.items())
    if sentence not in " ".join(text_of(page).split()):
        yield f"{page} does not have: {sentence}"


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
    text = " ".join(text_of(page).split())
    yield from (f"{page} does not have: {words}" for words in (times, *higher) if words not in text)


def two_tiers() -> Faults:
    report: Any = importlib.import_module("benchmarks.network.two_tiers_report")
    yield from absent("docs/records/two-tiers.md", report.tables())


CHECKS: tuple[Callable[[], Faults], ...] = (
    algorithms,
    benchmark,
    commlib,
    data,
    demo,
    figures,
    fsdp,
    linear,
    optimizers,
    papers,
    plan,
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
