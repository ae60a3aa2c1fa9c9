"""Momentum correction by name, densities of parameters, and warm-up by steps, in DDP."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import sparcel
from sparcel.core.comm import Communicator
from sparcel.core.schemes import Hierarchical, OkTopK
from sparcel.errors import MismatchError
from tests.ddp.models import (
    LARGE,
    MANY_BUCKETS,
    SHAPES,
    Linear,
    assert_agreed,
    assert_conserved,
    gradient_sums,
    known_gradient,
    observe,
    residuals_of,
    train,
)
from tests.evenly import attach_evenly

pytestmark = pytest.mark.processes

Named = dict[str, Tensor]


def velocity_of(handle: sparcel.Handle, rank: int) -> Named:
    return residuals_of(handle, rank, "velocity")


def train_with_momentum(
    comm: Communicator, scheme: Any, unused_by: int | None = None, steps: int = 5, **settings: Any
) -> Named:
    """Return by name the gradients that entered the memory, less the updates and the memory.

    The sum over the ranks must be zero. The rank ``unused_by`` does not use "second".
    """
    unused = ["second"] if comm.rank == unused_by else []
    wrap = {**MANY_BUCKETS, **settings.pop("wrap", {})}
    ddp = DistributedDataParallel(Linear(), **wrap)
    handle = attach_evenly(ddp, scheme, **settings)
    left = {name: torch.zeros(math.prod(SHAPES[name]), dtype=torch.float64) for name in LARGE}
    for step in range(steps):
        velocity = velocity_of(handle, comm.rank)
        ddp.zero_grad()
        ddp(comm.rank, step, unused).backward()
        update = observe(ddp)
        for name, parameter in Linear().named_parameters():
            if name in LARGE:
                gradient = known_gradient(name, parameter, comm.rank, step).double().flatten()
                gradient *= name not in unused
                left[name] += 0.5 * velocity[name] + gradient - update[name]
    owed = residuals_of(handle, comm.rank)
    assert any(velocity_of(handle, comm.rank)[name].any() for name in LARGE)
    handle.close()
    return {name: left[name] - owed[name] for name in LARGE}


WITH_MOMENTUM: dict[str, dict[str, Any]] = {
    **{
        name: {"scheme": name, "momentum": 0.5}
        for name in ("bidirectional", "topk", "oktopk", "scalecom")
    },
    "oktopk between nodes": {"scheme": Hierarchical(OkTopK(momentum=0.5), 2)},
    "warm-up": {"scheme": "gtopk", "momentum": 0.5, "warmup": [1, 0.2], "warmup_steps": 2},
    "densities": {"scheme": "topk", "momentum": 0.5, "densities": {"second": 0.3}},
}


@pytest.mark.parametrize(
    ("name", "lasting"), [(name, number % 2 == 1) for number, name in enumerate(WITH_MOMENTUM)]
)
def test_velocity_follows_its_parameter(run_on: Any, name: str, lasting: bool) -> None:
    wrap = {"find_unused_parameters": lasting}  # buckets that DDP does not rebuild
    ranks = run_on(4, partial(train_with_momentum, wrap=wrap, **WITH_MOMENTUM[name]))
    for parameter in LARGE:
        assert not torch.stack([left[parameter] for left in ranks]).sum(0).any()


def test_velocity_is_kept_if_one_rank_of_a_node_does_not_use_a_parameter(run_on: Any) -> None:
    scheme = Hierarchical(OkTopK(momentum=0.5), 2)
    wrap = {"find_unused_parameters": True}
    ranks = run_on(4, partial(train_with_momentum, scheme=scheme, unused_by=1, wrap=wrap))
    for parameter in LARGE:
        assert not torch.stack([left[parameter] for left in ranks]).sum(0).any()


def momentum_of_one_bucket(comm: Communicator, steps: int) -> list[tuple[Named, Named, Named]]:
    """Return updates, residuals and velocities of steps without rebuilt buckets."""
    ddp = DistributedDataParallel(Linear(), find_unused_parameters=True)
    handle = attach_evenly(ddp, "topk", density=0.02, momentum=0.5)
    seen = []
    for step in range(steps):
        ddp.zero_grad()
        ddp(comm.rank, step).backward()
        owed, velocity = residuals_of(handle, comm.rank), velocity_of(handle, comm.rank)
        seen.append((observe(ddp), owed, velocity))
    handle.close()
    return seen


def test_momentum_correction_follows_the_formula_of_dgc(run_on: Any) -> None:
    """u = m·u + g; v = v + u; send the top of v; clear u and v there. One rank: update = sent."""
    (seen,) = run_on(1, momentum_of_one_bucket, 5)
    size = sum(math.prod(SHAPES[name]) for name in LARGE)
    k = math.ceil(0.02 * sum(math.prod(shape) for shape in SHAPES.values()))
    u, v = torch.zeros(size, dtype=torch.float64), torch.zeros(size, dtype=torch.float64)
    for step, (update, owed, velocity) in enumerate(seen):
        parameters = dict(Linear().named_parameters())
        gradient = [known_gradient(name, parameters[name], 0, step) for name in LARGE]
        u = 0.5 * u + torch.cat([part.double().flatten() for part in gradient])
        v = v + u
        sent = torch.cat([update[name] for name in LARGE])
        places = sent.nonzero()[:, 0]
        assert len(places) == k
        rest = v.abs().index_fill(0, places, 0)
        assert rest.max() <= sent[places].abs().min()
        assert torch.equal(sent[places], v[places])
        u[places], v[places] = 0, 0
        assert torch.equal(torch.cat([owed[name] for name in LARGE]), v)
        assert torch.equal(torch.cat([velocity[name] for name in LARGE]), u)


def weights_of(comm: Communicator, corrected: bool) -> Named:
    """Train with momentum: the optimiser's, or the scheme's for the sparse parameters."""
    ddp, momentum = DistributedDataParallel(Linear(), **MANY_BUCKETS), 0.5
    handle, sparse = None, frozenset[str]()
    if corrected:
        handle = attach_evenly(ddp, "topk", density=1.0, momentum=momentum)
        sparse = handle.sparse
    optimizer = torch.optim.SGD(
        [
            {"params": parameter, "momentum": 0 if name in sparse else momentum}
            for name, parameter in ddp.module.named_parameters()
        ],
        lr=0.25,
    )
    for step in range(4):
        ddp.zero_grad()
        ddp(comm.rank, step).backward()
        optimizer.step()
    if handle is not None:
        assert sparse == set(LARGE)
        handle.close()
    return {name: parameter.detach() for name, parameter in ddp.module.named_parameters()}


def test_momentum_of_all_coordinates_is_the_optimisers(run_on: Any) -> None:
    plain, corrected = run_on(4, weights_of, False), run_on(4, weights_of, True)
    for mine, theirs in zip(corrected, plain, strict=True):
        for name in theirs:
            assert torch.equal(mine[name], theirs[name]), name


DENSITIES = {"second": 0.5, "s*": 0.9, "*ir*": 1, "bias": 0.25}
""""first" and "third" match only the third pattern, "second" matches the first two."""


def test_a_density_of_one_leaves_a_gradient_dense_and_the_first_match_wins(run_on: Any) -> None:
    plain = run_on(2, partial(train, scheme=None))
    ranks = run_on(2, partial(train, scheme="topk", densities=DENSITIES, wrap=MANY_BUCKETS))
    assert_agreed(ranks)
    assert_conserved(ranks, gradient_sums(2, passes=4))
    for trained in ranks:
        assert set(trained.residuals) == {"second", "bias"}  # even if the policy keeps biases dense
        for name in ("first", "third", "norm"):
            assert torch.equal(trained.updates[name], plain[0].updates[name])


def selected(comm: Communicator, densities: dict[str, float]) -> dict[str, int]:
    """Return by name the number of coordinates of one rank's first update."""
    shapes = {"first": (40, 64), "second": (30, 100), "third": (50, 50)}
    ddp = DistributedDataParallel(Linear(shapes))
    handle = attach_evenly(ddp, "topk", density=0.01, densities=densities)
    ddp(comm.rank, 0).backward()
    counts = {name: int(update.count_nonzero()) for name, update in observe(ddp).items()}
    handle.close()
    return counts


