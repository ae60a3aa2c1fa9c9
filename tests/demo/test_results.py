"""The ranks' reports are combined to one row, and the rows to a table."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from sparcel.demo.report import table
from sparcel.demo.results import DivergedError, combine


def _report(rank: int, **fields: Any) -> dict[str, Any]:
    report = {"step_s": 0.3 + 0.1 * rank, "compute_s": 0.05, "payload_bytes": 1000 + rank}
    return {**report, "accuracy": 0.9, "fingerprint": "same", **fields}


def test_times_are_means_and_bytes_the_worst_rank() -> None:
    row = combine("topk", [_report(rank, select_s=0.01 * rank) for rank in range(3)])
    assert row.step_s == pytest.approx(0.4)
    assert row.exposed_s == pytest.approx(0.35)
    assert row.select_s == pytest.approx(0.01)
    assert row.communicate_s is None
    assert row.payload_bytes == row.sent_bytes == 1002
    assert (
        combine("x", [_report(rank, wire_bytes=5000 - rank) for rank in (0, 1)]).sent_bytes == 5000
    )


def test_different_models_on_the_ranks_are_an_error() -> None:
    with pytest.raises(DivergedError, match="with topk, the ranks ended with different models"):
        combine("topk", [_report(0), _report(1, fingerprint="other")])


def test_the_table_fits_a_terminal_and_tells_speedups() -> None:
    rows = [
        combine("dense fp32", [_report(0, step_s=0.3)]),
        combine("dense bf16", [_report(0, step_s=0.2, select_s=0.0, communicate_s=0.1)]),
        combine("topk", [_report(0, step_s=0.05, select_s=0.004, communicate_s=0.0123)]),
    ]
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(table(rows))
    lines = [line.split() for line in console.export_text().splitlines()]
    assert ["topk", "50.0", "50.0", "0.0", "4.0", "12.3", "0.00", "90.0", "6.0", "4.0"] in lines
    assert ["dense", "fp32", "300.0", "50.0", "250.0", "0.00", "90.0", "1.0", "0.7"] in lines
    assert not any("…" in word for line in lines for word in line)
