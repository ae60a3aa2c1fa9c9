"""Schedules: what they say at any time, what they do to a training, and what they refuse."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sparcel
from sparcel import Phase, Schedule, simulate
from sparcel.core.comm import Communicator
from sparcel.core.schemes import Scheme, TopK
from sparcel.core.training import Averager
from sparcel.errors import InputError
from tests.evenly import even_averager
from tests.strategies import same_bits
from tests.training.tensors import TENSORS, gradients_of

SPARSE = sparcel.scheme("hitopk", density=0.01, selector="mstopk")


def paper() -> Schedule:
    """Return the schedule of CommLib, section 5.6."""
    return Schedule(
        Phase(13, SPARSE, lr=(0.4, 1.7), resolution=96, batch_size=256),
        Phase(11, "torus2d", lr=(1.7, 0.3), resolution=128, batch_size=256),
        Phase(3, "torus2d", lr=(0.3, 0.05), resolution=224, batch_size=256),
        Phase(1, "torus2d", lr=0.02, resolution=288, batch_size=128),
        length=28,
    )


def test_the_schedule_of_the_paper_can_be_written_down() -> None:
    schedule = paper()
    assert schedule.length == 28
    seen = [
        (repr(phase.scheme).split("(")[1], phase.resolution, phase.batch_size)
        for phase in map(schedule.at, range(28))
    ]
    assert [seen.count(one) for one in dict.fromkeys(seen)] == [13, 11, 3, 1]
    assert seen[0] == ("inner=TopK", 96, 256)
    assert seen[-1] == ("inner=Dense", 288, 128)
    assert schedule.lr(0) == 0.4
    assert schedule.lr(6.5) == pytest.approx(1.05)
    assert schedule.lr(13) == 1.7
    assert schedule.lr(27.9) == 0.02
    head, *rows = repr(schedule).splitlines()[1:]
    assert head.split()[:4] == ["from", "to", "scheme", "lr"]
    assert [row.split()[:2] for row in rows] == [
        ["0", "13"],
        ["13", "24"],
        ["24", "27"],
        ["27", "28"],
    ]
    assert "selector=MSTopK" in rows[0]
    assert rows[0].endswith("0.4 to 1.7   96          256")
    assert rows[1].split()[2] == "Hierarchical(Dense())"


lengths = st.lists(st.one_of(st.integers(1, 50), st.floats(1e-3, 50)), min_size=1, max_size=6)


@given(lengths=lengths, share=st.floats(0, 1, exclude_max=True))
def test_every_time_has_one_phase_and_a_progress_in_it(lengths: list[float], share: float) -> None:
    asked: list[float] = []

    def rule(progress: float) -> float:
        asked.append(progress)
        return progress

    schedule = Schedule(*(Phase(length, "dense", lr=rule) for length in lengths))
    t = min(share * schedule.length, math.nextafter(schedule.length, 0))
    schedule.lr(t)
    assert 0 <= asked[0] < 1
    starts = [math.fsum(lengths[:place]) for place in range(len(lengths))]
    for start, phase in zip(starts, schedule.phases, strict=True):
        if phase is not schedule.at(start):  # a sum rounded twice
            assert schedule.at(math.nextafter(start, math.inf)) is phase


@given(tenths=st.lists(st.integers(1, 99), min_size=1, max_size=9), unit=st.integers(2, 60))
def test_phases_begin_where_exact_sums_say(tenths: list[int], unit: int) -> None:
    schedule = Schedule(
        *(Phase(count / unit, "dense", lr=lambda progress: progress) for count in tenths),
        length=sum(tenths) / unit,
    )
    for place, phase in enumerate(schedule.phases):
        start = sum(tenths[:place]) / unit
        assert schedule.at(start) is phase
        assert schedule.lr(start) == 0
    assert isinstance(schedule.length, int) == (sum(tenths) % unit == 0)


@pytest.mark.parametrize("shared", [False, True])
def test_rates_that_are_tensors_are_set_like_others(shared: bool) -> None:
    """Torch gives the tensor that an optimiser was made with to all of its groups."""
    schedule = Schedule(Phase(4, "dense", lr=(0, 2)), Phase(1, "dense", lr=1))
    one, two, three = (torch.zeros(1, requires_grad=True) for _ in range(3))
    lr = torch.tensor(0.1)
    second = lr if shared else torch.tensor(0.05)
    groups = [{"params": [one]}, {"params": [two], "lr": second}, {"params": [three]}]
    optimizer = torch.optim.AdamW(groups, lr=lr)

    def on_rank(comm: Communicator) -> None:
        averager = even_averager(TENSORS, sparcel.scheme("dense"), group=comm)
        for t in (0, 1, 4, 2):
            schedule.apply(t, averager.handle, optimizer)
            rates = [group["lr"] for group in optimizer.param_groups]
            assert all(isinstance(rate, torch.Tensor) for rate in rates)
            expected = schedule.lr(t)
            half = expected if shared else expected / 2
            assert [float(rate) for rate in rates] == pytest.approx([expected, half, expected])
        assert float(lr) == pytest.approx(0.1)

    simulate(1, on_rank)


def test_a_scheme_of_later_that_the_cluster_cannot_run_is_told_at_once() -> None:
    later = Phase(1, sparcel.scheme("torus2d", ranks_per_node=2), lr=0.1)
    schedule = Schedule(Phase(1, "topk", lr=0.1), later)

    def on_rank(comm: Communicator) -> None:
        averager = even_averager(TENSORS, schedule.at(0).scheme, group=comm)
        with pytest.raises(InputError, match="equally many ranks"):
            schedule.apply(0, averager.handle)
        averager.average(gradients_of(comm.rank, 0))

    simulate(3, on_rank)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (Schedule, "a schedule needs a phase"),
        (lambda: Schedule("dense"), "phase 0 must be a Phase, got 'dense'"),
        (lambda: Phase(0, "dense", lr=1), "length must lie in .*, got 0"),
        (lambda: Phase(math.inf, "dense", lr=1), "length must .* got inf"),
        (lambda: Phase(math.nan, "dense", lr=1), "length must .* got nan"),
        (lambda: Phase("3", "dense", lr=1), "length must be a number, got '3'"),
        (lambda: Phase(1, "dence", lr=1), "did you mean 'dense'"),
        (lambda: Phase(1, 3, lr=1), "scheme must be a Scheme"),
        (lambda: Phase(1, "dense", lr=-0.1), r"lr must lie in \[0, inf\), got -0.1"),
        (lambda: Phase(1, "dense", lr=(0.1, math.nan)), "lr must .* got nan"),
        (lambda: Phase(1, "dense", lr=(0.1, 0.2, 0.3)), "a pair of rates"),
        (lambda: Phase(1, "dense", lr="fast"), "lr must be a number, got 'fast'"),
        (lambda: Phase(1, "dense", lr=1, resolution=96.5), "resolution must be a whole number"),
        (lambda: Phase(1, "dense", lr=1, batch_size=0), "batch_size must be at least 1, got 0"),
        (
            lambda: Schedule(Phase(1, "dgc", lr=1), Phase(1, "dense", lr=1)),
            r"corrects momentum=0\.9, and .* corrects 0",
        ),
        (
            lambda: Schedule(Phase(2.6, "dense", lr=1), Phase(1, "dense", lr=1), length=4),
            r"last 3\.6 together, not length=4; .* \[2\.6, 1\]",
        ),
        (lambda: paper().at(28), "t must lie .* got 28; the schedule is over"),
        (lambda: paper().lr(-1), "t must lie .* got -1"),
        (lambda: Schedule(Phase(1, "dense", lr=lambda _: -1.0)).lr(0), r"lr\(0\) must lie"),
    ],
)
def test_what_does_not_add_up_is_answered_in_words(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        make()


def test_groups_keep_their_ratios_and_a_checkpoint_keeps_them_too() -> None:
    def on_rank(comm: Communicator) -> None:
        averager = even_averager(TENSORS, TopK(), group=comm)
        schedule = Schedule(Phase(4, TopK(), lr=lambda progress: 1 - progress))
        one, two, three = (torch.zeros(1, requires_grad=True) for _ in range(3))

        def optimizer() -> torch.optim.Optimizer:
            groups = [{"params": [one]}, {"params": [two], "lr": torch.tensor(0.05)}]
            return torch.optim.SGD(groups, lr=0.1)

        first, other = optimizer(), torch.optim.AdamW([three], lr=3.0)
        for t in (0, 1, 3):
            assert schedule.apply(t, averager.handle, first, other) is schedule.phases[0]
            rates = [float(group["lr"]) for group in (*first.param_groups, *other.param_groups)]
            assert rates == pytest.approx([1 - t / 4, (1 - t / 4) / 2, 1 - t / 4])
        assert isinstance(first.param_groups[1]["lr"], torch.Tensor)
        resumed = optimizer()
        resumed.load_state_dict(first.state_dict())
        schedule.apply(2, averager.handle, resumed)
        assert [float(group["lr"]) for group in resumed.param_groups] == pytest.approx([0.5, 0.25])
        with pytest.raises(InputError, match="SGD was made with lr=0"):
            schedule.apply(2, averager.handle, torch.optim.SGD([one], lr=0.0))
        with pytest.raises(InputError, match="an optimizer must be an Optimizer"):
            schedule.apply(2, averager.handle, None)
        with pytest.raises(InputError, match="handle must be a Handle"):
            schedule.apply(2, TopK(), first)

    simulate(1, on_rank)


@pytest.mark.parametrize("stop", [2, 3, 4])
def test_training_by_a_schedule_resumes_bit_by_bit(stop: int) -> None:
    """In its sparse phase, at the switch and in the middle of the flush."""
    schedule = Schedule(
        Phase(1.5, "hitopk", lr=1), Phase(1.5, "hitopk", lr=2), Phase(3, "torus2d", lr=3)
    )

    def on_rank(comm: Communicator) -> None:
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
        schemes: list[Scheme] = []

        def train(averager: Averager, first: int, last: int) -> list[dict[str, torch.Tensor]]:
            updates = []
            for t in range(first, last):
                schedule.apply(t, averager.handle, optimizer)
                schemes.append(averager.handle.scheme)
                updates.append(averager.average(gradients_of(comm.rank, t)))
            return updates

        through = even_averager(TENSORS, schedule.at(0).scheme, group=comm)
        train(through, 0, stop)
        state = through.handle.state_dict()
        resumed = even_averager(TENSORS, schedule.at(stop).scheme, group=comm)
        resumed.handle.load_state_dict(state)
        for mine, theirs in zip(train(through, stop, 6), train(resumed, stop, 6), strict=True):
            assert all(same_bits(mine[name], theirs[name]) for name in TENSORS)
        assert schemes[0] is schemes[stop - 1] or stop > 3  # phases of one scheme are no switch

    simulate(4, on_rank, ranks_per_node=2)
