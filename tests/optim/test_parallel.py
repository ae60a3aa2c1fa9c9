"""The parallel operator: the same bits for every number of ranks, in shares that are balanced."""

from __future__ import annotations

import gc
import importlib
import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.network import commlib_report as report
from benchmarks.training import norms
from sparcel import simulate
from sparcel.core import kernels
from sparcel.core.comm import Communicator
from sparcel.core.cost import Rates, stated_rates
from sparcel.core.optim import parallel
from sparcel.core.optim.parallel import divide
from sparcel.errors import CommunicationError, InputError, MismatchError
from tests.strategies import DTYPES, FLOATS, same_bits
from tests.workers import on_engines_in_turn

ROOT = Path(__file__).parents[2]

SLOW_WORK = stated_rates(bandwidth=1e12, latency_s=0, ranks=8, memory_bandwidth=1.0)
"""Rates by which it always pays to share work."""

worlds = st.sampled_from([1, 2, 3, 5, 8])
sizes = st.sampled_from([0, 1, 5, 100, kernels.CHUNK, kernels.CHUNK + 1, 3 * kernels.CHUNK + 17])


def made(size: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, generator=generator).to(dtype)


def everywhere(world: int, function: Callable[[Communicator], Any]) -> list[Any]:
    """Run a function on simulated ranks where it pays to share."""

    def on_rank(comm: Communicator) -> Any:
        comm.rates = SLOW_WORK
        return function(comm)

    return simulate(world, on_rank).results


def extremes(tensors: Sequence[Tensor]) -> Tensor:
    """Return the least and the greatest element and the number of elements; not additive."""
    rows = [torch.stack([one.min(), one.max(), one.new_tensor(one.numel())]) for one in tensors]
    return torch.stack(rows)


def moments(tensors: Sequence[Tensor]) -> Tensor:
    """Return sums of an element and of its square, as rows of 2 × 1."""
    double = [one.double() for one in tensors]
    return torch.stack([torch.stack([one.sum(), one.square().sum()])[:, None] for one in double])


@given(worlds, st.lists(st.tuples(sizes, st.sampled_from(FLOATS)), max_size=5))
def test_sums_have_the_same_bits_for_every_number_of_ranks(
    world: int, given: list[tuple[int, torch.dtype]]
) -> None:
    tensors = [made(size, dtype, seed) for seed, (size, dtype) in enumerate(given)]
    alone = kernels.sums_of_squares(tensors)
    for rows in everywhere(
        world, lambda comm: parallel(kernels.sums_of_squares, tensors, comm, additive=True)
    ):
        assert same_bits(rows, alone)
    if tensors:
        (one,) = everywhere(1, lambda comm: parallel(moments, tensors, comm, additive=True))
        for rows in everywhere(world, lambda comm: parallel(moments, tensors, comm, additive=True)):
            assert same_bits(rows, one)
            assert rows.shape == (len(tensors), 2, 1)


@given(
    worlds,
    st.lists(st.integers(1, 200), min_size=1, max_size=20),
    st.sampled_from(DTYPES),
)
def test_rows_of_other_operations_are_gathered_as_they_are(
    world: int, given: list[int], dtype: torch.dtype
) -> None:
    tensors = [made(size, dtype, seed).view(1, -1) for seed, size in enumerate(given)]
    expected = extremes(tensors)
    seen: list[int] = []

    def counted(own: Sequence[Tensor]) -> Tensor:
        seen.append(len(own))
        return extremes(own)

    for rows in everywhere(world, lambda comm: parallel(counted, tensors, comm)):
        assert same_bits(rows, expected)
    if world > 1 and len(given) > 1:
        assert sum(seen) <= len(given) + world  # a rank without a share computes one row
        assert max(seen) < len(given)


@given(
    st.lists(st.tuples(st.integers(0, 5 * kernels.CHUNK), st.sampled_from([2, 4, 8])), min_size=1),
    st.integers(1, 140),
)
def test_shares_hold_each_piece_once_and_are_balanced_by_bytes(
    given: list[tuple[int, int]], ranks: int
) -> None:
    divided = divide(tuple(given), ranks, True, None)
    assert divided.cuts[0] == 0 and divided.cuts[-1] == len(divided.pieces)
    assert all(start <= stop for start, stop in pairwise(divided.cuts))
    for number, (size, _) in enumerate(given):
        pieces = [piece for piece in divided.pieces if piece[0] == number]
        assert (pieces[0][1], pieces[-1][2]) == (0, size)
        assert all(before[2] == after[1] for before, after in pairwise(pieces))
    mean = sum(size * itemsize for size, itemsize in given) / ranks
    assert max(divided.loads) <= mean + max(divided.nbytes)
    assert max(divided.nbytes) <= 8 * kernels.CHUNK


