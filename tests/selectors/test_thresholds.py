"""Thresholds of magnitudes, and drawing of coordinates."""

from collections import Counter
from itertools import combinations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

from benchmarks.streams.paper_selectors import rounded
from sparcel.core.selectors.base import distinct, integers, reaching
from sparcel.core.selectors.from_papers import _all_reaching
from tests.selectors.test_properties import vectors


@given(vectors(), st.data())
def test_entries_that_reach_a_threshold_are_those_of_a_comparison(
    x: Tensor, data: st.DataObject
) -> None:
    values = [0.0, float(torch.finfo(x.dtype).max), *x[:20].abs().double().tolist()]
    threshold = data.draw(st.sampled_from(values)) * data.draw(st.sampled_from([1, 0.7]))
    expected = ((x.abs() >= rounded(threshold, x)) & (x != 0)).nonzero().squeeze(1)
    parts = list(_all_reaching(x, threshold, 16))
    assert [index for indices, _ in parts for index in indices.tolist()] == expected.tolist()
    every = torch.arange(x.numel(), dtype=torch.int32)
    assert reaching(every, x, threshold)[0].tolist() == expected.tolist()


@given(st.integers(0, 300), st.integers(0, 300), st.integers(-5, 5), st.integers(0, 9))
def test_distinct_numbers_are_distinct(a: int, b: int, seed: int, step: int) -> None:
    count, below = sorted((a, b))
    drawn = distinct(count, below, seed, step).tolist()
    assert len(drawn) == count
    assert drawn == sorted(set(drawn))
    assert all(0 <= each < below for each in drawn)


@pytest.mark.parametrize("count", [2, 4])
def test_each_set_is_equally_likely(count: int) -> None:
    rounds = 600
    seen = Counter(tuple(distinct(count, 6, 0, step).tolist()) for step in range(rounds))
    assert set(seen) == set(combinations(range(6), count))
    assert len(seen) == 15
    # 40 of each are expected, ± 6; the draws are the same whenever this runs.
    assert all(20 < times < 60 for times in seen.values())


def test_steps_have_sequences_of_their_own() -> None:
    drawn = torch.cat([integers(1000, 2**62, 0, step) for step in range(3)])
    assert drawn.unique().numel() == 3000


def test_a_longer_sequence_begins_with_the_shorter() -> None:
    for count in range(8):
        assert integers(20, 1000, 5, 3)[:count].tolist() == integers(count, 1000, 5, 3).tolist()
