"""The compiled passes compute what their definition does, bit for bit."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from torch import Tensor

import sparcel
from sparcel import simulate
from sparcel.core.comm import Communicator
from sparcel.core.schemes import Request
from tests.kernels.paths import ISAS, Case
from tests.regions.made import Found, Steps, cases, run
from tests.sampling import meeting
from tests.strategies import same_bits

# Each of them does the steps of up to 17 ranks twice.
few_examples = settings(max_examples=settings.default.max_examples // 3)


def assert_same(found: list[Found], expected: list[Found], bytes_too: bool = True) -> None:
    """Compare all that the ranks have; the messages, too, unless a step is void."""
    for one, other in zip(found, expected, strict=True):
        assert all(map(same_bits, one.updates, other.updates))
        assert all(map(same_bits, one.memories, other.memories))
        if not bytes_too:
            continue
        assert one.traffic == other.traffic
        for name in ("coordinates", "asked", "selected", "reduced"):
            assert getattr(one.costs, name) == getattr(other.costs, name)
        if math.isfinite(one.costs.magnitude):  # compiled sums of the largest numbers overflow
            assert float(one.costs.magnitude) == pytest.approx(
                float(other.costs.magnitude), rel=1e-3, abs=1e-3
            )
        for sent, beside in zip(one.messages, other.messages, strict=True):
            assert all(map(same_bits, sent, beside))


def is_void(found: list[Found]) -> bool:
    return any(bool(update.isnan().any()) for update in found[0].updates)


@given(cases())
@example(Steps(1, 0))
@example(Steps(3, 0))
@example(Steps(3, 1))
@example(Steps(2, 70_001, kind="all equal", density=0.001))
@example(Steps(2, 70_001, kind="zeros"))
@example(Steps(2, 300, density=0.999, format="packed:2", kind="signed zeros"))
@example(Steps(3, 777, density=1, format="packed:8", layers=((0, 777, 1.0),)))
def test_compiled_steps_are_as_defined(case: Steps) -> None:
    found, expected = run(case), run(case.plain(), compiled=False)
    assert_same(found, expected, bytes_too=not is_void(expected))


@given(cases())
@few_examples
def test_streams_of_steps_equal_their_updates(case: Steps) -> None:
    found = run(case)
    assert_same(run(case, stream=True), found, bytes_too=not is_void(found))


LONG = {
    "float32": Steps(3, 1_600_003, threads=2, steps=1),
    "bfloat16": Steps(2, 1_100_000, torch.bfloat16, returned=1, format="packed:8", threads=2),
    "nothing": Steps(2, 1_100_000, kind="zeros", threads=2, steps=1),
}
"""Vectors so long that all legs take two threads."""


@pytest.mark.parametrize(("isa", "name"), meeting(ISAS, LONG, each=1))
def test_several_threads_give_the_same_bits(isa: str, name: str) -> None:
    case = LONG[name]
    found = run(replace(case, isa=isa))
    assert_same(found, run(replace(case, threads=1)))
    if isa == ISAS[0]:
        assert_same(found, run(case.plain(), compiled=False))


@pytest.mark.parametrize(
    ("settings", "poison", "dtype"),
    [
        ({}, math.nan, torch.float32),
        ({}, -math.inf, torch.bfloat16),
        ({"returned": 1}, math.inf, torch.float16),
        ({"format": "packed:2"}, math.nan, torch.float16),
    ],
    ids=str,
)
@pytest.mark.parametrize("place", [0, 64, 128, 699])  # of all owners, and in the last block
def test_what_is_not_finite_makes_the_step_void_on_all_ranks(
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
    poison: float,
    dtype: torch.dtype,
    place: int,
) -> None:
    case = replace(Steps(3, 700, dtype), **settings)
    gradient = Steps.gradient
    clean = run(case)

    def poisoned(self: Steps, rank: int, step: int) -> torch.Tensor:
        made = gradient(self, rank, step)
        if (rank, step) == (1, 1):
            made[place] = poison
        return made

    monkeypatch.setattr(Steps, "gradient", poisoned)
    for compiled in (True, False):
        for one, before in zip(run(case, compiled), clean, strict=True):
            assert same_bits(one.updates[0], before.updates[0])
            assert bool(one.updates[1].isnan().all())
            assert same_bits(one.memories[1], before.memories[0])
            assert math.isfinite(one.costs.magnitude)


@given(cases(["special"]))
@few_examples
def test_any_values_make_steps_void_alike(case: Steps) -> None:
    assert_same(run(case), run(case.plain(), compiled=False), bytes_too=False)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("size", [63, 700, 40_000])
def test_ties_fill_a_message_and_no_more(isa: str, size: int) -> None:
    """All coordinates reach the threshold; the first take the room that there is."""
    case = Steps(3, size, kind="all equal", density=0.01, isa=isa)
    found = run(case)
    assert_same(found, run(case.plain(), compiled=False))
    for one in found:
        assert one.costs.selected <= 2 * sum(2 * math.ceil(0.01 * size / 3) + 64 for _ in range(2))


def test_sums_that_overflow_make_a_void_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each gradient is finite, and so is all that ranks send; sums are not."""
    largest = torch.finfo(torch.float32).max
    signs = Case("normal", 900, torch.float32).vector().sign()
    monkeypatch.setattr(Steps, "gradient", lambda self, rank, step: signs * largest)
    for returned in (None, 1):
        for compiled in (True, False):
            for one in run(Steps(4, 900, returned=returned), compiled):
                assert all(bool(update.isnan().all()) for update in one.updates)
                assert one.memories == [None, None]


