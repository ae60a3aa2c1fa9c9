from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sparcel
from sparcel import SparseStream
from sparcel.core.ops import resolve
from sparcel.core.stream import reduce
from sparcel.errors import InputError
from tests.strategies import DTYPES, OPS, make_stream, values_at


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


@pytest.mark.parametrize("width", [None, 2])
@pytest.mark.parametrize("dense", [(), (0,), (1,), (0, 1)], ids=str)
@pytest.mark.parametrize(
    "function",
    [
        lambda a, b: (a * b).sum(),
        lambda a, b: (a * b).sum(0, keepdim=True),
        lambda a, b: torch.stack((a, b)),
        lambda a, b: (a + b).double(),
        lambda a, b: a > b,
        lambda a, b: 0.0,
    ],
    ids=["scalar", "one element", "stacked", "double", "bool", "no tensor"],
)
def test_a_function_that_is_not_elementwise_is_refused(function, dense, width):
    streams = [make_stream([1, 3, 4], rank, 6, width=width) for rank in range(2)]
    streams = [
        SparseStream(None, s.to_dense(), 6) if r in dense else s for r, s in enumerate(streams)
    ]
    with pytest.raises(InputError, match=r"Op\(.*neutral=0\) must be elementwise.* it returned"):
        reduce(streams, sparcel.Op(function, 0))


def test_an_operation_is_written_without_an_address():
    assert repr(resolve("max")) == "max"
    assert repr(sparcel.Op(torch.hypot, 0)).endswith("hypot, neutral=0)")
    assert "0x" not in repr(sparcel.Op(partial(torch.add, alpha=2), 0))


def test_unknown_operation_error_lists_the_known_ones():
    with pytest.raises(InputError, match=r"sum, product, min, max.*got 'mean'"):
        resolve("mean")
