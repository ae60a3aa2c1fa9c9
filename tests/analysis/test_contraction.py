"""Lemma 1 by enumeration, and ξ by its definition."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sparcel import SparseStream, topk
from sparcel.errors import InputError
from sparcel.tools.analysis import contraction, contraction_bound, hamming_distance, xi

small = st.lists(st.integers(-9, 9), min_size=2, max_size=8).filter(any)


@given(small, st.data())
def test_lemma_1_holds_on_average_over_all_selections(
    values: list[int], data: st.DataObject
) -> None:
    vector, n = torch.tensor(values, dtype=torch.float64), len(values)
    k = data.draw(st.integers(1, n - 1))
    d = data.draw(st.integers(0, min(k, n - k)))
    top = torch.tensor(sorted(range(n), key=lambda i: -abs(values[i]))[:k])
    gamma = contraction(vector, top)
    found = [
        contraction(vector, torch.tensor(chosen))
        for chosen in itertools.combinations(range(n), k)
        if hamming_distance(torch.tensor(chosen), top) == 2 * d
    ]
    assert len(found) == math.comb(k, d) * math.comb(n - k, d)
    mean = sum(found) / len(found)
    bound = contraction_bound(k, d, gamma)
    assert mean <= bound + 1e-12
    # The term that the proof drops: the energy of selected indices outside the top k.
    assert mean == pytest.approx(bound - gamma * d / (n - k), abs=1e-12)
    assert gamma <= 1 - k / n + 1e-12
    assert bound <= contraction_bound(k, d, 1 - k / n) + 1e-12


def test_one_selection_may_exceed_the_average_bound() -> None:
    vector = torch.tensor([10.0, 1, 1, 0])
    bound = contraction_bound(2, 1, contraction(vector, topk(vector, 2)))
    misses_the_largest, misses_the_smallest = torch.tensor([1, 2]), torch.tensor([0, 2])
    assert contraction(vector, misses_the_smallest) < bound
    assert contraction(vector, misses_the_largest) > bound


@given(small, st.data())
def test_contraction_is_the_remaining_share_of_energy(
    values: list[int], data: st.DataObject
) -> None:
    chosen = data.draw(st.sets(st.integers(0, len(values) - 1)))
    left = sum(v * v for i, v in enumerate(values) if i not in chosen)
    vector = torch.tensor(values, dtype=torch.float32)
    indices = torch.tensor(sorted(chosen), dtype=torch.int64)
    expected = float(Fraction(left, sum(v * v for v in values)))
    assert contraction(vector, indices) == expected
    # Only the indices of the stream matter; its values are those of another rank.
    stream = SparseStream(indices, torch.ones(len(chosen)), len(values))
    assert contraction(vector, stream) == expected
    assert vector.tolist() == values


def test_contraction_of_a_zero_vector_is_nan() -> None:
    assert math.isnan(contraction(torch.zeros(3), torch.tensor([0])))


def reference_xi(accumulated: list[Tensor], gradients: list[Tensor], k: int) -> float:
    """Equation (5), in plain torch; for magnitudes without ties."""

    def top(vector: Tensor) -> Tensor:
        chosen = vector.abs().topk(k).indices
        return torch.zeros_like(vector).index_copy(0, chosen, vector[chosen])

    whole = top(torch.stack(accumulated).mean(0))
    twice = top(torch.stack([top(vector) for vector in accumulated]).mean(0))
    return float((whole - twice).norm() / torch.stack(gradients).mean(0).norm())


@given(st.integers(1, 6), st.integers(1, 20), st.integers(0, 99))
def test_xi_equals_its_definition(ranks: int, k: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    gradients = [torch.randn(40, generator=generator, dtype=torch.float64) for _ in range(ranks)]
    accumulated = [
        gradient + torch.randn(40, generator=generator, dtype=torch.float64)
        for gradient in gradients
    ]
    found = xi(accumulated, gradients, k)
    assert found == pytest.approx(reference_xi(accumulated, gradients, k), rel=1e-9, abs=1e-12)
    # The learning rate cancels if both are scaled by it.
    scaled = xi([0.5 * a for a in accumulated], [0.5 * g for g in gradients], k)
    assert scaled == pytest.approx(found, rel=1e-9, abs=1e-12)
    streams = [SparseStream.from_dense(a) for a in accumulated]
    assert xi(streams, gradients, k) == found


def test_xi_is_zero_if_ranks_agree_or_everything_is_sent() -> None:
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(30, generator=generator) for _ in range(4)]
    assert xi([gradients[0]] * 4, gradients, 3) == 0
    assert xi(gradients, gradients, 30) == pytest.approx(0, abs=1e-12)
    assert xi(gradients[:1], gradients[:1], 3) == 0


def test_xi_detects_values_that_are_large_only_in_the_sum() -> None:
    # The ranks' largest values cancel; their second largest add up.
    ranks = [torch.tensor([5.0, 4, 0]), torch.tensor([-5.0, 4, 0])]
    assert xi(ranks, ranks, 1) == 1
    assert xi(ranks, ranks, 2) == 0
    assert math.isinf(xi(ranks, [torch.zeros(3)] * 2, 1))
    assert math.isnan(xi(ranks, [torch.zeros(3)] * 2, 3))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: contraction_bound(0, 0, 0.5), "k must be at least 1, got 0"),
        (lambda: contraction_bound(3, 4, 0.5), "pass half the distance"),
        (lambda: contraction_bound(3, 1, 1.5), r"gamma0 must lie in \[0, 1\], got 1.5"),
        (lambda: contraction(torch.ones(3), torch.tensor([3])), r"lie in \[0, 3\), got 3 to 3"),
        (lambda: contraction(torch.ones(3, 1), torch.tensor([0])), "flatten it first"),
        (lambda: xi([torch.ones(3)], [], 1), "got 1 and 0"),
        (lambda: xi([], [], 1), "at least one vector"),
        (lambda: xi([torch.ones(3)], [torch.ones(4)], 1), r"got sizes \[3, 4\]"),
        (lambda: xi([torch.ones(3)], [torch.ones(3)], 0), "k must be at least 1, got 0"),
    ],
)
def test_bad_input_is_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        call()
