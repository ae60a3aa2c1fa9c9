"""Compare the pages with the records that their figures come from: a part of ``make check``.

    python -m benchmarks.pages.check docs/records/linear.md

prints the lines of tables that a page should have.
"""

from __future__ import annotations

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
from benchmarks.gpu import tables as gpu
from benchmarks.linear import report as linear
from benchmarks.network import commlib_report, scale, two_tiers
from benchmarks.pages import figures, papers, plans
from benchmarks.pages.tables import table
from benchmarks.record import RESULTS, Row, recorded, rows_of, rule_of, shown_of
from benchmarks.training import causes, convergence, norms, papers_recipes, singular
from benchmarks.training import frontier_report as frontier
from benchmarks.training import lab_training as lab
from sparcel.core.schemes import DEFAULT, RECOMMENDED
from sparcel.tools.bench.results import Results
from sparcel.tools.bench.results import tables as bench_tables
from sparcel.tools.plan.recorded import OWN, RECORDED

ROOT = Path(__file__).parents[2]

PROCESSOR = {
    "float32": "gloo float32",
    "bfloat16": "gloo bfloat16",
    "the default": "default",
    "10 %": "10 %, packed:4",
    "`scalecom`": "scalecom 10 %, packed:4",
}
"""What docs/how-to/choose.md calls rows of the record of processor time."""

DEFAULT_IN = {"demo_accuracy_digits": None, "demo_digits": None, "lab_training": "sparcel"}
"""Records of trainings by `attach`'s default whose rows tell no rule, and what they call it."""

NO_COMMIT = ("bench_8_nodes_1gbit", "demo_digits", "demo_digits_10gbit", "emulated_25m")
"""Records that tell no commit: of times, where the page that shows one says what is older, and of a
prototype."""

COUNTED = "default", "nccl"
"""A method and its carrier that are counted anew; narrower layers change no number."""

NO_RECORD = "fill_in.svg"
"""Made by examples/fill_in.py, whose training rounds differently on other processors."""

Lines = Iterator[str]
"""Lines of tables, sentences, or faults."""


def text_of(page: str) -> str:
    return (ROOT / page).read_text()


def demo_table() -> Lines:
    by_seed = recorded("demo_accuracy_digits")["by_seed"]
    steps = recorded("demo_digits")["methods"]
    seconds = {step["method"]: step["step_s"] for step in steps}
    columns = "method", "step", "exchange", "sent a step", "speed-up over DDP", "over DDP bf16"
    cells = (_demo(step, seconds, by_seed) for step in steps)
    return table((*columns, "accuracy", "loss"), cells)


def _demo(step: Row, seconds: dict[str, float], by_seed: Row) -> Lines:
    method = step["method"]
    yield from (method, f"{1000 * seconds[method]:.0f} ms", f"{1000 * step['exposed_s']:.0f} ms")
    yield f"{step['wire_bytes'] / 1e6:.1f} MB"
    yield from (f"{seconds[one] / seconds[method]:.1f}×" for one in ("DDP", "DDP bf16"))
    accuracy, loss = (mean(by_seed[method][one]) for one in ("accuracy", "loss"))
    yield from (f"{100 * accuracy:.1f} %", f"{loss:.3f}")


def demo_sentence() -> Lines:
    fast = recorded("demo_digits_10gbit")["methods"]
    yield ", ".join(f"{step['method']} {1000 * step['step_s']:.0f} ms" for step in fast)


def results_tables() -> Lines:
    runs = frontier.all_rows()
    for lines in (frontier.default_table, frontier.chosen_table, frontier.bits_table):
        yield from lines(runs)
    yield from frontier.size_table(shown_of("emulated_25m"))


def why_tables() -> Lines:
    yield from causes.causes_table(shown_of("causes"))
    yield from singular.errors_table(shown_of("singular"))


