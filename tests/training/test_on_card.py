"""On a GPU, which `tests.card` stands in for, an averager gives the updates of the CPU."""

from collections.abc import Callable

import pytest
import torch

import sparcel
from sparcel import device, simulate
from sparcel.comm import Communicator
from sparcel.regions.exchange import Returned
from sparcel.schemes import Scheme, sparsifier
from sparcel.stream import WRITTEN
from sparcel.training import Averager, Costs, Scope
from tests.card import Launches, launches, moved, on_card, seen
from tests.strategies import same_bits
from tests.training.tensors import TENSORS, Named, gradients_of

pytest.importorskip("triton")

STEPS = 3
VOID = 1
"""In this step a gradient of rank 1 has an infinite entry."""

SCHEMES: dict[str, Callable[[], Scheme]] = {
    "dense": lambda: sparcel.scheme("dense"),
    "bidirectional": lambda: sparcel.scheme(),
    "oktopk": lambda: sparcel.scheme("oktopk", density=0.1, format="packed:4"),
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
        ("oktopk", "bucket"),
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


def step_of(
    comm: Communicator, finite: bool, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[torch.Tensor], Costs, int, Launches]:
    """Return the updates, costs, waits and launches of a step whose exchanges do nothing.

    They leave flags and counts on the device. The last bucket's flag is ``finite``.
    """
    shapes = {"weight": (40, 30), "bias": (40,)}
    tensors = {
        name: moved(torch.zeros(shapes[name.split(".")[1]])) for names in BUCKETS for name in names
    }
    averager = Averager(tensors, sparcel.scheme(), group=comm, frontload=False)
    flags = [True, True, True, finite]
    left = [
        Returned(
            WRITTEN,
            moved(torch.tensor(flag)),
            moved(torch.tensor(5)),
            moved(torch.tensor(7)),
            moved(torch.tensor(2.5, dtype=torch.float64)),
        )
        for flag in flags
    ]
    vectors = [moved(torch.ones(1240)) for _ in BUCKETS]
    monkeypatch.setattr(sparsifier, "exchange_regions", lambda *_: left.pop(0))
    before = device.reads()
    with launches() as given:
        for vector, (weight, bias) in zip(vectors, BUCKETS, strict=True):
            averager.queue(vector, {weight: (0, 1200), bias: (1200, 1240)})
        averager.finish()
    reads = device.reads() - before
    stats = averager.handle.stats()
    assert stats.void_steps == (not finite)
    return [seen(vector) for vector in vectors], stats.last, reads, given


@pytest.mark.parametrize("finite", [True, False])
def test_the_host_looks_once_a_step(finite: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with on_card():
        (rank,) = simulate(1, lambda comm: step_of(comm, finite, monkeypatch)).results
    updates, costs, reads, given = rank
    assert reads <= 2  # the carrier also reads the small tensors, to send them from the host
    assert given.kernels() <= 20 + 4 * (not finite)
    assert costs.selected == 4 * 5 + 4 * 40
    assert costs.reduced == 4 * 7 + 4 * 40
    assert costs.magnitude == (10 if finite else 7.5)
    for update in updates:
        assert update.isfinite().all() if finite else update.isnan().all()
