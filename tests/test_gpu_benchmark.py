"""`benchmarks/gpu/measure.py` measures, checks and counts what it says, here at tiny sizes."""

import importlib
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sparcel import kernels
from tests.card import interpreted

pytest.importorskip("triton")

from benchmarks.gpu import checks, rank, report, steps
from benchmarks.gpu import kernels as gpu_kernels

CPU = torch.device("cpu")
CARD = torch.device("cuda", 0) if torch.cuda.is_available() else CPU


@pytest.fixture
def card_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return the kernels for GPUs, which sample short vectors too; without one, interpreted."""
    gpu = importlib.import_module("sparcel.kernels.gpu")
    monkeypatch.setattr(importlib.import_module("sparcel.kernels.gpu.select"), "SAMPLES", 128)
    with nullcontext() if CARD.type == "cuda" else interpreted():
        yield gpu


def test_every_kernel_is_measured_and_checked(
    card_kernels: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_kernels, "SAMPLINGS", 3)
    rows = gpu_kernels.measure(card_kernels, CARD, "clustered", 3000, 0.02, repeats=1, seconds=0.1)
    assert {row.get("checked") for row in rows} == {2}
    names = [row["method"] for row in rows]
    assert {"copy", "topk", "accumulate_topk, clear", "decode packed:4"} <= set(names)
    assert len(names) == len(set(names)) == 3 + 4 + 2 + 2 + 2 + 3 * 3
    times = {row["method"]: row.get("times_torch_topk") for row in rows}
    assert times["torch.topk of |x|"] == 1
    *_, last, _, _, _ = table = list(report.kernel_table(rows))
    assert "to the host, packed:4" in last
    assert len({len(line) for line in table[1 : 3 + len(rows)]}) == 1


@pytest.mark.parametrize(
    ("fault", "check"),
    [
        (lambda x, k: kernels.topk(x, k - 1), "topk: min"),
        (lambda x, k: kernels.topk(x.abs(), k), "topk: values"),
        (lambda x, k: (torch.arange(k), x[:k]), "topk: no magnitude left out"),
        (lambda x, k: tuple(part.flip(0) for part in kernels.topk(x, k)), "topk: indices"),
    ],
)
def test_a_wrong_result_is_named(fault: Any, check: str) -> None:
    wrong = SimpleNamespace(**{**vars(kernels), "topk": fault})
    with pytest.raises(checks.WrongResultError, match=check):
        gpu_kernels.measure(wrong, CPU, "gaussian", 1000, 0.1, repeats=1, seconds=0.1)


def test_what_fails_is_noted_and_others_are_measured() -> None:
    def fails(x: torch.Tensor, k: int) -> None:
        raise RuntimeError("no such kernel")

    broken = SimpleNamespace(**{**vars(kernels), "topk": fails})
    rows = gpu_kernels.measure(broken, CPU, "gaussian", 1000, 0.1, repeats=1, seconds=0.1)
    (failed,) = [row for row in rows if "ms" not in row]
    assert failed["note"] == "failed: RuntimeError: no such kernel"


def test_limits_tell_what_was_reached() -> None:
    times = {"topk": 1.0, "torch.topk of |x|": 12.0, "MSTopK, 30 samplings": 0.9}
    times |= {"accumulate_topk": 3.0, "memory.add_(gradient)": 2.0}
    about = {"input": "gaussian", "size": report.TARGET, "density": report.SPARSE}
    rows = [about | {"method": name, "ms": ms} for name, ms in times.items()]
    rows.append(about | {"size": report.LARGE, "method": "topk", "ms": 1.0, "of_copy": 0.6})
    waits = {"most_reads_in_a_part": 2, "warnings": 0}
    waiting = [{"method": "sparcel", "synchronisations": waits}]
    found = report.Limits(rows, waiting).all()
    by_method = {one["what"].rpartition(" than ")[2]: one["reached"] for one in found}
    assert by_method["torch.topk of |x|"] is True
    assert by_method["torch.topk, sorted=False"] is None
    assert by_method["MSTopK, 30 samplings"] is False
    reached = {one["what"].partition(":")[0]: one["reached"] for one in found}
    assert reached["accumulate_topk of 25 M"] is True
    assert reached["topk of 110 M"] is True
    most, others = found[-2:]
    assert (most["reached"], others["reached"]) == (False, True)
    assert len(list(report.limit_lines(found))) == len(found) + 1


def steps_of(comm: Any) -> list[dict[str, Any]]:
    return list(rank.rows(rank.Job("cpu", width=32, layers=3, batch=4, seconds=0.0)))


@pytest.mark.processes
def test_every_method_trains_and_counts(run_on: Any) -> None:
    rows, _ = run_on(2, steps_of)
    assert [row["method"] for row in rows] == list(steps.METHODS)
    counted = {row["method"]: row["payload_bytes"] for row in rows}
    assert 0 < counted["sparcel"] < rows[0]["ring_bytes"]
    assert counted["DDP"] == 0
    assert rows[-1]["synchronisations"]["parts"]["select"] == 1
    network = SimpleNamespace(link=None, description="loopback")
    described = [steps.described(row, network) for row in rows]
    assert described[-1]["computed_link_ms"]["1gbit"] == pytest.approx(8e-6 * counted["topk 1 %"])
    assert len(list(report.step_table(described))) == 3 + len(rows) + len(report.STEP_LEGEND)
