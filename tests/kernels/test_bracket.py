"""Between which thresholds the (k+1)-th largest magnitude lies, and the mean and the largest."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

from sparcel.core import kernels
from sparcel.core.kernels.definitions import select as reference
from tests.kernels.paths import ISAS, Case, cases, isas, using
from tests.strategies import FLOATS, same_bits


def by_counting(x: Tensor, thresholds: Tensor, k: int) -> list[int]:
    """Return what `bracket` does, by a pass for each threshold."""
    bits = reference.magnitude_bits(x)
    limits = reference.magnitude_bits(thresholds).tolist()
    counts = [int(((bits >= limit) & (bits != 0)).sum()) for limit in limits]
    place = max([0, *(at for at, count in enumerate(counts[:-1]) if count > k)])
    return [place, counts[place], counts[place + 1]]


@st.composite
def thresholds_for(draw: st.DrawFn, x: Tensor) -> Tensor:
    """Draw thresholds of all sizes, in order, many equal to a magnitude or to one another."""
    limits = torch.finfo(x.dtype)
    some = [0.0, limits.tiny, 0.5, 1.0, limits.max, torch.inf]
    chosen = torch.tensor(draw(st.lists(st.sampled_from(some), min_size=2)), dtype=x.dtype)
    low, high = sorted(draw(st.tuples(st.floats(0, 8), st.floats(0, 8))))
    between = torch.linspace(low, high, draw(st.sampled_from([0, 1, 100, 2000])), dtype=x.dtype)
    finite = x.nan_to_num(1.0)[: draw(st.integers(0, 40))].abs()
    return torch.cat([chosen, between, finite])[:2048].sort().values


@given(st.data(), isas, cases())
def test_a_bracket_is_that_of_counting_each_threshold(
    data: st.DataObject, isa: str, case: Case
) -> None:
    x = case.vector()
    thresholds = data.draw(thresholds_for(x))
    k = data.draw(st.sampled_from([0, 1, 2, 100, case.length // 2, case.length]))
    with using(isa):
        found = kernels.bracket(x, thresholds, k)
    assert found.dtype == torch.int64
    assert found.tolist() == by_counting(x, thresholds, k)
    assert reference.bracket(x, thresholds, k).tolist() == found.tolist()


@pytest.mark.parametrize("kind", ["normal", "descending"])
def test_several_threads_find_the_same_bracket_and_mean(kind: str) -> None:
    """Parts of a vector whose largest come first stop counting at other thresholds."""
    x = Case(kind, 900_001, torch.float32).vector()
    ends = kernels.magnitude_ends(x)
    many, few = torch.linspace(0, 5, 1000), torch.linspace(0, 0.5, 3)  # the last is reached, too
    calls = [(thresholds, k) for thresholds in (many, few) for k in (10, 9_000, 600_000)]
    expected = [reference.bracket(x, *call) for call in calls]
    for isa in ISAS:
        with using(isa, threads=3):
            for call, found in zip(calls, expected, strict=True):
                assert kernels.bracket(x, *call).equal(found)
            assert same_bits(kernels.magnitude_ends(x), ends)


@given(cases())
def test_the_mean_magnitude_is_nearly_that_of_float64(case: Case) -> None:
    x = case.vector()
    x = x[x.isfinite()]
    if x.numel() == 0:
        return
    peak = float(x.abs().max())
    mean = float((x.double() / (peak or 1)).abs().mean()) * peak
    if mean * x.numel() == math.inf:  # the sum overflows
        mean = peak
    for ends in (kernels.magnitude_ends(x), reference.magnitude_ends(x)):
        assert ends.tolist() == pytest.approx([mean, peak], rel=1e-5)
        assert ends[0] <= ends[1]


@pytest.mark.parametrize("dtype", FLOATS)
def test_thresholds_of_nan_end_in_no_error(dtype: torch.dtype) -> None:
    """A vector with NaN has such thresholds, before anyone knows that it is void."""
    x = torch.tensor([torch.nan, -torch.inf, 1, 0], dtype=dtype)
    thresholds = torch.tensor([0, torch.nan, -torch.nan, torch.inf], dtype=dtype)
    place, reached, above = kernels.bracket(x, thresholds, 1).tolist()
    assert 0 <= place < 3
    assert 0 <= above <= reached <= 3
