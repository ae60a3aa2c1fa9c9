"""`benchmarks/gpu` measures, checks and counts what it says, here at tiny sizes."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sparcel.core import kernels
from tests.card import on_card

pytest.importorskip("triton")

from benchmarks.gpu import counts, measure, passes, rank, tables

CPU = torch.device("cpu")


def on_gpu() -> Any:
    """Give a card, or what stands in for one."""
    return nullcontext(torch.device("cuda", 0)) if torch.cuda.is_available() else on_card()


def test_every_pass_is_measured_and_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "RANKS", 2)
    with on_gpu() as place:
        rows = list(passes.measure(100, place, 1, checked=True))
    assert all(row["launches"] > 0 and row["host_ms"] > 0 for row in rows)
    launches = {row["call"]: row["launches"] for row in rows if "graph" not in row["call"]}
    assert len(launches) == 4 + 4 * len(passes.EXCHANGES)
    page = (Path(__file__).parents[1] / "docs/how-to/gpu.md").read_text()
    for one in ("enter", "collect", "deliver"):
        (row,) = [line for line in page.splitlines() if line.startswith(f"| {one} |")]
        *many, few = (launches[f"{one}, {name}"] for name in passes.EXCHANGES)
        assert f"| {many[0]}, {few} |" in row
        assert len({*many}) == 1  # whatever the bits


def changed(name: str, argument: int, change: Any) -> Any:
    """Return the kernels, of which one gets another argument for what is not on the CPU."""

    def faulty(*args: Any) -> Any:
        first = args[0].memory if name == "enter" else args[0]
        new = (
            args
            if first.is_cpu
            else (*args[:argument], change(args[argument]), *args[argument + 1 :])
        )
        return getattr(kernels, name)(*new)

    return SimpleNamespace(**{**vars(kernels), name: faulty})


@pytest.mark.parametrize(
    ("faulty", "check"),
    [
        (changed("enter", 0, lambda it: replace(it, scale=0.5)), "messages up of 5 bits"),
        (changed("deliver", 3, lambda divisor: 2 * divisor), "the update of 5 bits"),
    ],
)
def test_a_wrong_result_is_named(monkeypatch: pytest.MonkeyPatch, faulty: Any, check: str) -> None:
    monkeypatch.setattr(passes, "RANKS", 2)
    monkeypatch.setattr(passes, "kernels", faulty)
    with on_gpu() as place, pytest.raises(passes.WrongResultError, match=check):
        next(passes.measure(100, place, 1, checked=True))


def test_what_fails_is_noted_and_others_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("no such kernel\nat all")

    broken = SimpleNamespace(**{**vars(kernels), "accumulate_topk": fails})
    monkeypatch.setattr(passes, "kernels", broken)
    rows = list(passes.measure(1000, CPU, 1, checked=False))
    (failed,) = [row for row in rows if "host_ms" not in row]
    assert failed["note"] == "failed: RuntimeError: no such kernel"
    assert len(rows) == 4 + 4 * len(passes.EXCHANGES)


def rows_of(comm: Any) -> list[Any]:
    return list(rank.rows(rank.Job("cpu", width=32, layers=3, batch=4, rounds=2)))


@pytest.mark.processes
def test_every_method_trains_and_counts(run_on: Any) -> None:
    rows, _ = run_on(2, rows_of)
    assert [row["method"] for row in rows] == list(rank.BY_HOST)
    sent = {row["method"]: row["sent_bytes"] for row in rows}
    assert 0 < sent["topk 1 %"] < sent["10 %"] < sent["default"] < sent["DDP"]


@pytest.mark.parametrize("script", [counts, measure])
def test_help_measures_nothing(monkeypatch: pytest.MonkeyPatch, script: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["script", "--help"])
    with pytest.raises(SystemExit, match="0"):
        script.main()


def test_what_nccl_lacks_is_said() -> None:
    (row,) = measure.trained(2, measure.by_nccl(measure.TRIAL.job), 0.0)
    assert row["note"].startswith("NCCL" if not measure.ON_CARD else "no time")


def test_what_is_advised_follows_from_bytes_and_passes() -> None:
    fastest = {
        gbits: min(tables.choices(), key=lambda one: one.ms(gbits)).name for gbits in tables.GBITS
    }
    assert fastest == {10: "PowerSGD, rank 4", 25: "10 %", 100: "10 %"}
