"""Helpers for the tests of schemes: schemes by name, gradients, and steps on simulated ranks."""

from functools import partial

import torch
from hypothesis import settings

import sparcel
from sparcel import simulate
from sparcel.core.collectives.oktopk import topk_by_regions
from sparcel.core.schemes import Auto, GTopK, Hierarchical, OkTopK, ScaleCom
from sparcel.core.schemes.selecting import put_back


class OkTopKByRegions(OkTopK):
    """Sums regions, also where the vector is so small that gathering is cheaper."""

    def _exchange(self, selection, wire):
        found = topk_by_regions(selection.sent, wire, selection.k, selection.most)
        return put_back(found, selection, wire, self.put_back)


BIDIRECTIONAL = partial(sparcel.scheme, "bidirectional")

SCHEMES = {
    "dense": partial(sparcel.scheme, "dense"),
    "topk": partial(sparcel.scheme, "topk", density=0.1),
    "topk ring": partial(sparcel.scheme, "topk", density=0.1, algorithm="ring"),
    "topk allgather": partial(sparcel.scheme, "topk", density=0.3, algorithm="allgather"),
    "topk split": partial(sparcel.scheme, "topk", density=0.4, algorithm="split_allgather"),
    "sparcml": partial(sparcel.scheme, "sparcml", density=0.02),
    "sparcml 4 bits": partial(sparcel.scheme, "sparcml", density=0.4, bits=4),
    "topk packed 4 bits": partial(sparcel.scheme, "topk", density=0.1, format="packed:4"),
    "topk half bits": partial(sparcel.scheme, "topk", density=1, format="raw:bfloat16"),
    "bidirectional": partial(BIDIRECTIONAL, density=0.1),
    "bidirectional 4 bits": partial(BIDIRECTIONAL, density=0.1, format="packed:4"),
    "bidirectional 5 bits, all in 8": partial(
        BIDIRECTIONAL, density=0.2, returned=1, format="packed:5", answer="packed:8"
    ),
    "bidirectional dense 2 and 6 bits": partial(
        BIDIRECTIONAL, density=0.99, format="packed:2", answer="packed:6"
    ),
    "bidirectional dense 4 bits, not 8": partial(
        BIDIRECTIONAL, density=0.8, returned=0.8, format="packed:4", answer="packed:8"
    ),
    "bidirectional 3 bits, exact answer": partial(
        BIDIRECTIONAL, density=0.3, format="packed:3", answer="packed"
    ),
    "gtopk": partial(sparcel.scheme, "gtopk", density=0.1),
    "gtopk dense": partial(sparcel.scheme, "gtopk", density=0.9),
    "oktopk": partial(sparcel.scheme, "oktopk", density=0.1),
    "oktopk by regions": lambda: OkTopKByRegions(0.1),
    "oktopk by regions dense": lambda: OkTopKByRegions(0.7),
    "gtopk 8 bits": partial(sparcel.scheme, "gtopk", density=0.1, format="packed:8"),
    "oktopk by regions 2 bits": lambda: OkTopKByRegions(0.2, format="packed:2"),
    "oktopk 4 bits": partial(sparcel.scheme, "oktopk", density=0.1, format="packed:4"),
    "oktopk dense": partial(sparcel.scheme, "oktopk", density=0.7),
    "oktopk reuse": partial(
        sparcel.scheme, "oktopk", density=0.1, threshold="reuse", threshold_steps=2
    ),
    "scalecom": partial(sparcel.scheme, "scalecom", density=0.1),
    "scalecom filtered": partial(sparcel.scheme, "scalecom", density=0.1, beta=0.5, beta_steps=2),
    "scalecom 4 bits": partial(sparcel.scheme, "scalecom", density=0.1, format="packed:4"),
    "hitopk 4 bits": partial(sparcel.scheme, "hitopk", density=0.1, format="packed:4"),
    "hitopk": partial(sparcel.scheme, "hitopk", density=0.1),
    "torus2d": partial(sparcel.scheme, "torus2d"),
    "gtopk between nodes": lambda: Hierarchical(GTopK(0.1)),
    "scalecom between nodes": lambda: Hierarchical(ScaleCom(0.1, beta=0.5)),
    "warm-up": partial(sparcel.scheme, "topk", density=0.05, warmup=[1, 0.5], warmup_steps=1),
    "auto": partial(sparcel.scheme, "auto", density=0.1, format="auto"),
    "auto 4 bits": partial(sparcel.scheme, "auto", density=0.1, format="packed:4"),
    "auto dense": partial(sparcel.scheme, "auto", candidates=["dense"]),
    "auto gtopk": partial(sparcel.scheme, "auto", density=0.1, candidates=["gtopk"]),
    "auto between nodes": lambda: Hierarchical(Auto(0.1, candidates=["oktopk"])),
}