@pytest.mark.parametrize(
    ("size", "ranks", "rates", "pays"),
    [
        (25_000_000, 8, None, True),
        (25_000_000, 128, None, True),
        (25_000_000, 1, None, False),
        (10_000, 8, None, False),
        (25_000_000, 8, stated_rates(bandwidth=1e6, latency_s=0.1, ranks=8), False),
        (10_000, 8, SLOW_WORK, True),
    ],
)
def test_work_is_shared_where_the_cost_model_says_so(
    size: int, ranks: int, rates: Rates | None, pays: bool
) -> None:
    divided = divide(((size // 2, 4), (size - size // 2, 4)) * 2, ranks, True, rates)
    assert divided.pays == pays


def test_ranks_share_in_all_recorded_settings_that_gain_by_it() -> None:
    rows = [row for name in norms.RECORDS for row in norms.rows_of(f"norms_{name}")]
    for row in rows:
        shapes, rates = norms.MODELS[row["model"]](), None
        if "network" in row:
            network = norms.NETWORKS[row["network"]]
            here = norms.NODES[row["ranks"]]
            rates = stated_rates(ranks=row["ranks"], ranks_per_node=here, **network)
        sizes = tuple((math.prod(shape), 4) for shape in shapes) * 2
        assert divide(sizes, row["ranks"], True, rates).pays == row["chosen"]
        assert row["chosen"] or row["speedup"] < 1
    assert {row["chosen"] for row in rows} == {True, False}


def test_ranks_do_not_share_in_the_recorded_training_that_lost_by_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")
    example: Any = importlib.import_module("growing_images")
    rows = report.recorded()
    alone, shared = (
        report.step_parts(report.warm(report.of_kind(rows, kind)["Dense-SGD"], 12))["LARS"]
        for kind in ("existing", "throughput")
    )
    assert alone < shared / 2
    parameters = list(example.network(10).parameters())
    adapted = [parameter for parameter in parameters if parameter.ndim > 1]
    sizes = tuple((one.numel(), 4) for one in [*parameters, *adapted])
    assert not divide(sizes, 8, True, None).pays


@pytest.mark.parametrize(("crowding", "pays"), [(1.0, True), (4.0, True), (8.0, False)])
def test_ranks_that_share_cores_wait_longer(crowding: float, pays: bool) -> None:
    stated = stated_rates(bandwidth=1e9, latency_s=1e-4, ranks=8)
    rates = replace(stated, measured=True, crowding=crowding)
    assert divide(((25_000_000, 4), (25_000_000, 4)), 8, True, rates).pays == pays


def test_where_it_does_not_pay_ranks_compare_their_sizes_and_send_nothing_after_that() -> None:
    def on_rank(comm: Communicator) -> Tensor:
        sent = []
        for _ in range(3):
            rows = parallel(kernels.sums_of_squares, [torch.ones(1000)], comm, additive=True)
            sent.append(comm.traffic.bytes_sent)
        assert sent == [16] * 3
        return rows

    assert [rows.tolist() for rows in simulate(3, on_rank).results] == [[1000]] * 3


def test_tensors_of_any_layout_are_read_in_the_order_of_memory() -> None:
    shape = (64, 48, 5, 5)
    tensor = torch.randn(shape).contiguous(memory_format=torch.channels_last)
    expected = kernels.sums_of_squares([tensor.permute(0, 2, 3, 1).reshape(-1)])
    spread = torch.randn(8, 6)[:, ::2]  # not dense in memory
    tensors = [tensor, spread, torch.tensor(3.0)]
    for rows in everywhere(
        3, lambda comm: parallel(kernels.sums_of_squares, tensors, comm, additive=True)
    ):
        assert same_bits(rows[:1], expected)
        assert rows[1] == pytest.approx(float(spread.double().square().sum()))
        assert rows[2] == 9


def squares_on(comm: Communicator, seed: int) -> tuple[list[float], int]:
    comm.rates = SLOW_WORK
    before = comm.traffic.messages_sent
    tensors = [made(size, torch.float32, seed + size) for size in (300_000, 7, 65_536, 0, 100_000)]
    rows = parallel(kernels.sums_of_squares, tensors, comm, additive=True)
    return rows.tolist(), comm.traffic.messages_sent - before


@pytest.mark.processes
@on_engines_in_turn(world_size=(2, 3), seed=(0, 1))
def test_real_ranks_compute_the_same_bits(
    run_on: Callable[..., list[Any]], world_size: int, seed: int
) -> None:
    tensors = [made(size, torch.float32, seed + size) for size in (300_000, 7, 65_536, 0, 100_000)]
    for rows, sent in run_on(world_size, squares_on, seed):
        assert rows == kernels.sums_of_squares(tensors).tolist()
        assert sent > 0


TENSORS = [torch.ones(70), torch.ones(9)]
DIFFERENT: dict[str, Callable[[bool, Communicator], Tensor]] = {
    "sizes": lambda other, comm: parallel(
        kernels.sums_of_squares, [torch.ones(70 + other), torch.ones(9)], comm, additive=True
    ),
    "additive": lambda other, comm: parallel(kernels.sums_of_squares, TENSORS, comm, other),
    "operations": lambda other, comm: parallel(moments if other else extremes, TENSORS, comm),
    "rows": lambda other, comm: parallel(
        lambda own: torch.ones(len(own), 1 + other), TENSORS, comm
    ),
    "rates": lambda other, comm: parallel(kernels.sums_of_squares, TENSORS, comm, True),
}


@pytest.mark.parametrize(
    ("what", "pays"),
    [*((what, True) for what in DIFFERENT), ("sizes", False), ("additive", False)],
)
@pytest.mark.parametrize("world", [2, 5])
def test_ranks_that_disagree_are_told(what: str, pays: bool, world: int) -> None:
    errors: list[Exception] = []

    def on_rank(comm: Communicator) -> None:
        other = comm.rank == 1
        comm.rates = SLOW_WORK if pays and (what != "rates" or other) else None
        try:
            DIFFERENT[what](other, comm)
        except Exception as error:
            errors.append(error)
            raise

    with pytest.raises(MismatchError, match="rank 1 called parallel"):
        simulate(world, on_rank)
    assert [type(error) for error in errors] == [MismatchError] * world


def test_what_was_compared_keeps_no_communicator() -> None:
    def on_rank(comm: Communicator) -> weakref.ref[Communicator]:
        parallel(kernels.sums_of_squares, [torch.ones(70)], comm, additive=True)
        return weakref.ref(comm)

    kept = simulate(2, on_rank).results
    gc.collect()
    assert [one() for one in kept] == [None, None]


def test_a_rank_whose_operation_fails_tells_the_others() -> None:
    errors: dict[int, Exception] = {}

    def on_rank(comm: Communicator) -> None:
        def fail(own: Sequence[Tensor]) -> Tensor:
            if comm.rank == 1:
                raise ZeroDivisionError("no such norm")
            return kernels.sums_of_squares(own)

        try:
            parallel(fail, [torch.ones(70), torch.ones(9)], comm)
        except Exception as error:
            errors[comm.rank] = error

    everywhere(3, on_rank)
    assert isinstance(errors.pop(1), ZeroDivisionError)
    assert sorted(errors) == [0, 2]
    for error in errors.values():
        assert isinstance(error, CommunicationError)
        assert "rank 1 failed: no such norm" in str(error)


WRONG = [
    (lambda comm: parallel("norm", [torch.ones(1)], comm), "op must be a function"),
    (lambda comm: parallel(moments, [1.0], comm), "a tensor must be a Tensor, got 1.0"),
    (lambda comm: parallel(moments, [torch.ones(1)], comm, additive=2), "additive must be"),
    (lambda comm: parallel(torch.stack, [torch.eye(2).to_sparse()], comm), "must be strided"),
    (lambda comm: parallel(lambda _: torch.ones(3), [torch.ones(1)], comm), r"got \(3,\)"),
    (lambda comm: parallel(lambda _: 3, [torch.ones(1)], comm), r"1 tensors, got int"),
]


@pytest.mark.parametrize(("call", "message"), WRONG, ids=[message for _, message in WRONG])
def test_bad_arguments_are_refused(call: Callable[[Communicator], Tensor], message: str) -> None:
    def on_rank(comm: Communicator) -> None:
        with pytest.raises(InputError, match=message):
            call(comm)

    everywhere(1, on_rank)


def test_a_process_alone_needs_no_group() -> None:
    vectors = [torch.arange(3.0), torch.ones(5)]
    rows = parallel(kernels.sums_of_squares, vectors, additive=True)
    assert rows.tolist() == [5, 5]


def test_gradients_are_not_recorded() -> None:
    parameter = torch.ones(4, requires_grad=True)
    for rows in everywhere(2, lambda comm: parallel(torch.stack, [parameter, parameter], comm)):
        assert not rows.requires_grad
