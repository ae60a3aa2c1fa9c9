"""Sums of squares, and the norm that clipping asks for."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sparcel.core import kernels
from sparcel.core.kernels import cpu
from sparcel.core.kernels.definitions import optim as reference
from tests.kernels.paths import Case, cases, isas, using
from tests.strategies import FLOATS, same_bits

Sums = Callable[[Sequence[Tensor]], Tensor]

chunks = st.sampled_from([1, 7, 4096, 5000, kernels.CHUNK])


def agree(found: Tensor, expected: Tensor) -> bool:
    """Tell whether sums are equal up to rounding; NaN and Inf must be at the same places."""
    return torch.allclose(found, expected, rtol=1e-12, atol=0, equal_nan=True)


@contextmanager
def cutting(chunk: int) -> Iterator[None]:
    """Sum chunks of another size."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "CHUNK", chunk)
        yield


@given(st.lists(cases(), max_size=5), chunks)
def test_sums_are_those_of_the_reference_up_to_rounding(given: list[Case], chunk: int) -> None:
    vectors = [case.vector() for case in given]
    with cutting(chunk):
        found, expected = (one.sums_of_squares(vectors) for one in (cpu, reference))
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert agree(found, expected)


def of_chunks(sums_of_squares: Sums, vectors: Sequence[Tensor], chunk: int) -> Tensor:
    """Return sums that are added up chunk by chunk."""
    totals = []
    for vector in vectors:
        total = 0.0
        for part in vector.split(chunk):
            total += float(sums_of_squares([part]))
        totals.append(total)
    return torch.tensor(totals, dtype=torch.float64)


@given(st.lists(cases(), max_size=5), chunks, isas, st.integers(1, 3))
def test_a_sum_is_that_of_the_chunks_sums_in_order(
    given: list[Case], chunk: int, isa: str, threads: int
) -> None:
    vectors = [case.vector() for case in given]
    expected = of_chunks(kernels.sums_of_squares, vectors, chunk)
    with using(isa, threads), cutting(chunk):
        found = kernels.sums_of_squares(vectors)
    # Where NaN is added to NaN, the compiler decides whose sign and payload the sum has.
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@given(st.lists(cases(), max_size=5), chunks)
def test_the_reference_sums_chunk_by_chunk_too(given: list[Case], chunk: int) -> None:
    vectors = [case.vector() for case in given]
    expected = of_chunks(reference.sums_of_squares, vectors, chunk)
    with cutting(chunk):
        found = reference.sums_of_squares(vectors)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_sums_are_the_same_on_any_number_of_threads(dtype: torch.dtype) -> None:
    vectors = [Case("normal", size, dtype).vector() for size in (1_100_003, 5, 0, 300_000)]
    first = kernels.sums_of_squares(vectors)
    for threads in (2, 3):
        with using("portable", threads):
            assert same_bits(kernels.sums_of_squares(vectors), first)
    assert agree(first, reference.sums_of_squares(vectors))


@given(cases())
def test_norm_is_the_root_of_the_sum(case: Case) -> None:
    x = case.vector()
    total = float(kernels.sums_of_squares([x]))
    if math.isinf(total) and x.isfinite().all():  # the squares overflow, not their root
        assert kernels.norm(x) == pytest.approx(math.hypot(*x.tolist()))
    else:
        assert str(kernels.norm(x)) == str(math.sqrt(total))


def test_parameters_have_sums_too() -> None:
    parameter = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    assert kernels.sums_of_squares([parameter, parameter]).tolist() == [25, 25]
