"""On a GPU: every scheme does there what it does on the CPU, and the host waits where it must.

The GPU is that of `tests.card`, which raises wherever else the host would wait for it.
"""

from functools import partial

import pytest
import torch

import sparcel
from sparcel import simulate
from sparcel.core import device
from sparcel.core.schemes import SPARSER, Hierarchical
from tests.card import launches, moved, on_card, seen
from tests.schemes.steps import DISTINCT, SCHEMES
from tests.strategies import same_bits

pytest.importorskip("triton")

SIZE = 400
LONG = {"scalecom": 20_000}
"""Sizes for paths that only long vectors take: a broadcast that is scattered."""

SELECTORS = {
    f"topk {name}": partial(sparcel.scheme, "topk", density=0.1, selector=name)
    for name in ("mstopk", "bucketed", "chunkwise", "reuse", "randomk")
}
OTHERS = {
    "dgc": partial(sparcel.scheme, "dgc", density=0.1, clip=1.0),
    "bidirectional between nodes": lambda: Hierarchical(sparcel.scheme(**SPARSER)),
    "chunked indices": partial(sparcel.scheme, "topk", density=0.3, format="chunked"),
}
BY_REGIONS = (
    "bidirectional 4 bits",
    "bidirectional 5 bits, all in 8",
    "bidirectional dense 2 and 6 bits",
    "bidirectional dense 4 bits, not 8",
)
"""Both phases select; the second one does not; neither does; the first one does not."""
MIXED = "bidirectional 3 bits, exact answer"
"""What compiled passes leave to the definition in the second phase."""

OWN = dict.fromkeys((*DISTINCT, *BY_REGIONS, MIXED, "scalecom", "warm-up"))
ALL = {name: SCHEMES[name] for name in OWN} | SELECTORS | OTHERS
WORLDS = [
    (name, 4 if "hitopk" in name or "nodes" in name else 2 + (place % 6 == 0 or name in LONG))
    for place, name in enumerate(ALL)
]


MOST_READS = {
    # the headers, the sum, and whether it is finite
    "dense": 3,
    # what is selected, the message, the length of the sum, whether it is finite
    "topk": 4,
    "topk packed 4 bits": 4,
    # both messages, which travel by way of the host, and whether it is finite
    **dict.fromkeys(BY_REGIONS, 3),
    # of the leader, of the tree's root, and with regions: see docs/how-to/gpu.md
    "scalecom": 9,
    "gtopk": 10,
    "oktopk by regions": 12,
}
"""How often the host waits in a step of these schemes, at most, on up to four ranks."""

MOST_LAUNCHES = {
    # 7 for the selection, 1 for the message, 5 for the sum, 1 for the average, 2 for the update
    "topk": (24, 2),
    # also 1 for rounding, 2 for packing, and 5 for what rounding takes; 4 unpack a message
    "topk packed 4 bits": (36, 4),
    # the three passes, the zeros of a new memory, and what joins the step's flags and counts
    "bidirectional 4 bits": (4 + 7 + 3 + 2, 0),
    "bidirectional 5 bits, all in 8": (4 + 5 + 2 + 2, 0),
    "bidirectional dense 2 and 6 bits": (2 + 2 + 2 + 2, 0),
    "bidirectional dense 4 bits, not 8": (2 + 6 + 3 + 2, 0),
}
"""How many kernels such a step gives a card, at most, and how many more for each other rank."""

SEVERAL_STEPS = {*MOST_READS, "topk reuse", "warm-up", "dgc", "hitopk", "auto"}


def steps_of(name, world, gpu):
    """Do one or two steps; return each rank's updates, memory, and the most waits and launches."""

    size = LONG.get(name, SIZE)

    def program(comm):
        scheme, updates, waits, kernels = ALL[name](), [], [], []
        for step in range(1 + (name in SEVERAL_STEPS)):
            generator = torch.Generator().manual_seed(100 * step + comm.rank)
            shared = torch.randn(size, generator=torch.Generator().manual_seed(step))
            gradient = shared + torch.randn(size, generator=generator)
            before = device.reads()
            with launches() as counted:
                update = scheme.step(moved(gradient) if gpu else gradient, comm)
            waits.append(device.reads() - before)
            kernels.append(counted.kernels())
            updates.append(seen(update).clone())
        memory = None if scheme.memory is None else seen(scheme.memory).clone()
        return updates, memory, max(waits), max(kernels)

    return simulate(world, program, ranks_per_node=2 if world % 2 == 0 else 1).results


@pytest.mark.parametrize(("name", "world"), WORLDS)
def test_steps_have_the_bits_of_the_cpu(name, world):
    expected = steps_of(name, world, gpu=False)
    with on_card():
        found = steps_of(name, world, gpu=True)
    for (updates, memory, *_), (there, kept, waits, kernels) in zip(expected, found, strict=True):
        assert waits <= MOST_READS.get(name, waits)
        own, more = MOST_LAUNCHES.get(name, (kernels, 0))
        assert kernels <= own + more * (world - 1)
        assert all(map(same_bits, updates, there))
        assert (memory is None) == (kept is None)
        assert memory is None or same_bits(memory, kept)