def training_tables() -> Lines:
    suite, runs = shown_of("convergence"), frontier.all_rows()
    yield from convergence.suite_table(suite)
    yield from convergence.sweeps_table(shown_of("convergence_sweeps"), suite)
    yield from frontier.other_settings_table(runs)
    yield from frontier.search_table([*runs, *shown_of("search")])
    yield from lab.trainings_table(lab.lab_rows())
    yield from frontier.steps_table(runs)


def paper_tables() -> Lines:
    yield from papers.all_tables()
    yield from papers_recipes.recipes_table(shown_of("papers_recipes"))
    yield from scale.words_table()


def fsdp_table() -> Lines:
    networks = {
        "2×4 ranks, 1 Gbit/s": "fsdp_2x4",
        "4×2 ranks, 1 Gbit/s": "fsdp_4x2",
        "2×4 ranks, 100 Mbit/s": "fsdp_2x4_100mbit",
    }
    found = []
    for network, name in networks.items():
        rows = [row for row in recorded(name)["rows"] if row["what"] == "exchange"]
        largest = rows[-5:]  # a model has five methods, two of them HSDP's
        cells = [f"{row['ms']:.0f} ms" for row in largest]
        for number, row in enumerate(largest[2:], 2):
            cells[number] += f", {row['speedup']:.{0 if row['speedup'] > 9.5 else 1}f}×"
        found.append([network, *cells])
    columns = "HSDP float32", "HSDP bfloat16", "`topk` 1 %", "`topk` 1 %, `packed:4`", "10 %"
    return table(("network", *columns), found)


TABLES: dict[str, Callable[[], Iterable[str]]] = {
    "README.md": demo_table,
    "docs/explanation/results.md": results_tables,
    "docs/explanation/why.md": why_tables,
    "docs/how-to/choose.md": plans.answers,
    "docs/how-to/data.md": lambda: cache.cache_table(rows_of("data_cache")),
    "docs/how-to/fsdp.md": fsdp_table,
    "docs/how-to/gpu.md": gpu.all_tables,
    "docs/records/commlib.md": lambda: [*commlib_report.tables(), *norms.all_tables()],
    "docs/records/linear.md": linear.all_tables,
    "docs/records/papers.md": paper_tables,
    "docs/records/training.md": training_tables,
    "docs/records/two-tiers.md": two_tiers.tables,
}
"""The lines of tables that a page should have."""

NO_OTHER = ("docs/explanation/results.md", "docs/explanation/why.md", "docs/records/training.md")
"""Pages whose tables have no other lines."""


def selection() -> Lines:
    (normal,) = [row for row in recorded("selection")["rows"] if row["distribution"] == "normal"]
    ms = normal["median_ms"]
    few, many = (ms[f"avx512 topk {k}"] for k in ("0.001", "0.01"))
    theirs = " and ".join(f"{ms[f'torch.topk {k}']:.0f}" for k in ("0.001", "0.01"))
    yield (
        f"`sparcel.topk` takes {few:.1f} ms at 0.1 % and {many:.1f} ms at 1 %, `torch.topk`"
        f" {theirs} ms, copying the vector {ms['copy']:.1f} ms"
    )


def processor() -> Lines:
    rows = recorded("core_time")["rows"]
    took = {row["name"]: row["core_ns"] for row in rows if row["ranks"] == 4}
    yield ", ".join(f"{label} {took[name]:.1f}" for label, name in PROCESSOR.items())


def on_cards() -> Lines:
    whole, selected = gpu.room()["default"], gpu.room()["10 %"]
    yield f"{whole:.1f} bytes for each of its parameters for messages, {selected:.1f} at 10 %"


def norms_of() -> Lines:
    sizes = {name: sum(map(math.prod, model())) for name, model in norms.MODELS.items()}
    yield f"{round(sizes['transformer'] / 1e6)} million parameters"
    yield f"{sizes['small CNN'] // 1000} thousand"


