"""Statistics of training: totals, means and the last step, and what waits in memory."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor

from sparcel import scheme, simulate
from sparcel.core.comm import Communicator
from sparcel.core.training import Costs, Stats
from tests.evenly import even_averager
from tests.training.tensors import TENSORS, gradients_of

ELEMENTS = {name: tensor.numel() for name, tensor in TENSORS.items()}


def poisoned(rank: int, step: int) -> dict[str, Tensor]:
    gradients = gradients_of(rank, step)
    gradients["second"][3, 4] = math.inf
    return gradients


def train(comm: Communicator, steps: int, method: str = "topk", **settings: Any) -> list[Stats]:
    """Return the statistics after each step."""
    averager = even_averager(TENSORS, scheme(method, **settings), group=comm)
    seen = []
    for step in range(steps):
        averager.average(gradients_of(comm.rank, step))
        seen.append(averager.handle.stats())
    return seen


def test_the_last_steps_add_up_to_the_totals() -> None:
    for stats in simulate(3, lambda comm: train(comm, 4, density=0.05)).results:
        assert [one.steps for one in stats] == [1, 2, 3, 4]
        total = Costs()
        for one in stats:
            assert one.last.steps == 1
            total += one.last
            assert vars(total) == {field.name: getattr(one, field.name) for field in fields(total)}


def test_bytes_over_steps_is_the_mean_of_a_step_after_a_resume_and_void_steps() -> None:
    def on_rank(comm: Communicator) -> tuple[Stats, int]:
        averager = even_averager(TENSORS, scheme("topk", density=0.05), group=comm)
        for step in range(3):
            averager.average(gradients_of(comm.rank, step))
        state = averager.handle.state_dict()
        averager = even_averager(TENSORS, scheme("topk", density=0.05), group=comm)
        averager.handle.load_state_dict(state)
        before = comm.traffic.bytes_sent
        averager.average(gradients_of(comm.rank, 3))
        averager.average(poisoned(comm.rank, 4))
        averager.average(gradients_of(comm.rank, 5))
        sent = comm.traffic.bytes_sent - before
        comm.run(lambda: comm.gather_numbers(5))  # others may use the communicator between steps
        return averager.handle.stats(), sent

    for stats, sent in simulate(2, on_rank).results:
        assert (stats.steps, stats.void_steps, stats.training_steps) == (3, 1, 5)
        assert stats.bytes_sent == sent
        assert stats.as_dict()["sparcel/mean/bytes_sent"] == sent / 3


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_dense_bytes_are_those_that_the_dense_scheme_sends(world_size: int) -> None:
    def on_rank(comm: Communicator) -> tuple[Stats, Stats]:
        return train(comm, 2, "dense")[-1], train(comm, 2, density=0.01)[-1]

    for dense, sparse in simulate(world_size, on_rank).results:
        assert dense.dense_bytes == sparse.dense_bytes
        # The ring's pieces differ by an element where the ranks do not divide the vector. The first
        # step also compares the ranks' gradients.
        assert abs(dense.last.dense_bytes - dense.last.bytes_sent) <= 2 * 8 * world_size
        if world_size == 1:
            assert math.isnan(sparse.compression)
        else:
            assert dense.compression == pytest.approx(1, rel=0.01)
            assert sparse.compression == sparse.dense_bytes / sparse.bytes_sent > 5


@pytest.mark.parametrize("warmup", [(), (1.0,)])
@pytest.mark.parametrize("method", ["topk", "gtopk", "hitopk", "auto"])
def test_small_tensors_count_as_sent_whole(method: str, warmup: tuple[float, ...]) -> None:
    settings: dict[str, Any] = {"density": 0.05}
    if warmup:
        settings |= {"warmup": warmup, "warmup_steps": 1}
    if method == "hitopk":
        settings["ranks_per_node"] = 1
    for (stats,) in simulate(4, lambda comm: train(comm, 1, method, **settings)).results:
        assert stats.coordinates == sum(ELEMENTS.values())
        if warmup:
            assert stats.density_before == stats.density_after == 1
        else:
            assert ELEMENTS["bias"] < stats.selected <= stats.asked < 0.1 * stats.coordinates


def test_rows_count_as_what_they_are() -> None:
    """Eight of a hundred rows are used, none of which the density concerns."""

    def on_rank(comm: Communicator) -> Stats:
        words = torch.zeros(100, 6, dtype=torch.bfloat16)
        averager = even_averager({"words": words}, scheme("topk"), group=comm, rows={"words"})
        rows = torch.arange(8)[None] * 2 + comm.rank
        values = torch.ones(8, 6).to(words)
        used = torch.sparse_coo_tensor(rows, values, words.shape, check_invariants=False)
        averager.average({"words": used})
        return averager.handle.stats()

    for stats in simulate(2, on_rank).results:
        assert stats.density_before == 8 / 100
        assert stats.density_after == 16 / 100
        assert stats.dense_bytes == 100 * 6 * 2


def test_the_dict_for_loggers_holds_numbers_by_names_that_do_not_change() -> None:
    (stats,) = simulate(2, lambda comm: train(comm, 1)).results[0]
    fresh = Stats().as_dict()
    assert list(stats.as_dict()) == list(fresh)
    assert {type(number) for number in stats.as_dict().values()} == {float}
    assert stats.as_dict()["sparcel/last/compression"] == stats.last.compression


def test_the_norm_of_memory_is_that_of_what_is_owed() -> None:
    def on_rank(comm: Communicator) -> tuple[float, float, float]:
        averager = even_averager(
            TENSORS, scheme("scalecom", density=0.05, beta=0.1), group=comm, frontload=False
        )
        at_first = averager.handle.memory_norm()
        huge = {name: one * 2.0**100 for name, one in gradients_of(comm.rank, 0).items()}
        averager.average(huge)  # float32 does not hold their squares
        prefix = f"rank{comm.rank}."
        memory = [
            part for key, part in averager.handle.state_dict().items() if key.startswith(prefix)
        ]
        norm = torch.cat([part.double() for part in memory]).norm().item()
        return at_first, averager.handle.memory_norm(), norm

    for at_first, given, norm in simulate(2, on_rank).results:
        assert at_first == 0 < norm
        assert given == pytest.approx(norm)


def test_the_norm_of_memory_may_have_squares_that_overflow() -> None:
    def on_rank(comm: Communicator) -> float:
        gradient = torch.full((40, 50), 1e160, dtype=torch.float64)
        averager = even_averager({"a": gradient}, scheme("topk", density=0.05), group=comm)
        averager.average({"a": gradient})
        return averager.handle.memory_norm()

    assert simulate(1, on_rank).results == [pytest.approx(1900**0.5 * 1e160)]


@pytest.mark.parametrize("method", ["topk", "gtopk", "oktopk", "scalecom", "sparcml"])
def test_age_is_the_mean_time_that_magnitude_waits(method: str) -> None:
    """With equal gradients, a coordinate is sent in every T-th step: its parts wait 0 … T−1 steps.

    At that moment the part of the step itself has not waited, so the mean is (T−1)/2.
    """
    period = 8
    settings: dict[str, Any] = {"density": 1 / period}

    def on_rank(comm: Communicator) -> tuple[float, float]:
        vector = {"weight": torch.ones(64, 32)}
        averager = even_averager(vector, scheme(method, **settings), group=comm)
        at_first = averager.handle.memory_age()
        for _ in range(4 * period):
            averager.average(vector)
        return at_first, averager.handle.memory_age()

    for at_first, age in simulate(4, on_rank).results:
        assert at_first == 0
        assert age == (period - 1) / 2


def test_age_without_a_step_to_tell_it_by() -> None:
    def on_rank(comm: Communicator) -> list[float]:
        averager = even_averager(TENSORS, scheme("topk", density=0.05), group=comm)
        averager.average(gradients_of(comm.rank, 0))
        ages = [averager.handle.memory_age()]
        averager.average(poisoned(comm.rank, 1))
        ages.append(averager.handle.memory_age())
        resumed = even_averager(TENSORS, scheme("topk", density=0.05), group=comm)
        resumed.handle.load_state_dict(averager.handle.state_dict())
        ages.append(resumed.handle.memory_age())
        uncompressed = even_averager(TENSORS, scheme("topk", density=1), group=comm)
        uncompressed.average(gradients_of(comm.rank, 0))
        return [*ages, uncompressed.handle.memory_age()]

    for finite, void, resumed, uncompressed in simulate(2, on_rank).results:
        assert finite == void > 0
        assert math.isnan(resumed)
        assert uncompressed == 0


def test_repr_tells_what_is_exchanged_and_what_it_has_cost() -> None:
    def on_rank(comm: Communicator) -> tuple[str, str, Stats]:
        words = {"words": torch.zeros(100, 6)}
        averager = even_averager(TENSORS | words, scheme("gtopk"), group=comm, rows=words)
        at_first = repr(averager.handle)
        rows = torch.sparse_coo_tensor([[3]], [[1.0] * 6], (100, 6), check_invariants=False)
        averager.average(gradients_of(comm.rank, 0) | {"words": rows})
        averager.handle.close()
        return at_first, repr(averager.handle), averager.handle.stats()

    for at_first, later, stats in simulate(3, on_rank).results:
        attached = (
            f"<{scheme('gtopk')} on 3 ranks over a simulated cluster; tensors: 3 made sparse (4,900"
            " elements), 1 sent whole (40 elements), 1 with sparse gradients (600 elements); steps:"
        )
        assert at_first == f"{attached} 0>"
        megabytes, times = stats.bytes_sent / 1e6, stats.compression
        sent = f"{megabytes:.3g} MB sent in each, {times:.3g} times less than dense"
        share = f"{100 * stats.asked / stats.coordinates:.3g} %"
        assert later == (
            f"{attached} 1, {sent}; in the last step {times:.3g} times; asked for {share} of the"
            f" coordinates, {share} in the last step; closed>"
        )


def test_repr_tells_what_the_default_returns() -> None:
    def on_rank(comm: Communicator) -> list[str]:
        schemes = (
            scheme(density=0.1),
            scheme("bidirectional", density=0.5),
            scheme("bidirectional", returned=0.2),
        )
        return [repr(even_averager(TENSORS, made, group=comm).handle) for made in schemes]

    (shown,) = simulate(1, on_rank).results
    for text, share in zip(shown, ("30 %", "100 %"), strict=False):
        assert f", which returns {share} of the sums, on 1 ranks" in text
    assert "returned=0.2" in shown[2] and "which returns" not in shown[2]
