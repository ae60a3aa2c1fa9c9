"""ScaleCom's diagnostics, against their definitions."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sparcel import SparseStream, topk
from sparcel.errors import InputError, MissingDependencyError
from sparcel.tools.analysis import (
    cosine_similarities,
    diagnostics,
    hamming_distance,
    normalized_hamming_distance,
    quantile_agreement,
    spearman,
)

index_sets = st.sets(st.integers(0, 30), max_size=12)


def vectors(count: int, least: int = 2) -> st.SearchStrategy[list[Tensor]]:
    """Draw vectors of one size, of small integers."""
    return st.integers(least, 12).flatmap(
        lambda size: st.lists(
            st.lists(st.integers(-9, 9), min_size=size, max_size=size).map(
                lambda values: torch.tensor(values, dtype=torch.float32)
            ),
            min_size=count,
            max_size=count,
        )
    )


@given(vectors(3))
def test_cosines_equal_their_definition(memories: list[Tensor]) -> None:
    found = cosine_similarities(memories)
    assert found.shape == (3, 3)
    for i, a in enumerate(memories):
        for j, b in enumerate(memories):
            norms = float(a.double().norm() * b.double().norm())
            if norms == 0:
                assert math.isnan(found[i, j])
            else:
                assert float(found[i, j]) == pytest.approx(float(a @ b) / norms, abs=1e-12)


def test_cosines_at_their_limits_and_for_streams() -> None:
    a, b = torch.tensor([3.0, 0, 4, 0]), torch.tensor([0, 2.0, 0, 0])
    found = cosine_similarities([a, SparseStream.from_dense(b), a.half() * 2, -a.double()])
    assert found.tolist() == [[1, 0, 1, -1], [0, 1, 0, 0], [1, 0, 1, -1], [-1, 0, -1, 1]]


def test_cosines_of_vectors_longer_than_a_slab(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    memories = [torch.randn(100, generator=generator) for _ in range(3)]
    whole = cosine_similarities(memories)
    monkeypatch.setattr(diagnostics, "_SLAB", 7)
    assert torch.allclose(cosine_similarities(memories), whole, rtol=0, atol=1e-14)


@given(index_sets, index_sets)
def test_hamming_distance_counts_indices_in_one_set_only(a: set[int], b: set[int]) -> None:
    first, second = (torch.tensor(sorted(s), dtype=torch.int64) for s in (a, b))
    stream = SparseStream(second, torch.ones(len(b)), 31)
    distance = hamming_distance(first, stream)
    assert distance == len(a ^ b) == hamming_distance(stream, first)
    assert normalized_hamming_distance(first, stream) * (len(a) + len(b)) == pytest.approx(distance)


@given(st.integers(1, 9), st.data())
def test_sets_of_k_that_differ_in_d_places(k: int, data: st.DataObject) -> None:
    d = data.draw(st.integers(0, k))
    assert hamming_distance(torch.arange(k), torch.arange(d, k + d)) == 2 * d
    assert normalized_hamming_distance(torch.arange(k), torch.arange(d, k + d)) == d / k


def test_a_dense_stream_has_all_indices() -> None:
    everything = SparseStream(None, torch.ones(5), 5)
    assert hamming_distance(everything, topk(torch.ones(5), 2)) == 3
    assert normalized_hamming_distance(*[torch.empty(0, dtype=torch.int32)] * 2) == 0


@given(vectors(2))
def test_spearman_is_scipys_of_the_magnitudes(pair: list[Tensor]) -> None:
    from scipy.stats import spearmanr

    local, true = pair
    found = spearman(local, true)
    if min(len(local.abs().unique()), len(true.abs().unique())) == 1:
        assert math.isnan(found)
    else:
        expected = spearmanr(local.abs().numpy(), true.abs().numpy()).statistic
        assert found == pytest.approx(expected, abs=1e-12)


@given(vectors(2))
def test_quantile_agreement_is_r2_of_the_line_through_the_quantiles(pair: list[Tensor]) -> None:
    from scipy.stats import linregress

    local, true = (np.sort(vector.abs().double().numpy()) for vector in pair)
    found = quantile_agreement(*pair)
    if np.ptp(local) == 0 or np.ptp(true) == 0:
        assert math.isnan(found)
        return
    line = linregress(local, true)
    residual = true - (line.slope * local + line.intercept)
    r2 = 1 - (residual**2).sum() / ((true - true.mean()) ** 2).sum()
    assert found == pytest.approx(r2, abs=1e-9)
    assert 0 <= found <= 1


def test_both_ignore_signs_and_only_spearman_depends_on_positions() -> None:
    x = torch.tensor([1.0, -2, 3, -7, 11])
    for agreement in (spearman, quantile_agreement):
        assert agreement(x, x) == pytest.approx(1)
        assert agreement(x, -3 * x) == pytest.approx(1)
        assert agreement(x.bfloat16(), SparseStream.from_dense(x)) == pytest.approx(1)
    assert spearman(x, x**3) == pytest.approx(1)
    assert quantile_agreement(x, x**3) < 0.95
    assert spearman(x, x.flip(0)) == pytest.approx(-1)
    assert quantile_agreement(x, x.flip(0)) == pytest.approx(1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: cosine_similarities([]), "memories must be at least one vector, got none"),
        (lambda: cosine_similarities([torch.ones(2), torch.ones(3)]), r"got sizes \[2, 3\]"),
        (lambda: spearman(torch.ones(2), torch.ones(3)), r"got sizes \[2, 3\]"),
        (lambda: quantile_agreement(torch.ones(1), torch.ones(1)), "two coordinates or more"),
        (lambda: spearman(torch.ones(2, 2), torch.ones(2, 2)), "flatten it first"),
        (lambda: spearman(torch.arange(3), torch.arange(3)), "got torch.int64"),
        (lambda: hamming_distance(torch.ones(2), torch.arange(2)), "int32 or int64 tensor"),
        (lambda: hamming_distance(torch.tensor([1, 1]), torch.arange(2)), "repeat an index"),
        (lambda: hamming_distance(topk(torch.ones(2), 1), topk(torch.ones(3), 1)), "one size"),
    ],
)
def test_bad_input_is_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        call()


def test_without_scipy_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.stats", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'sparcel\[plots\]'"):
        spearman(torch.ones(2), torch.ones(2))