def rounding() -> Lines:
    """Tell how large memory becomes where `sparcml` rounds, in the mean of what was looked at."""
    rows = recorded("rounding")["rows"]
    grown = {(row["settings"]["density"], row["settings"]["bits"]): row["grown"] for row in rows}
    most = max(*grown[0.03, 4], *grown[0.25, 4])
    yield (
        f"4 bits make it up to {100 * (most - 1):.0f} % larger; with 2 bits errors exceed the"
        f" values, and it is {mean(grown[0.03, 2]):.1f} and {mean(grown[0.25, 2]):.0f} times as"
        " large at densities of 3 and 25 %"
    )


def flushing() -> Lines:
    """Tell what flushing a memory at once is, beside flushing it in 16 steps."""
    found: dict[tuple[Any, ...], dict[int, dict[int, Any]]] = {}
    for row in recorded("flush")["rows"]:
        setting = row["lars"], row["task"], row["density"], row["switch"]
        found.setdefault(setting, {}).setdefault(row["steps"], {})[row["seed"]] = row
    larger = []
    for (lars, *_), ways in found.items():
        first = [mean(row["norms"][10] for row in ways[steps].values()) for steps in (1, 16)]
        if not lars:
            larger.append(first[0] / first[1])
        elif 0 in ways:
            for steps in (0, 1):
                over = [row["loss"] - ways[16][seed]["loss"] for seed, row in ways[steps].items()]
                yield f"{mean(over):.3f} higher"
    yield f"({min(larger):.1f} to {max(larger):.0f} times as large with SGD)"


def perplexities() -> Lines:
    more = {name: one.perplexity for name, one in RECORDED.items() if name not in OWN}
    several = [more[name] for name, one in RECORDED.items() if name in more and one.seeds == 3]
    yield (
        f"`words` has {min(several):.0f} to {max(several):.1f} % more perplexity with the methods"
        f" that ran with three seeds, and {more['oktopk']} % with `oktopk`"
    )


SENTENCES: dict[str, tuple[Callable[[], Iterable[str]], ...]] = {
    "README.md": (demo_sentence,),
    "docs/explanation/algorithms.md": (rounding,),
    "docs/explanation/why.md": (perplexities,),
    "docs/how-to/benchmark.md": (selection,),
    "docs/how-to/choose.md": (processor,),
    "docs/how-to/data.md": (lambda: [parts.parts_sentence(rows_of("data_parts"))],),
    "docs/how-to/gpu.md": (on_cards,),
    "docs/how-to/schedule.md": (flushing,),
    "docs/records/commlib.md": (norms_of,),
    "docs/records/papers.md": (lambda: [scale.rounds_of_oktopk()],),
}
"""The sentences that a page should have, broken into lines anyhow."""


def missing() -> Lines:
    """Find lines and sentences that pages should have and have not, and rows of no record."""
    for page, lines in TABLES.items():
        expected, found = [*lines()], text_of(page).splitlines()
        yield from (f"{page} does not have: {line}" for line in expected if line not in found)
        rows = [line for line in found if line.startswith("|") and page in NO_OTHER]
        yield from (f"{page} has a row of no record: {row}" for row in rows if row not in expected)
    for page, tellers in SENTENCES.items():
        text = " ".join(text_of(page).split())
        told = [sentence for tell in tellers for sentence in tell()]
        yield from (f"{page} does not have: {one}" for one in told if one not in text)
    if shown_of("rounding") != recorded("rounding")["rows"]:
        yield "the rule of sparcml has changed: run benchmarks.streams.rounding again"


def different(page: str, found: object, expected: object) -> Lines:
    """Yield a fault if what a page shows is not what is expected."""
    if found != expected:
        yield f"{page} shows\n{found}\nwhere this is expected:\n{expected}"


def benchmark() -> Lines:
    page, results = "docs/how-to/benchmark.md", Results.load(RESULTS / "bench_8_nodes_1gbit.json")
    console = Console(width=100, file=StringIO(), highlight=False)
    console.print(*bench_tables(results))
    printed = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    made = {line.rstrip() for line in printed}
    shown = text_of(page).split("```text\n")[1].split("```")[0].splitlines()
    yield from (f"{page} shows a line that is not printed: {one}" for one in {*shown} - made)


