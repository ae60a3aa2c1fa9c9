"""On a GPU, which `tests.card` stands in for, an averager gives the updates of the CPU."""

from collections.abc import Callable
from functools import partial

import pytest
import torch

import sparcel
from sparcel import simulate
from sparcel.core import device
from sparcel.core.comm import Communicator
from sparcel.core.regions import Returned
from sparcel.core.schemes import SPARSER, Scheme, sparsifier
from sparcel.core.stream import WRITTEN
from sparcel.core.training import Averager, Scope, Stats
from sparcel.errors import FormatError
from tests.card import Launches, launches, moved, on_card, seen
from tests.strategies import same_bits
from tests.training.tensors import TENSORS, Named, gradients_of

pytest.importorskip("triton")

STEPS = 3
VOID = 1
"""In this step a gradient of rank 1 has an infinite entry."""

SCHEMES: dict[str, Callable[[], Scheme]] = {
    "dense": lambda: sparcel.scheme("dense"),
    "bidirectional": lambda: sparcel.scheme(**SPARSER),
    "corrected": lambda: sparcel.scheme("topk", density=0.05, momentum=0.9, clip=1.0),
}


def train(comm: Communicator, name: str, scope: Scope, gpu: bool) -> tuple[list[Named], float]:
    """Return the updates of some steps, and what the last one took out of memory."""

    def put(named: Named) -> Named:
        return {key: moved(one) if gpu else one for key, one in named.items()}

    averager = Averager(
        put(TENSORS), SCHEMES[name](), group=comm, scope=scope, frontload=scope == "model"
    )
    updates = []
    for step in range(STEPS):
        gradients = gradients_of(comm.rank, step)
        if step == VOID and comm.rank == 1:
            gradients["third"][7] = torch.inf
        update = averager.average(put(gradients))
        updates.append({key: seen(one).clone() for key, one in update.items()})
    return updates, averager.handle.stats().last.magnitude


@pytest.mark.parametrize(
    ("name", "scope"),
    [
        ("dense", "bucket"),
        ("bidirectional", "model"),
        ("corrected", "bucket"),
    ],
)
def test_updates_are_those_of_the_cpu(name: str, scope: Scope) -> None:
    expected = simulate(2, lambda comm: train(comm, name, scope, gpu=False), ranks_per_node=1)
    with on_card():
        found = simulate(2, lambda comm: train(comm, name, scope, gpu=True), ranks_per_node=1)
    for (updates, taken), (there, taken_there) in zip(expected.results, found.results, strict=True):
        for step, (one, other) in enumerate(zip(updates, there, strict=True)):
            if step == VOID:
                assert all(update.isnan().all() for update in other.values())
            else:
                assert all(same_bits(one[key], other[key]) for key in one)
        assert taken_there == pytest.approx(taken, rel=1e-5)


BUCKETS = [[f"{layer}.{part}" for part in ("weight", "bias")] for layer in range(4)]


def left_on_card(finite: bool, fault: bool = False) -> Returned:
    """Return flags and counts of an exchange, which stay on the device, as does a fault."""
    device.later(moved(torch.tensor(fault)), lambda: FormatError("a bad message"))
    flag, sent, entries = map(moved, map(torch.tensor, (finite, 5, 7)))
    up, down = map(moved, torch.tensor([3.0, -0.5], dtype=torch.float64))
    return Returned(WRITTEN, flag, sent, entries, (up, down))


def step_of(
    comm: Communicator, exchanges: list[Callable[[], Returned]]
) -> tuple[list[torch.Tensor], Stats, int, Launches]:
    """Return the updates, the costs, the waits and the launches of a step of four buckets."""
    shapes = {"weight": (40, 30), "bias": (40,)}
    tensors = {
        name: moved(torch.zeros(shapes[name.split(".")[1]])) for names in BUCKETS for name in names
    }
    averager = Averager(tensors, sparcel.scheme(**SPARSER), group=comm, frontload=False)
    vectors = [moved(torch.ones(1240)) for _ in BUCKETS]
    before, coming = device.reads(), iter(exchanges)
    with pytest.MonkeyPatch.context() as patch, launches() as given:
        patch.setattr(sparsifier, "exchange_regions", lambda *_: next(coming)())
        for vector, (weight, bias) in zip(vectors, BUCKETS, strict=True):
            averager.queue(vector, {weight: (0, 1200), bias: (1200, 1240)})
        averager.finish()
    reads = device.reads() - before
    return [seen(vector) for vector in vectors], averager.handle.stats(), reads, given


@pytest.mark.parametrize("finite", [True, False])
def test_the_host_looks_once_a_step(finite: bool) -> None:
    exchanges = [partial(left_on_card, one) for one in (True, True, finite, True)]
    with on_card():
        ((updates, stats, reads, given),) = simulate(
            1, lambda comm: step_of(comm, exchanges)
        ).results
    assert reads <= 2  # the carrier also reads the small tensors, to send them from the host
    assert given.kernels() <= 20 + len(BUCKETS) * (not finite)
    assert stats.void_steps == (not finite)
    assert stats.last.selected == 4 * (5 + 40)
    assert stats.last.reduced == 4 * (7 + 40)
    assert stats.last.magnitude == (10 if finite else 0)
    for update in updates:
        assert update.isfinite().all() if finite else update.isnan().all()


def test_a_fault_that_a_bucket_left_on_the_card_is_raised_at_the_steps_end() -> None:
    exchanges = [partial(left_on_card, True, place == 0) for place in range(4)]
    with on_card(), pytest.raises(FormatError, match="a bad message"):
        simulate(1, lambda comm: step_of(comm, exchanges))
