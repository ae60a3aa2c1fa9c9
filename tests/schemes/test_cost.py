"""The cost of a step: its bytes are bounded, and it allocates no tensors as large as the vector."""

from itertools import pairwise, product

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import sparcel
from sparcel import simulate
from sparcel.core.schemes import Request
from sparcel.core.selectors import SELECTORS
from tests.collectives.test_traffic import COSTS, evaluate
from tests.sampling import meeting
from tests.schemes.steps import normal

SETTINGS = {
    "allgather": ("topk", {"density": 0.01, "algorithm": "allgather"}),
    "recursive_doubling": ("topk", {"density": 0.01, "algorithm": "recursive_doubling"}),
    "split_allgather": ("topk", {"density": 0.01, "algorithm": "split_allgather"}),
    "ring": ("topk", {"density": 0.01, "algorithm": "ring"}),
    "gtopk": ("gtopk", {"density": 0.01}),
    "sparcml 4 bits": ("sparcml", {"density": 0.4, "bits": 4}),
    "sparcml 8 bits": ("sparcml", {"density": 0.01, "bits": 8}),
}


def uniform(rank, step, size):
    return normal(rank, step, size)


def skewed(rank, step, size):
    """Return a gradient with all large values in one range, the same on all ranks."""
    gradient = normal(rank, step, size) / 1000
    gradient[size // 3 : size // 3 + size // 50] *= 10_000
    return gradient


def moving(rank, step, size):
    """Return a gradient whose large values lie elsewhere on each rank and in each step."""
    gradient = normal(rank, step, size) / 1000
    start = (step * 997 + rank * 131) % (size - size // 50)
    gradient[start : start + size // 50] *= 10_000
    return gradient


def constant(rank, step, size):
    return torch.full((size,), 1.0 + rank)


@pytest.mark.parametrize(
    ("setting", "place"),
    meeting(SETTINGS, product([2, 3, 8, 13], [uniform, skewed, moving, constant]), each=6),
)
def test_every_step_stays_within_the_bound_of_the_page(setting, place):
    world, gradient = place
    size, (name, settings) = 5000, SETTINGS[setting]
    count = round(settings["density"] * size)
    row = COSTS["split_allgather" if name == "sparcml" else setting]

    def on_rank(comm):
        scheme, volumes, messages = sparcel.scheme(name, **settings), [0], [0]
        request = Request()
        for step in range(5):
            scheme.step(gradient(comm.rank, step, size), comm, request=request)
            volumes.append((comm.traffic.bytes_sent, comm.traffic.bytes_received))
            messages.append(comm.traffic.messages_sent)
        assert request.costs.selected <= 5 * count
        sent, received = zip((0, 0), *volumes[1:], strict=True)
        return [max(steps(sent), steps(received)), steps(messages)]

    for volume, messages in simulate(world, on_rank).results:
        assert volume <= evaluate(row["bytes, at most"], world, size, count, 4)
        assert messages <= evaluate(row["messages"], world, size, count, 4)


def steps(totals):
    """Return the largest increase."""
    return max(b - a for a, b in pairwise(totals))


class Allocations(TorchDispatchMode):
    """Records storages of at least ``elements`` elements that torch operations allocate."""

    def __init__(self, elements, known):
        super().__init__()
        self.elements, self.made = elements, []
        self._known = {tensor.untyped_storage().data_ptr() for tensor in known}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        inputs = {
            leaf.untyped_storage().data_ptr()
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, torch.Tensor)
        }
        for leaf in tree_leaves(result):
            if not isinstance(leaf, torch.Tensor):
                continue
            storage = leaf.untyped_storage()
            if storage.data_ptr() in inputs | self._known:
                continue
            if storage.nbytes() >= self.elements:  # a byte for each element, as in masks
                self.made.append((str(function), tuple(leaf.shape), leaf.dtype))
        return result


SPARSE_WORK = {
    **{name: SETTINGS[name] for name in SETTINGS if "bits" not in name},
    "bidirectional": ("bidirectional", {"format": "packed:4"}),
    "oktopk": ("oktopk", {}),
    "oktopk reuse": ("oktopk", {"threshold": "reuse", "threshold_steps": 2}),
    "scalecom": ("scalecom", {"beta": 0.5}),
    "hitopk": ("hitopk", {}),  # with one rank a node
    "momentum": ("gtopk", {"momentum": 0.5, "clip": 1.0}),
    **{name: ("topk", {"selector": name}) for name in SELECTORS},
}


@pytest.mark.parametrize(("setting", "world"), meeting(SPARSE_WORK, [1, 2, 5], each=1))
def test_steady_state_allocates_nothing_as_large_as_the_vector(setting, world):
    """Only the update is allowed, if no ``out`` is given; not even a mask of bytes is.

    The copy that an owner makes of its region is smaller: regions are of about the same size.
    """
    size, (name, settings) = 200_000, SPARSE_WORK[setting]

    def on_rank(comm):
        scheme = sparcel.scheme(name, **(settings | {"density": 0.002}))
        out = torch.empty(size)
        gradients = [normal(comm.rank, step, size) for step in range(4)]
        for gradient in gradients[:2]:
            scheme.step(gradient, comm, out)
        with Allocations(size, [out, *gradients]) as allocations:
            for gradient in gradients[2:]:
                scheme.step(gradient, comm, out)
        made_with_out = list(allocations.made)
        with Allocations(size, [out, *gradients]) as allocations:
            scheme.step(gradients[0], comm)
        return made_with_out, allocations.made

    for with_out, without in simulate(world, on_rank).results:
        assert with_out == []
        assert [shape for _, shape, _ in without] == [(size,)]


def test_the_hook_that_counts_allocations_sees_them():
    with Allocations(1000, []) as allocations:
        torch.zeros(1000, dtype=torch.bool)
        torch.zeros(100)
        torch.ones(2000).view(40, 50)
    assert [shape for _, shape, _ in allocations.made] == [(1000,), (2000,)]
