"""The README's examples run as printed, and links, targets and figures of the pages are right."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
README = (ROOT / "README.md").read_text()
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
LAUNCHES = re.findall(r"^torchrun .*$", README, re.MULTILINE)

RESULTS = ROOT / "benchmarks" / "results"

page_by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def test_all_examples_are_found() -> None:
    assert len(EXAMPLES) == README.count("```python") == 4
    assert len(LAUNCHES) == 1


def test_ddp_takes_five_lines() -> None:
    assert len([line for line in EXAMPLES[0].splitlines() if line]) == 5


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("example", EXAMPLES, ids=["ddp", "training", "all_reduce", "simulate"])
def test_example_runs_as_printed(example: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(example)
    on_two_ranks = "init_process_group" in example
    command = LAUNCHES[0] if on_two_ranks else "python train.py"
    beside_python = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    result = subprocess.run(
        shlex.split(command),
        cwd=tmp_path,
        env={**os.environ, "PATH": beside_python},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr


@page_by_page
def test_links_lead_to_files(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text())
    assert not [target for target in targets if not (page.parent / target).exists()]


def test_diffs_of_contributing_are_in_the_code() -> None:
    diffs = re.findall(r"```diff\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    assert len(diffs) == 3
    for part in re.split(r"^--- ", "".join(diffs), flags=re.MULTILINE)[1:]:
        file, *lines = part.splitlines()
        assert {line[1:] for line in lines} <= set((ROOT / file).read_text().splitlines())


@page_by_page
def test_make_targets_in_the_pages_exist(page: Path) -> None:
    named = set(re.findall(r"(?:^|`)make ([a-z]+)", page.read_text(), re.MULTILINE))
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert named <= targets


def recorded(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def test_figures_of_the_demo_are_those_recorded() -> None:
    steps = recorded("demo_digits")["methods"]
    accuracies = recorded("demo_accuracy_digits")["accuracy_mean"]
    seconds = {step["method"]: step["step_s"] for step in steps}
    for step in steps:
        method = step["method"]
        speedups = [
            f"{seconds[baseline] / seconds[method]:.1f}×"
            for baseline in ("dense fp32", "dense bf16")
        ]
        time = f"{1000 * seconds[method]:.0f} ms"
        sent = f"{step['wire_bytes'] / 1e6:.1f} MB"
        exchange = f"{1000 * step['exposed_s']:.0f} ms"
        cells = [method, time, exchange, sent, *speedups, f"{100 * accuracies[method]:.1f} %"]
        assert f"| {' | '.join(cells)} |" in README.splitlines()


@pytest.mark.parametrize(
    ("what", "row"),
    [
        ("`recursive_doubling`, lossless sum", "recursive_doubling"),
        ("`oktopk`, streams in, stream out", "oktopk"),
        ("whole step of `oktopk`", "step:oktopk"),
    ],
)
def test_figures_of_the_benchmark_are_those_recorded(what: str, row: str) -> None:
    cells = recorded("bench_8_nodes_1gbit")["cells"]
    seconds = {(c["algorithm"], c["density"], c["engine"]): c["seconds"]["median"] for c in cells}
    dense = [seconds["dense fp32", 1.0, engine] for engine in ("gloo", "mpi")]
    times = [seconds[row, d, engine] for d in (1 / 128, 0.001) for engine in ("gloo", "mpi")]
    figures = [f"{1000 * s:#.3g} ms, {min(dense) / s:#.3g}×".replace(". ", " ") for s in times]
    assert f"| {what} | {' | '.join(figures)} |" in README.splitlines()
    assert f"{1000 * dense[0]:.0f} ms; MPICH's took {1000 * dense[1]:.0f} ms" in README


@pytest.mark.parametrize(
    ("what", "record"),
    [
        ("copying the vector", "copy"),
        ("`sparcel.topk(x, k)`", "avx512 topk {}"),
        ("the same with the memory's addition fused in", "avx512 accumulate {}"),
        ("`torch.topk(x.abs(), k)`", "torch.topk {}"),
    ],
)
def test_figures_of_selection_are_those_recorded(what: str, record: str) -> None:
    (normal,) = [r for r in recorded("selection")["rows"] if r["distribution"] == "normal"]
    times = [f"{normal['median_ms'][record.format(k)]:.1f} ms" for k in ("0.001", "0.01")]
    assert f"| {what} | {' | '.join(times)} |" in README.splitlines()
