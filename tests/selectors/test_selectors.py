"""Particular properties of each selector, and making selectors by name."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

from sparcel.core import kernels
from sparcel.core.selectors import (
    SELECTORS,
    ExactTopK,
    MSTopK,
    ThresholdReuse,
    overlap,
    selector,
    topk,
)
from sparcel.errors import InputError
from tests.kernels.paths import Case
from tests.strategies import FLOATS


def test_selectors_are_made_by_name_with_their_settings() -> None:
    assert repr(selector("mstopk", samplings=5)) == "MSTopK(samplings=5, seed=0)"
    assert isinstance(selector("exact"), ExactTopK)
    own = ThresholdReuse(period=4)
    assert selector(own) is own


def test_errors_suggest_the_nearest_name_or_setting() -> None:
    with pytest.raises(InputError, match="did you mean 'mstopk'"):
        selector("msktop")
    with pytest.raises(InputError, match=r"setting of selector 'mstopk'.*'samplings'"):
        selector("mstopk", sampling=3)
    with pytest.raises(InputError, match=r"has its settings already, got period"):
        selector(ThresholdReuse(), period=3)


@pytest.mark.parametrize(
    ("name", "setting", "value"),
    [
        ("bucketed", "bucket", 0),
        ("bucketed", "count", 0),
        ("chunkwise", "m", 0),
        ("mstopk", "samplings", 0),
        ("reuse", "period", 0),
    ],
)
def test_settings_out_of_range_are_refused(name: str, setting: str, value: float) -> None:
    with pytest.raises(InputError, match=f"{setting} must (be|lie) .*, got {value}"):
        selector(name, **{setting: value})


@pytest.mark.parametrize("name", SELECTORS)
def test_fresh_has_the_settings_and_no_memory(name: str) -> None:
    s = selector(name)
    s.select(torch.randn(100), 3)
    assert repr(s.fresh()) == repr(s)
    assert s.fresh().state_dict() == selector(name).state_dict()
    other = s.fresh()
    other.load_state_dict(s.state_dict())
    assert other.state_dict() == s.state_dict()


def test_the_default_device_does_not_matter() -> None:
    x = torch.randn(300, generator=torch.Generator().manual_seed(0))
    for name in SELECTORS:
        expected = selector(name).select(x, 200, step=1)
        with torch.device("meta"):
            found = selector(name).select(x, 200, step=1)
        assert torch.equal(found.indices, expected.indices)


# MSTopK


def published(x: Tensor, k: int, samplings: int) -> tuple[Tensor, Tensor]:
    """Return the two sets of the paper's Algorithm 1, counting anew for each sampling."""
    a = x.abs()
    mean, largest = float(a.double().mean()), float(a.max())
    left, right, high, low = 0.0, 1.0, torch.inf, 0.0
    for _ in range(samplings):
        ratio = left + (right - left) / 2
        threshold = torch.tensor(mean + ratio * (largest - mean), dtype=x.dtype)
        if int((a >= threshold).sum()) <= k:
            right, high = ratio, threshold
        else:
            left, low = ratio, threshold
    return (a >= high).nonzero().view(-1), ((a < high) & (a >= low) & (a > 0)).nonzero().view(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("samplings", [1, 4, 10, 13, 30])
@pytest.mark.parametrize("k", [1, 50, 4000, 9000])
def test_mstopk_takes_the_first_set_and_a_run_of_the_second(
    k: int, samplings: int, dtype: torch.dtype
) -> None:
    # Multiples of 1/4 up to 16: the mean is exact.
    generator = torch.Generator().manual_seed(k)
    x = (torch.randint(-64, 65, (10_000,), generator=generator) / 4).to(dtype)
    surely, between = published(x, k, samplings)
    selected = MSTopK(samplings).select(x, k, step=3).indices.long()
    assert selected.numel() == min(k, int((x != 0).sum()))
    assert torch.isin(surely, selected).all()
    rest = selected[~torch.isin(selected, surely)]
    if rest.numel():
        first = int((between == rest[0]).nonzero())
        assert torch.equal(between[first : first + rest.numel()], rest)


def test_mstopk_takes_another_run_in_another_step_and_with_another_seed() -> None:
    x = torch.ones(10_000)
    runs = {
        int(MSTopK(seed=seed).select(x, 10, step).indices[0])
        for step in range(5)
        for seed in (0, 1)
    }
    assert len(runs) == 10
    assert max(runs) > 5000


@given(
    st.sampled_from(["normal", "cauchy", "few values", "mostly zero", "descending", "denormals"]),
    st.sampled_from(FLOATS),
    st.sampled_from([0.01, 0.1, 0.5, 0.9]),
    st.sampled_from([1, 5, 12, 30]),
    st.integers(0, 99),
)
def test_mstopk_differs_from_exact_within_the_last_interval_above_the_mean(
    kind: str, dtype: torch.dtype, density: float, samplings: int, step: int
) -> None:
    """Below the mean, where nothing is sampled, it may be any."""
    x = Case(kind, 3000, dtype, seed=step).vector().clamp(-60_000, 60_000)
    k, magnitudes = int(density * x.numel()), x.abs().double()
    mean, peak = kernels.magnitude_ends(x).tolist()
    interval = (peak - mean) / 2**samplings
    # Thresholds are rounded to the vector's dtype.
    interval += 2 * torch.finfo(x.dtype).eps * peak + torch.finfo(x.dtype).smallest_normal
    places = MSTopK(samplings).select(x, k, step).indices.long()
    left = torch.ones(x.numel(), dtype=torch.bool).index_fill(0, places, False)
    next_largest = float(magnitudes.sort(descending=True).values[k])
    assert magnitudes[left].max() <= max(mean, next_largest) + interval
    if int((magnitudes >= mean + interval).sum()) > k:
        assert magnitudes[~left].min() >= next_largest - interval


def test_mstopk_leaves_a_void_vector_to_whoever_finds_it() -> None:
    """On a GPU the flag for NaN and Inf may be read after the selection."""
    for bad in (torch.nan, torch.inf):
        assert MSTopK().select(torch.tensor([bad, 1.0, 2.0, 0.0]), 2).nnz <= 2


def test_mstopk_takes_its_run_across_blocks() -> None:
    x = torch.ones(100_000)
    for step in range(3):
        indices = MSTopK().select(x, 50_000, step).indices
        assert indices.numel() == int(indices[-1] - indices[0]) + 1 == 50_000
    assert MSTopK().select(x, 99_999, 1).nnz == 99_999
    assert MSTopK().select(x, 100_000, 1).nnz == 100_000


# Threshold reuse


def test_a_threshold_is_reused_until_the_period_is_over() -> None:
    s, x = ThresholdReuse(period=3), torch.arange(1.0, 101)
    assert s.select(x, 10, 0).nnz == 10  # the threshold is 91
    assert s.select(x + 2, 10, 1).nnz == 12
    assert s.select(x - 5, 10, 2).nnz == 5
    assert s.select(x - 5, 10, 3).nnz == 10


def test_largest_are_selected_if_too_many_reach_a_reused_threshold() -> None:
    s, x = ThresholdReuse(), torch.arange(1.0, 101)
    s.select(x, 10, 0)
    for more in (10, 50):  # 20 reach it, and 60
        assert s.select(x + more, 10, 1).indices.tolist() == [*range(100 - 14, 100)]
    assert s.most(10, 100) == 14


def test_threshold_is_renewed_if_k_changed_or_the_step_is_repeated() -> None:
    s, x = ThresholdReuse(), torch.arange(1.0, 101)
    assert s.select(x, 10, 7).nnz == 10
    assert s.select(x + 2, 10, 7).nnz == 10
    assert s.select(x + 2, 20, 8).nnz == 20
    assert s.select(x + 2, 20, 9).nnz == 20


def test_a_threshold_survives_in_the_state() -> None:
    s, x = ThresholdReuse(), torch.arange(1.0, 101)
    s.select(x, 10, 0)
    other = s.fresh()
    other.load_state_dict(s.state_dict())
    assert other.select(x + 2, 10, 1).nnz == s.select(x + 2, 10, 1).nnz == 12
    assert s.fresh().select(x + 2, 10, 1).nnz == 10


# Random-k


def test_random_k_depends_only_on_seed_and_step() -> None:
    one, other = torch.randn(5000), torch.randn(5000)
    at = {
        (seed, step): selector("randomk", seed=seed).select(one, 50, step).indices
        for seed in (0, 1)
        for step in (0, 1)
    }
    assert len({tuple(indices.tolist()) for indices in at.values()}) == 4
    assert torch.equal(selector("randomk").select(other, 50).indices, at[0, 0])


def test_overlap_is_the_share_of_the_exact_set() -> None:
    x = torch.arange(1.0, 11)
    assert overlap(topk(x, 5), topk(x, 10)) == 0.5
    assert overlap(topk(x, 10), topk(x, 5)) == 1
    assert overlap(topk(x, 3), topk(torch.zeros(10), 3)) == 1


def test_threshold_is_renewed_if_the_selector_serves_one_step_in_four():
    """A rank that leads in turns renews its threshold in its first step of each period."""
    reuse, x = selector("reuse"), torch.arange(1.0, 101)
    counts = {step: reuse.select(x / step, 10, step).nnz for step in range(1, 70, 4)}
    assert [step for step, count in counts.items() if count == 10] == [1, 33, 65]
