"""A step in which any rank has NaN or Inf is void: all updates are NaN, no memory changes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import sparcel
from sparcel import simulate
from sparcel.core.comm import Communicator
from sparcel.core.schemes import Dense, Hierarchical, Scheme, TopK
from sparcel.core.training import Averager, Scope
from sparcel.core.training.residuals import FLUSH_STEPS
from tests.evenly import even_averager
from tests.sampling import meeting
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


@pytest.mark.parametrize(
    ("scheme", "name", "driver"),
    [
        (scheme, name, (at_once, in_turn)[(number + number // 5) % 2])
        for number, (scheme, name) in enumerate(meeting(SCHEMES, WORDS, each=2))
    ],
)
def test_a_void_step_leaves_no_trace(scheme: str, name: str, driver: Driver) -> None:
    make = SCHEMES[scheme]
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


KEPT_BACK: dict[str, Callable[[], Scheme]] = {
    **SCHEMES,
    "momentum": lambda: TopK(0.05, momentum=0.5),
    "clipped": lambda: TopK(0.05, clip=1e38),
    "uncompressed": lambda: TopK(1.0),
    "sparcml": lambda: sparcel.scheme("sparcml", density=0.05),
    "momentum on two levels": lambda: Hierarchical(TopK(0.05, momentum=0.5)),
}


VECTORS: list[tuple[torch.dtype, Scope]] = [
    (torch.float16, "bucket"),
    (torch.float16, "model"),
    (torch.bfloat16, "bucket"),
    (torch.float32, "model"),
]


@pytest.mark.parametrize(("scheme", "vector"), meeting(KEPT_BACK, VECTORS, each=1))
def test_a_scaled_average_that_overflows_makes_the_step_void_until_the_scale_is_small(
    scheme: str, vector: tuple[torch.dtype, Scope]
) -> None:
    """Memory gives up the gradients of several steps at once, and a scale multiplies their sum."""
    make, (dtype, scope) = KEPT_BACK[scheme], vector
    tensors = {"first": (40, 30), "second": (1300,), "bias": (40,)}
    like = {name: torch.zeros(shape, dtype=dtype) for name, shape in tensors.items()}
    largest = torch.finfo(dtype).max

    def on_rank(comm: Communicator) -> list[Named]:
        scaler = torch.amp.GradScaler("cpu", 2.0**10)
        scaler.scale(torch.ones(1))
        settings: dict[str, Any] = {"scaler": scaler, "scope": scope, "frontload": False}
        averager = even_averager(like, make(), group=comm, **settings)
        steps, voids = [], 0
        for _ in range(7):
            before = averager.handle.state_dict()
            real = min(0.3 * largest / 2.0**10, largest / scaler.get_scale() / 2)
            scaled = {n: torch.full_like(t, real * scaler.get_scale()) for n, t in like.items()}
            updates = in_turn(averager, scaled)
            finite = {bool(update.isfinite().all()) for update in updates.values()}
            assert len(finite) == 1, "all updates are void, or none"
            if finite == {False}:
                voids += 1
                after = averager.handle.state_dict()
                assert all(same_bits(before[key], after[key]) for key in before)
                scaler.update(scaler.get_scale() / 2)
            steps.append(updates)
        assert averager.handle.stats().void_steps == voids
        assert (voids > 0) == (averager.handle.memory_norm() > 0)
        assert steps[-1]["first"].isfinite().all()
        return steps

    first, *others = simulate(3, on_rank, ranks_per_node=1).results
    for other in others:
        for mine, theirs in zip(first, other, strict=True):
            assert all(same_bits(mine[name], theirs[name]) for name in like)


@pytest.mark.parametrize("scheme", [TopK(), TopK(clip=1.0), Hierarchical(TopK()), Dense()], ids=str)
def test_steps_are_void_while_backing_off_has_left_no_scale(scheme: Scheme) -> None:
    """As in a training that is lost: every step halves the scale, down to 0."""
    like = {"first": torch.zeros(40, 30)}
    owed = {
        "steps": torch.tensor(1),
        "world_size": torch.tensor(1),
        "rank0.first": torch.ones(1200),
    }

    def on_rank(comm: Communicator) -> None:
        scaler = torch.amp.GradScaler("cpu", 2.0**-122)
        scaler.scale(torch.ones(1))
        averager = even_averager(like, scheme, group=comm, scaler=scaler)
        averager.handle.load_state_dict(owed)
        while scaler.get_scale() > 0:
            scaler.update(scaler.get_scale() / 2)
            averager.average({"first": torch.full((40, 30), math.nan)})
        stats = averager.handle.stats()
        assert (stats.training_steps, stats.void_steps) == (1, 28), "the one that was loaded"

    simulate(3, on_rank, ranks_per_node=1)


def test_a_scaler_that_is_disabled_scales_nothing() -> None:
    gradient = {"first": torch.ones(40, 30)}

    def on_rank(comm: Communicator) -> None:
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        averager = even_averager(gradient, TopK(1.0), group=comm, scaler=scaler)
        assert torch.equal(averager.average(gradient)["first"], gradient["first"])

    simulate(2, on_rank)


def test_what_overflows_for_ever_without_a_scaler_can_be_flushed() -> None:
    like = {"first": torch.zeros(40, 30, dtype=torch.float16)}
    gradient = {"first": torch.full((40, 30), 20_000.0, dtype=torch.float16)}

    def on_rank(comm: Communicator) -> Tensor:
        averager = even_averager(like, TopK(0.05), group=comm, frontload=False)
        came_out, steps = torch.zeros(1200), 0
        while (update := averager.average(gradient)["first"]).isfinite().all():
            came_out += update.flatten().float()
            steps += 1
        for _ in range(3):
            assert averager.average(gradient)["first"].isnan().all()
        averager.handle.switch("dense")
        for _ in range(FLUSH_STEPS):
            came_out += averager.average(gradient)["first"].flatten().float()
        return came_out / (steps + FLUSH_STEPS)

    for mean in simulate(2, on_rank).results:
        torch.testing.assert_close(mean, torch.full((1200,), 20_000.0), rtol=1e-3, atol=0)