def test_each_parameter_sends_the_share_that_it_is_given(run_on: Any) -> None:
    counts = run_on(1, selected, {"second": 0.5, "*i*": 0.002})[0]
    assert counts == {"first": 6, "second": 1500, "third": 5}


@pytest.mark.parametrize("scheme", ["bidirectional", "oktopk", "hitopk"])
def test_densities_with_every_collective_lose_nothing(run_on: Any, scheme: str) -> None:
    settings: dict[str, Any] = {"ranks_per_node": 2} if scheme == "hitopk" else {}
    densities = {"second": 0.3, "third": 0.001}
    program = partial(train, scheme=scheme, densities=densities, wrap=MANY_BUCKETS, **settings)
    ranks = run_on(4, program)
    assert_agreed(ranks)
    assert_conserved(ranks, gradient_sums(4, passes=4))


def attach_differently(comm: Communicator) -> str:
    densities = {"second": 0.1 if comm.rank == 1 else 0.2}
    with pytest.raises(MismatchError) as raised:
        attach_evenly(DistributedDataParallel(Linear()), "topk", densities=densities)
    return str(raised.value)


def test_ranks_with_different_densities_are_refused(run_on: Any) -> None:
    for rank, said in enumerate(run_on(2, attach_differently)):
        assert f"ranks [{1 - rank}] average something else than rank {rank}" in said
        assert "densities" in said


