"""Sums of squares on a GPU; without one, torch's functions for the CPU take its place."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

pytest.importorskip("triton")

from sparcel import device
from sparcel.kernels.definitions import squares as reference
from sparcel.kernels.gpu import squares as kernels
from tests.card import moved, on_card, seen
from tests.kernels.paths import Case, cases
from tests.strategies import FLOATS, same_bits

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.gpu


@settings(max_examples=25)
@given(st.lists(cases(), min_size=1, max_size=5))
def test_sums_are_those_of_the_definition_up_to_rounding(given: list[Case]) -> None:
    vectors = [case.vector() for case in given]
    found = kernels.sums_of_squares([vector.to(DEVICE) for vector in vectors])
    torch.testing.assert_close(
        found.cpu(), reference.sums_of_squares(vectors), rtol=1e-12, atol=0, equal_nan=True
    )


def test_many_vectors_of_mixed_dtypes_and_lengths() -> None:
    lengths = (0, 1, 513, 3, reference.CHUNK + 1)
    vectors = [
        torch.ones(lengths[at % 5], dtype=FLOATS[at % 4], device=DEVICE) * 3 for at in range(200)
    ]
    found = kernels.sums_of_squares(vectors)
    assert found.device == vectors[0].device
    assert found.tolist() == pytest.approx([9 * vector.numel() for vector in vectors], rel=1e-15)
    assert same_bits(found, kernels.sums_of_squares(vectors))


def test_parameters_have_sums_too() -> None:
    parameter = torch.nn.Parameter(torch.tensor([3.0, 4.0], device=DEVICE))
    found = kernels.sums_of_squares([parameter, parameter])
    assert found.tolist() == pytest.approx([25, 25], rel=1e-15)
    assert not found.requires_grad


@pytest.mark.skipif(DEVICE != "cpu", reason="the card stands for a GPU where there is none")
def test_nothing_is_read() -> None:
    vectors = [torch.ones(4), torch.ones(16).half(), torch.ones(9)]
    with on_card() as card:
        before = device.reads()
        found = kernels.sums_of_squares([moved(vector) for vector in vectors])
        assert found.device == card
        assert device.reads() == before
    assert seen(found).tolist() == [4, 16, 9]
