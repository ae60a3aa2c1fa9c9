"""The passes compute what the step that can be read alone does, bit for bit."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from sparcel.core import simple
from tests.kernels.paths import isas
from tests.regions.made import KINDS, SIZES, Found, Steps, run
from tests.strategies import same_bits


def assert_as_read(case: Steps, found: list[Found]) -> None:
    """Compare what ranks have after each step with the definition."""
    memories = [torch.zeros(case.size)] * case.ranks
    for step in range(case.steps):
        gradients = [case.gradient(rank, step) for rank in range(case.ranks)]
        bits = int(str(case.format).rpartition(":")[2])
        update, memories = simple.step(memories, gradients, step, case.density, case.returned, bits)
        for one, memory in zip(found, memories, strict=True):
            assert same_bits(one.updates[step], update)
            kept = one.memories[step]  # None if all steps were void
            assert same_bits(torch.zeros_like(memory) if kept is None else kept, memory)


LONG = [size for size in SIZES if size > 2000]
"""Lengths from which what has fewer coordinates is shorter with places than without."""


@st.composite
def cases(draw: st.DrawFn) -> Steps:
    """Draw steps that differ in nothing which the simple step leaves out."""
    density = draw(st.sampled_from([0.01, 0.1, 1.0]))
    return Steps(
        ranks=draw(st.sampled_from([1, 2, 3, 5, 8])),
        size=draw(st.sampled_from(LONG if density < 1 else SIZES[1:])),
        kind=draw(st.sampled_from([*KINDS, "special"])),
        density=density,
        format=f"packed:{draw(st.integers(3, 8))}",
        isa=draw(isas),
        seed=draw(st.integers(0, 99)),
    )


@given(cases())
def test_passes_do_what_the_simple_step_does(case: Steps) -> None:
    assert_as_read(case, run(case))
