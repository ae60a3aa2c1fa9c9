"""The histogram of magnitudes by bits, and the radix select that uses it."""

from collections import Counter

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

from sparcel.core import kernels
from sparcel.core.kernels.definitions import select as reference
from tests.kernels.paths import Case, cases, isas, using

# Fields from the highest bits down, as (shift, bins).
FIELDS = {
    torch.float16: [(8, 128), (0, 256)],
    torch.bfloat16: [(8, 128), (0, 256)],
    torch.float32: [(20, 2048), (10, 1024), (0, 1024)],
    torch.float64: [(52, 2048), (39, 8192), (26, 8192), (13, 8192), (0, 8192)],
}


def radix_select(x: Tensor, k: int) -> int:
    """Return the bits of the k-th largest magnitude, which must not be zero."""
    prefix = None
    for shift, bins in FIELDS[x.dtype]:
        counts = kernels.magnitude_histogram(x, shift, bins, prefix)
        from_top = counts.flip(0).cumsum(0)
        place = int((from_top < k).sum())
        field = bins - 1 - place
        k -= int(from_top[place]) - int(counts[field])
        prefix = (prefix or 0) * bins + field
    assert prefix is not None
    return prefix


@given(st.data(), isas, cases())
def test_a_radix_select_finds_the_kth_magnitude(data: st.DataObject, isa: str, case: Case) -> None:
    x = case.vector()
    magnitudes = reference.magnitude_bits(x)
    nonzero = sorted(magnitudes[magnitudes != 0].tolist(), reverse=True)
    if not nonzero:
        return
    k = data.draw(st.integers(1, len(nonzero)))
    with using(isa):
        assert radix_select(x, k) == nonzero[k - 1]


@given(cases(), st.integers(0, 12), st.integers(0, 4), st.integers(0, 40))
def test_histogram_counts_the_field(case: Case, shift: int, width: int, prefix: int) -> None:
    x = case.vector()[:500]
    expected = Counter(
        (m >> shift) % 2**width
        for m in reference.magnitude_bits(x).tolist()
        if m and m >> (shift + width) == prefix
    )
    counts = kernels.magnitude_histogram(x, shift, 2**width, prefix)
    assert counts.dtype == torch.int64
    assert counts.tolist() == [expected[bin_] for bin_ in range(2**width)]
    assert counts.equal(reference.magnitude_histogram(x, shift, 2**width, prefix))


def test_several_threads_count_the_same() -> None:
    x = Case("normal", 900_001, torch.float32).vector()
    with using("portable", threads=3):
        counts = kernels.magnitude_histogram(x, 20, 2048)
    assert counts.equal(reference.magnitude_histogram(x, 20, 2048))


def test_invalid_fields_are_refused() -> None:
    with pytest.raises(ValueError, match="power of two"):
        kernels.magnitude_histogram(torch.ones(3), 20, 1000)
