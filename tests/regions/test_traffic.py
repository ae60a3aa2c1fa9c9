"""The bytes of a step are those that its headers tell, within bounds, and near the prediction."""

from __future__ import annotations

from math import sqrt

import pytest
import torch
from hypothesis import given

from sparcel.core.cost import STEPS, Problem, count
from sparcel.core.formats import Format, Header, format_named
from sparcel.core.kernels import Regions
from sparcel.core.regions import leg
from tests.regions.made import Steps, cases, run


def problem_of(case: Steps, k: int) -> Problem:
    """Return what the cost of a step with ``k`` coordinates depends on."""
    scheme = case.scheme()
    assert isinstance(scheme.format, Format)
    answer = scheme.answer if isinstance(scheme.answer, Format) else None
    return Problem(case.size, k, case.ranks, format=scheme.format, answer=answer)


FORMATS = ["raw", "packed", "packed:8", "packed:4", "packed:2", "raw:bfloat16"]


@given(cases())
def test_bytes_are_those_of_the_counts_in_headers(case: Steps) -> None:
    """Two exchanges a step, in each of which a rank sends one message to every other rank."""
    format, others = case.scheme().format, case.ranks - 1
    answer = case.scheme().answer or format
    regions = Regions.of(case.size, case.ranks)
    for rank, one in enumerate(run(case)):
        sent, selected = 0, 0
        for number, messages in enumerate(one.messages):
            owners = [owner for owner in range(case.ranks) if owner != rank]
            assert len(messages) == (others if number < 2 * case.steps else 0)
            for owner, message in zip(owners, messages, strict=True):
                header = Header.parse(message)
                about = owner if number % 2 == 0 else rank
                assert header.size == regions.length(about)
                assert message.numel() == header.length
                coded = format if number % 2 == 0 else answer
                assert header.length == coded.nbytes(
                    None if header.dense else header.nnz, header.size, 4
                )
                sent += header.length
                selected += header.nnz if number % 2 == 0 else 0
        assert one.traffic[0] == sent
        assert one.traffic[2] == 2 * case.steps * others
        assert one.costs.selected == selected


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("kind", ["normal", "all equal", "bunched"])
@pytest.mark.parametrize("returned", [None, 0.1, 1])
def test_no_step_exceeds_the_bounds_of_its_phases(
    format: str, kind: str, returned: float | None
) -> None:
    case = Steps(4, 5000, kind=kind, format=format, returned=returned)
    regions, made = Regions.of(case.size, case.ranks), format_named(format)
    up = leg(regions, ((case.size, 0.1),), made, torch.float32)
    down = leg(regions, ((case.size, 0.3 if returned is None else returned),), made, torch.float32)
    compiled = format.startswith("packed:")
    for rank, one in enumerate(run(case, compiled)):
        owners = [owner for owner in range(case.ranks) if owner != rank]
        bound = sum(up.bounds[owner] for owner in owners)
        bound += len(owners) * down.bounds[rank]
        assert one.traffic[0] <= case.steps * bound


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(
    ("format", "answer"),
    [("raw", None), ("packed", None), ("packed:4", None), ("packed:3", "packed:7")],
)
@pytest.mark.parametrize("density", [0.01, 0.1, 0.4])
def test_steps_send_about_what_is_predicted(
    ranks: int, format: str, answer: str | None, density: float
) -> None:
    """The prediction knows the densities, and not how far the samples' thresholds are off."""
    case = Steps(ranks, 200_000, format=format, answer=answer, density=density, steps=1)
    compiled = format.startswith("packed:")
    problem = problem_of(case, round(density * case.size))
    told = count(STEPS["bidirectional"], problem)
    off = 0.02 + 3 * sqrt((1 - density) / (density * (case.size // 64)))
    for one in run(case, compiled):
        assert one.traffic[0] == pytest.approx(told.bytes_sent, rel=off)
        assert one.traffic[1] == pytest.approx(told.bytes_received, rel=off)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_dense_steps_send_what_is_predicted(ranks: int) -> None:
    """Where regions are of one length."""
    case = Steps(
        *(ranks, 64 * 16 * ranks, torch.float32),
        density=0.999,
        format="packed:4",
        answer="packed:6",
        steps=1,
    )
    problem = problem_of(case, case.size)
    told = count(STEPS["bidirectional"], problem)
    for one in run(case):
        assert one.traffic[:2] == (told.bytes_sent, told.bytes_received)