def paper_cells() -> Lines:
    """Compare the cells that are ours with the records, row by row."""
    page = "docs/records/papers.md"
    for paper, ours in papers.PAPERS.items():
        section = text_of(page).split(f"\n## {paper}\n")[1].split("\n## ")[0]
        rows = [line for line in section.splitlines() if line.startswith("| [")]
        for line, (figure, shown, record) in zip_longest(rows, ours(), fillvalue=("",) * 3):
            if not (f"| [{figure}" in line and f"| {shown} |" in line and record in line):
                yield f"{page}, {paper}: {figure} is not {shown} of {record} in {line}"


def ages() -> Lines:
    """Find records that are older than the code that they speak of, as far as this shows.

    What training ends at depends on rules: rows tell theirs, and those of others are not shown
    (`benchmarks.record`). Times say when they were taken.
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


def _holds(part: Any, key: str) -> bool:
    """Return whether a record has a key anywhere, with a value."""
    if isinstance(part, dict):
        return bool(part.get(key)) or any(_holds(one, key) for one in part.values())
    return isinstance(part, list) and any(_holds(one, key) for one in part)


def counted() -> Lines:
    """Count anew what is counted, for few ranks."""
    for row in rows_of("two_tiers_bytes"):
        if (row["nodes"], row["ranks_per_node"]) == (2, 4):
            yield from _as_before("two_tiers_bytes", row, two_tiers.count(row["method"], 2, 4))
    record = recorded("scale")
    for row in record["rows"]:
        if row["ranks"] == 4:
            found = scale.measure(row["algorithm"], 4, record["size"], record["count"])
            times = "wall_s", "peak_rss_mb"
            yield from _as_before("scale", row, {k: v for k, v in found.items() if k not in times})
    for row in rows_of("gpu_counts"):
        if (row["method"], row["carrier"]) == COUNTED and row["commit"] != gpu.BEFORE:
            (found,) = counts.everywhere(counts.RANKS, 36, *([one] for one in COUNTED))
            yield from _as_before("gpu_counts", row, found)
    shapes = list(norms.MODELS["ResNet-50"]())
    resnet = len(shapes), sum(map(math.prod, shapes))
    yield from different("the ResNet-50 of benchmarks/training/norms.py", resnet, (161, 25_557_032))


def _as_before(name: str, row: Row, found: Row) -> Lines:
    yield from different(f"{name}.json", {part: row[part] for part in found}, found)


def drawn() -> Lines:
    """Draw all figures anew, and compare them with those of docs/."""
    with TemporaryDirectory() as name:
        figures.draw_all(Path(name))
        made = {path.name: path.read_bytes() for path in Path(name).iterdir()}
    kept = {path.name: path.read_bytes() for path in figures.FIGURES.iterdir()}
    yield from different("docs/figures", {*kept}, {NO_RECORD, *made})
    yield from (
        f"docs/figures/{name} is not what benchmarks.pages.figures draws"
        for name, content in made.items()
        if kept.get(name) != content
    )
    sentence = lab.front_sentence(lab.lab_rows())
    for path in (ROOT / "README.md", *ROOT.glob("docs/**/*.md")):
        text = " ".join(path.read_text().split())
        if "figures/front.svg" in text and sentence not in text:
            yield f"{path.relative_to(ROOT)} shows front.svg and does not say: {sentence}"


CHECKS = (missing, benchmark, paper_cells, ages, counted, drawn)


def main() -> None:
    if pages := sys.argv[1:]:
        print(*(line for page in pages for line in TABLES[page]()), sep="\n")
        return
    faults = [fault for check in CHECKS for fault in check()]
    for fault in faults:
        print(fault, file=sys.stderr)
    if faults:
        sys.exit(f"{len(faults)} differences between the pages and their records")


if __name__ == "__main__":
    main()
