"""On a GPU, which `tests.card` stands in for, an averager gives the updates of the CPU."""

from collections.abc import Callable

import pytest
import torch

import sparcel
from sparcel import simulate
from sparcel.comm import Communicator
from sparcel.schemes import Scheme
from sparcel.training import Averager, Scope
from tests.card import moved, on_card, seen
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