COORDINATES = sum(math.prod(shape) for shape in SHAPES.values())
SMALL = sum(math.prod(shape) for name, shape in SHAPES.items() if name not in LARGE)


def warm_up(comm: Communicator, resumed: bool, passes: int) -> tuple[list[int], int]:
    """Return the number of coordinates to select in each step, and the number of steps counted.

    A step accumulates the gradients of ``passes`` backward passes. In the second step a gradient is
    not finite. If ``resumed``, a new model continues after the third step.
    """
    schedule = {"warmup": [1, 0.25], "warmup_steps": 2, "density": 0.01}
    attach = partial(sparcel.attach, scheme_or_name="topk", **schedule)
    ddp = DistributedDataParallel(Linear())
    handle, asked = attach(ddp), []
    for step in range(7):
        if resumed and step == 3:
            state = handle.state_dict()
            handle.close()
            ddp = DistributedDataParallel(Linear())
            handle = attach(ddp)
            handle.load_state_dict(state)
        ddp.zero_grad()
        for _ in range(passes - 1):
            with ddp.no_sync():
                ddp(comm.rank, step).backward()
        ddp(comm.rank, step, poison=("second", math.nan) if step == 1 else None).backward()
        asked.append(handle.stats().last.asked)
    steps = handle.stats().training_steps
    handle.close()
    return asked, steps


@pytest.mark.parametrize(("resumed", "passes"), [(False, 1), (True, 1), (False, 3)])
def test_warm_up_counts_the_optimisers_steps_that_took_effect(
    run_on: Any, resumed: bool, passes: int
) -> None:
    quarter, least = (math.ceil(COORDINATES / share) + SMALL for share in (4, 100))
    expected = [*[COORDINATES] * 3, quarter, quarter, least, least]
    assert run_on(2, warm_up, resumed, passes) == [(expected, 6)] * 2


def test_uncompressed_steps_are_plain_ddp(run_on: Any) -> None:
    plain = run_on(4, partial(train, scheme=None, steps=3, wrap=MANY_BUCKETS))
    schedule = {"warmup": [1], "warmup_steps": 3}
    for scheme in ("oktopk", "scalecom"):
        program = partial(train, scheme=scheme, steps=3, wrap=MANY_BUCKETS, **schedule)
        for mine, theirs in zip(run_on(4, program), plain, strict=True):
            assert not any(owed.any() for owed in mine.residuals.values())
            for name, update in theirs.updates.items():
                assert torch.equal(mine.updates[name], update)