@pytest.mark.parametrize("format", ["packed:4", "raw"])
def test_the_gradient_may_become_the_update(format: str) -> None:
    """What travels apart is 0 in the update, wherever that is written."""
    request = Request(apart=((0, 100),))

    def on_rank(comm: Communicator) -> None:
        gradient = Case("normal", 1000, torch.float32, comm.rank).vector()
        expected, found = (
            sparcel.scheme("bidirectional", density=0.1, format=format).step(
                own, comm, out=out, request=request
            )
            for own, out in ((gradient, None), [gradient.clone()] * 2)
        )
        assert same_bits(found, expected)
        assert not found[:100].any()

    simulate(2, on_rank)


def test_momentum_stays_where_all_travels() -> None:
    def on_rank(comm: Communicator, **settings: float) -> Tensor:
        scheme = sparcel.scheme("bidirectional", momentum=0.9, format="packed:4", **settings)
        for _ in range(9):
            update = scheme.step(torch.ones(4096), comm)
        return update

    returned, whole = (
        simulate(1, partial(on_rank, **chosen)).results[0]
        for chosen in ({"density": 0.1, "returned": 1.0}, {"density": 1.0})
    )
    assert same_bits(returned, whole)
    assert whole.mean() > 5


@pytest.mark.parametrize("format", ["packed:4", "raw"])
@pytest.mark.parametrize("density", [0.1, 0.999])
@pytest.mark.parametrize(
    "dtypes", [(torch.float32, torch.float64), (torch.float64, torch.float32, torch.bfloat16)]
)
def test_gradients_may_come_in_other_dtypes_than_the_memory_has(
    format: str, density: float, dtypes: tuple[torch.dtype, ...]
) -> None:
    """The memory keeps the dtype of its first gradient, and nothing is lost."""

    def on_rank(comm: Communicator) -> tuple[Tensor, Tensor]:
        scheme = sparcel.scheme("bidirectional", density=density, returned=1.0, format=format)
        given, updated = torch.zeros(2, 900, dtype=torch.float64)
        for step, dtype in enumerate(dtypes):
            gradient = Case("normal", 900, dtype, 10 * step + comm.rank).vector()
            update = scheme.step(gradient, comm)
            assert update.dtype == dtype
            given += gradient
            updated += update
        assert scheme.memory is not None
        assert scheme.memory.dtype == dtypes[0]
        return given - scheme.memory, updated

    (first, update), (second, _) = simulate(2, on_rank).results
    # An update in bfloat16 is rounded, and what that takes is nobody's.
    torch.testing.assert_close((first + second) / 2, update, rtol=0.01, atol=0.02)
