"""Counting magnitudes, and drawing coordinates."""

from collections import Counter
from itertools import combinations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

from sparcel.selectors.draws import distinct, integers
from sparcel.selectors.thresholds import Counts, moments, peak
from tests.selectors.test_properties import vectors

CPU = torch.device("cpu")


@given(vectors(), st.data())
def test_counts_are_those_of_a_comparison(x: Tensor, data: st.DataObject) -> None:
    counts = Counts(x)
    values = [0.0, float(torch.finfo(x.dtype).max), *x[:20].abs().double().tolist()]
    for _ in range(5):
        threshold = data.draw(st.sampled_from(values)) * data.draw(st.sampled_from([1, 0.7]))
        limit = torch.tensor(threshold, dtype=x.dtype)
        expected = int(((x.abs() >= limit) & (x != 0)).sum())
        assert counts.at_least(threshold) == expected
        for k in {0, expected - 1, expected, expected + 1, x.numel()}:
            assert counts.more_than(k, threshold) is (expected > k)


def test_many_thresholds_take_few_passes_for_one_k(monkeypatch: pytest.MonkeyPatch) -> None:
    from sparcel import kernels

    passes = []
    whole = kernels.magnitude_histogram
    monkeypatch.setattr(
        kernels, "magnitude_histogram", lambda *given: passes.append(given) or whole(*given)
    )
    counts = Counts(torch.randn(1000))
    for ratio in range(1, 500):
        counts.more_than(100, ratio / 100)
    assert len(passes) <= 3


@given(vectors())
def test_moments_are_nearly_those_of_float64(x: Tensor) -> None:
    scale = peak(x)
    assert scale == (float(x.abs().max()) if x.numel() else 0)
    if scale == 0:
        assert moments(x) == (0, 0, 0)
        return
    wide = x.double() / scale
    expected = wide.mean(), wide.std(correction=0), wide.abs().mean()
    for found, value in zip(moments(x), expected, strict=True):
        assert found / scale == pytest.approx(float(value), rel=1e-4, abs=1e-4)


@given(st.integers(0, 300), st.integers(0, 300), st.integers(-5, 5), st.integers(0, 9))
def test_distinct_numbers_are_distinct(a: int, b: int, seed: int, step: int) -> None:
    count, below = sorted((a, b))
    drawn = distinct(count, below, seed, step, CPU).tolist()
    assert len(drawn) == count
    assert drawn == sorted(set(drawn))
    assert all(0 <= each < below for each in drawn)


@pytest.mark.parametrize("count", [2, 4])
def test_each_set_is_equally_likely(count: int) -> None:
    rounds = 3000
    seen = Counter(tuple(distinct(count, 6, 0, step, CPU).tolist()) for step in range(rounds))
    assert set(seen) == set(combinations(range(6), count))
    assert len(seen) == 15
    # 200 of each are expected, ± 14; the draws are the same whenever this runs.
    assert all(140 < times < 260 for times in seen.values())


def test_steps_have_sequences_of_their_own() -> None:
    drawn = torch.cat([integers(1000, 2**62, 0, step, CPU) for step in range(3)])
    assert drawn.unique().numel() == 3000


def test_a_longer_sequence_begins_with_the_shorter() -> None:
    for count in range(8):
        assert (
            integers(20, 1000, 5, 3, CPU)[:count].tolist()
            == integers(count, 1000, 5, 3, CPU).tolist()
        )
