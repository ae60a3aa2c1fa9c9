"""The norm that clipping asks for."""

import math

import pytest
import torch
from hypothesis import given

from sparcel import kernels
from sparcel.kernels import reference
from tests.kernels.paths import Case, cases, using


@given(cases())
def test_norm_is_the_reference_up_to_rounding(case: Case) -> None:
    x = case.vector()
    expected = reference.norm(x)
    if math.isfinite(expected):
        assert math.isclose(kernels.norm(x), expected, rel_tol=1e-13)
    else:
        assert str(kernels.norm(x)) == str(expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_is_the_same_on_any_number_of_threads(dtype: torch.dtype) -> None:
    x = Case("normal", 1_100_003, dtype).vector()
    norms = set()
    for threads in (1, 2, 3):
        with using("portable", threads):
            norms.add(kernels.norm(x))
    assert len(norms) == 1
    assert norms.pop() == pytest.approx(reference.norm(x), rel=1e-13)
