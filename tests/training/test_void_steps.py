"""A step in which any rank has NaN or Inf is void: all updates are NaN, no memory changes."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sparcel import simulate
from sparcel.comm import Communicator
from sparcel.schemes import Scheme
from sparcel.training import Averager
from tests.evenly import even_averager
from tests.strategies import same_bits
from tests.training.tensors import SCHEMES, WORDS, Named, gradients_of, rows_of, schemes

Driver = Callable[[Averager, Named], Named]


def at_once(averager: Averager, gradients: Named) -> Named:
    return averager.average(gradients)


def in_turn(averager: Averager, gradients: Named) -> Named:
    """Queue each tensor as a vector of its own, and wait for each before the next is queued."""
    updates = {}
    for name, gradient in gradients.items():
        if gradient.is_sparse:
            averager.queue_rows(name, gradient)
        else:
            updates[name] = gradient.flatten().clone()
            averager.queue(updates[name], {name: (0, gradient.numel())}).wait()
    return {**updates, **averager.finish()}


drivers = pytest.mark.parametrize("driver", [at_once, in_turn])


def averager_of(scheme: Scheme, comm: Communicator) -> Averager:
    return even_averager(WORDS, scheme, group=comm, rows=["words"])


def gradients(rank: int, step: int) -> Named:
    return gradients_of(rank, step) | {"words": rows_of(rank, step)}


def poisoned(named: Named, name: str, value: float) -> Named:
    """Return the gradients with one element of one of them replaced."""
    tensor = named[name].clone().coalesce() if named[name].is_sparse else named[name].clone()
    (tensor.values() if tensor.is_sparse else tensor)[1, ...] = value
    return {**named, name: tensor}


def values_of(update: Tensor) -> Tensor:
    return update.coalesce().values() if update.is_sparse else update


def assert_void(updates: Named) -> None:
    assert updates.keys() == WORDS.keys()
    for name, update in updates.items():
        assert values_of(update).numel(), name
        assert values_of(update).isnan().all(), name


@drivers
@pytest.mark.parametrize("name", WORDS)
@schemes
def test_a_void_step_leaves_no_trace(make: Callable[[], Scheme], name: str, driver: Driver) -> None:
    value = {"first": math.nan, "bias": math.inf, "second": -math.inf}.get(name, math.nan)

    def on_rank(comm: Communicator) -> None:
        spoilt, fine = averager_of(make(), comm), averager_of(make(), comm)
        for averager in (spoilt, fine):
            driver(averager, gradients(comm.rank, 0))
        void = gradients(comm.rank, 7)
        assert_void(driver(spoilt, poisoned(void, name, value) if comm.rank == 1 else void))
        assert spoilt.handle.stats().training_steps == 1
        mine, theirs = spoilt.handle.state_dict(), fine.handle.state_dict()
        assert all(same_bits(mine[key], theirs[key]) for key in theirs)
        updates, expected = (driver(one, gradients(comm.rank, 1)) for one in (spoilt, fine))
        for key, update in updates.items():
            assert same_bits(values_of(update), values_of(expected[key]))

    simulate(3, on_rank, ranks_per_node=1)


@schemes
def test_rows_that_nobody_looked_up_say_that_the_step_is_void(make: Callable[[], Scheme]) -> None:
    def on_rank(comm: Communicator) -> None:
        nothing = torch.zeros(60, 4).to_sparse(1)
        void = gradients(comm.rank, 0) | {"words": nothing}
        assert_void(averager_of(make(), comm).average(poisoned(void, "bias", math.nan)))

    simulate(2, on_rank)


def test_repeated_rows_that_overflow_together_make_the_step_void() -> None:
    def on_rank(comm: Communicator) -> None:
        words = {"words": torch.zeros(6, 2, dtype=torch.float16)}
        averager = even_averager(words, SCHEMES["topk"](), group=comm, rows=["words"])
        large = torch.full((2, 2), 60_000.0, dtype=torch.float16)
        rows = torch.sparse_coo_tensor([[1, 1]], large, (6, 2), check_invariants=True)
        assert values_of(averager.average({"words": rows})["words"]).isnan().all()

    simulate(2, on_rank)


@pytest.mark.parametrize("name", WORDS)
def test_an_average_that_overflows_makes_the_step_void(name: str) -> None:
    def on_rank(comm: Communicator) -> None:
        averager = averager_of(SCHEMES["topk"](), comm)
        named = gradients(0, 0)
        largest = torch.finfo(named[name].dtype).max
        assert_void(averager.average(poisoned(named, name, largest)))

    simulate(2, on_rank)
