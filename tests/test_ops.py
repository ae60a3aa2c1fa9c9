import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sparcel
from sparcel.errors import InputError
from sparcel.ops import resolve
from tests.strategies import DTYPES, OPS, values_at


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
@given(rank=st.integers(0, 20))
def test_the_neutral_element_changes_nothing(op, dtype, rank):
    values = values_at(torch.arange(40), rank, dtype, op, None)
    neutral = torch.full_like(values, op.neutral_for(dtype))
    assert torch.equal(op.function(values, neutral), values)
    assert torch.equal(op.function(neutral, values), values)


def test_infinite_neutral_element_becomes_the_extreme_integer():
    assert resolve("min").neutral_for(torch.int32) == 2**31 - 1
    assert resolve("max").neutral_for(torch.int64) == -(2**63)
    assert resolve("min").neutral_for(torch.float16) == float("inf")


def test_an_operation_resolves_to_itself_and_a_name_to_the_operation():
    op = sparcel.Op(torch.add, 0)
    assert resolve(op) is op
    assert {resolve(name).name for name in ("sum", "product", "min", "max")} == {
        "sum",
        "product",
        "min",
        "max",
    }


def test_unknown_operation_error_lists_the_known_ones():
    with pytest.raises(InputError, match=r"sum, product, min, max.*got 'mean'"):
        resolve("mean")