# There are many schemes, which share most of their code and reach other ranks through collectives
# alone. So each of them meets few examples, and some of the worlds, culprits and dtypes.
few_examples = settings(max_examples=settings.default.max_examples // 3)

DISTINCT = [
    *("dense", "topk", "topk packed 4 bits", "sparcml 4 bits", "bidirectional 4 bits", "gtopk"),
    *("oktopk by regions", "oktopk reuse", "scalecom filtered", "hitopk", "auto"),
    "scalecom between nodes",
]
"""Schemes that share no path through a step, for tests that do not ask what a method adds up.
`test_invariants.py` asks that of all of them."""

SPARSE = [name for name in DISTINCT if SCHEMES[name]().remembers]

# Schemes whose sums of small integers are exact, at any P that is a power of two.
EXACT = [name for name in SCHEMES if "bits" not in name]


def integers(rank, step, size, dtype=torch.float32):
    """Return a gradient of small integers, different at each rank, step and place."""
    place = torch.arange(size)
    return ((5 * place + 7 * rank + place * rank + 3 * step + place * step) % 9 - 4).to(dtype)


def zeros(rank, step, size, dtype=torch.float32):
    """Return a gradient of zeros."""
    return torch.zeros(size, dtype=dtype)


def equal(rank, step, size, dtype=torch.float32):
    """Return a gradient of equal values."""
    return torch.full((size,), 1 + (rank + step) % 3, dtype=dtype)


def one_rank(rank, step, size, dtype=torch.float32):
    """Return integers on one rank, a different one in each step, and zeros on the others."""
    return integers(rank, step, size, dtype) * (rank == step)


def skewed(rank, step, size, dtype=torch.float32):
    """Return integers in the last tenth of the vector and zeros before."""
    gradient = integers(rank, step, size, dtype)
    gradient[: size - size // 10] = 0
    return gradient


INTEGERS = [integers, zeros, equal, one_rank, skewed]


def normal(rank, step, size, dtype=torch.float32):
    """Return a gradient of normal numbers."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(size, generator=generator).to(dtype)


def memory_of(scheme):
    return copy_of(scheme.memory)


def run(make, world, steps, size, gradient=integers, dtype=torch.float32, kept=memory_of):
    """Do some steps on simulated ranks, several of them on each node.

    Returns ``updates[rank][step]`` and ``memories[rank][step]``; a memory is None if the scheme
    has none.
    """

    def on_rank(comm):
        scheme, updates, memories = make(), [], []
        for step in range(steps):
            updates.append(scheme.step(gradient(comm.rank, step, size, dtype), comm))
            memories.append(kept(scheme))
        return updates, memories

    results = simulate_nodes(world, on_rank).results
    return [updates for updates, _ in results], [memories for _, memories in results]


def ranks_per_node(world):
    """Return the smallest divisor of ``world`` above 1."""
    return next((g for g in range(2, world + 1) if world % g == 0), 1)


def simulate_nodes(world, on_rank):
    """Simulate nodes of this number of ranks."""
    return simulate(world, on_rank, ranks_per_node=ranks_per_node(world))


def copy_of(tensor):
    return None if tensor is None else tensor.clone()


def total(tensors):
    """Sum tensors in float64, skipping None."""
    return sum(tensor.double() for tensor in tensors if tensor is not None)
