"""Which rank failed first is told from what the ranks wrote, not from the order of their ends."""

from __future__ import annotations

import pytest

from sparcel.errors import CommunicationError
from sparcel.tools.lab.launch import Ended, Failures, Line, told_by_survivor

CAUSE = "rank 1 failed: ValueError: bad batch"
WRITTEN = [
    f"[rank0]: sparcel.errors.CommunicationError: {CAUSE}",
    told_by_survivor(CommunicationError(CAUSE)),
]


@pytest.mark.parametrize("written", WRITTEN)
@pytest.mark.parametrize("lines_after", [0, 100])
def test_a_survivor_that_ends_first_is_not_named(lines_after: int, written: str) -> None:
    failures = Failures()
    failures.note(Line(0, written, is_error=True))
    for number in range(lines_after):
        failures.note(Line(0, f"tidying up {number}", is_error=True))
    failures.note(Ended(0, 1))
    assert failures.first is not None
    assert str(failures.first) == CAUSE
    failures.note(Line(1, "ValueError: bad batch", is_error=True))
    failures.note(Ended(1, 3))
    assert (failures.first.rank, failures.first.status) == (1, 3)
    assert str(failures.first) == "rank 1 failed (exit status 3): ValueError: bad batch"


def test_ranks_that_were_ended_or_ended_well_did_not_fail() -> None:
    failures = Failures()
    for ended in (Ended(0, 0), Ended(1, -9, killed=True)):
        failures.note(ended)
    assert failures.first is None
