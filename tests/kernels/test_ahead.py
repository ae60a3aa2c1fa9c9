"""Steps of an optimiser: compiled, they go where the definition says."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sparcel.core import kernels
from sparcel.core.kernels import cpu
from sparcel.core.kernels.definitions import optim as reference
from tests.kernels.paths import LENGTHS, Case, isas, using
from tests.strategies import FLOATS, same_bits

Pair = tuple[Tensor, kernels.Along | kernels.AsAdam]

KINDS = st.sampled_from(["normal", "cauchy", "zeros", "mostly zero", "signed zeros", "ascending"])


@st.composite
def pairs(draw: st.DrawFn) -> Pair:
    """Draw a vector and how it moves, by any of the rules."""
    length, seed = draw(st.sampled_from(LENGTHS)), draw(st.integers(0, 99))
    values, direction, squares, largest = (
        Case(draw(KINDS), length, torch.float32, seed + i, draw(st.booleans())).vector()
        for i in range(4)
    )
    rate = draw(st.sampled_from([0.0, 0.1, -0.3, 1.9]))
    if draw(st.booleans()):
        return values, kernels.Along(direction, rate)
    scale = kernels.AdamScale(
        squares.square(),
        draw(st.sampled_from([0.0, 0.9, 0.999])),
        draw(st.sampled_from([1e-3, 0.7, 1.0])),
        draw(st.sampled_from([1e-8, 1e-2])),
        largest.square() if draw(st.booleans()) else None,
    )
    return values, kernels.AsAdam(direction, scale, rate)


def moved_in_float64(values: Tensor, move: kernels.Along | kernels.AsAdam) -> Tensor:
    """Return what the definition says with all tensors in float64."""
    if isinstance(move, kernels.Along):
        exact = replace(move, direction=move.direction.double())
    else:
        scale = move.scale
        largest = None if scale.largest is None else scale.largest.double()
        scale = replace(scale, squares=scale.squares.double(), largest=largest)
        exact = replace(move, gradient=move.gradient.double(), scale=scale)
    (found,) = reference.moved([values.double()], [exact])
    return found


def close(found: Tensor, exact: Tensor, values: Tensor) -> bool:
    """Tell whether only rounding of the values and of the moves is between two results."""
    moves = (exact - values).abs()
    return bool(((found - exact).abs() <= 1e-6 * (moves + values.abs()) + 1e-40).all())


@given(st.lists(pairs(), max_size=4), isas, st.integers(1, 3))
def test_a_pass_moves_as_the_definition_does(given: list[Pair], isa: str, threads: int) -> None:
    tensors, moves = [one for one, _ in given], [move for _, move in given]
    with using(isa, threads):
        found = kernels.moved(tensors, moves)
    expected = reference.moved(tensors, moves)
    for values, move, one, other in zip(tensors, moves, found, expected, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        exact = moved_in_float64(values, move)
        assert close(one, exact, values) and close(other, exact, values)


@given(st.lists(pairs(), max_size=4), isas)
def test_a_pass_has_the_same_bits_on_every_machine(given: list[Pair], isa: str) -> None:
    tensors, moves = [one for one, _ in given], [move for _, move in given]
    with using("portable"):
        expected = kernels.moved(tensors, moves)
    with using(isa):
        found = kernels.moved(tensors, moves)
    assert all(map(same_bits, found, expected))


def scale_of(shape: tuple[int, ...]) -> kernels.AdamScale:
    return kernels.AdamScale(torch.rand(shape), 0.9, 0.5, 1e-3, torch.rand(shape))


def test_a_pass_is_the_same_on_any_number_of_threads() -> None:
    shapes = [(1_100_003,), (5,), (0,), (300, 1000)]
    tensors = [torch.randn(shape) for shape in shapes]
    moves: list[kernels.Along | kernels.AsAdam] = [
        kernels.AsAdam(torch.randn(shape), scale_of(shape), 0.1)
        if number % 2
        else kernels.Along(torch.randn(shape), 0.1)
        for number, shape in enumerate(shapes)
    ]
    with using("portable", 1):
        first = kernels.moved(tensors, moves)
    with using("portable", 3):
        assert all(map(same_bits, kernels.moved(tensors, moves), first))


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 0, 2, 1), (1, 2, 3, 0)], ids=str)
def test_tensors_in_any_order_of_memory_take_a_pass(
    order: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def tensor() -> Tensor:
        return torch.rand(3, 4, 5, 6).permute(order)

    scale = kernels.AdamScale(tensor(), 0.9, 0.5, 1e-3, tensor())
    tensors = [tensor(), tensor()]
    moves = [kernels.Along(tensor(), 0.1), kernels.AsAdam(tensor(), scale, 0.1)]
    expected = reference.moved(tensors, moves)
    monkeypatch.delattr(reference, "moved")
    for one, found, other in zip(tensors, cpu.moved(tensors, moves), expected, strict=True):
        assert found.stride() == one.stride()
        torch.testing.assert_close(found, other)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_other_dtypes_and_orders_move_as_the_definition_says(dtype: torch.dtype) -> None:
    values, direction = torch.randn(30, 40, dtype=dtype), torch.randn(40, 30).t()
    move = kernels.Along(direction, 0.1)
    (found,), (expected,) = kernels.moved([values], [move]), reference.moved([values], [move])
    assert found.dtype == dtype
    assert same_bits(found, expected)


def test_results_are_new_and_have_no_gradients() -> None:
    values = torch.nn.Parameter(torch.randn(20_000))
    (found,) = kernels.moved([values], [kernels.Along(torch.zeros(20_000), 0.0)])
    assert not found.requires_grad
    assert torch.equal(found, values)
    (other,) = kernels.moved([values], [kernels.Along(torch.zeros(20_000), 0.0)])
    assert len({one.data_ptr() for one in (found, other, values)}) == 3


def test_tensors_of_two_kinds_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="of one length"):
        kernels.moved([torch.zeros(3)], [kernels.Along(torch.zeros(4), 0.0)])
