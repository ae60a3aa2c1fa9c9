"""Few bits a value: the same bits everywhere, bounded errors, and random rounding without bias."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from sparcel.core import kernels
from sparcel.core.kernels.definitions import few_bits as reference
from sparcel.core.kernels.definitions.few_bits import philox, uniform
from tests.kernels.paths import ISAS, Case, cases, isas, using
from tests.strategies import same_bits

BITS = range(2, 9)
bits_ = st.sampled_from(BITS)
blocks = st.sampled_from([1, 3, 32, 64, 100, 512, 1024, 5000])
seeds = st.none() | st.integers(-5, 2**64)
scales_ = st.sampled_from([torch.bfloat16, torch.float32])


def same(one, other):
    """Compare bits, where any NaN is like any other."""
    assert one.dtype == other.dtype
    assert torch.equal(one.isnan(), other.isnan())
    return same_bits(one[~one.isnan()], other[~other.isnan()])


@given(isas, cases(), bits_, blocks, seeds, st.sampled_from([0, 1, 63, 2**40]), scales_)
def test_quantize_has_the_bits_of_the_reference(
    isa: str, case: Case, bits: int, block: int, seed: int | None, offset: int, scale: torch.dtype
) -> None:
    x = case.vector()
    with using(isa):
        made = kernels.quantize(x, bits, block, seed, offset, scale)
        values = kernels.dequantize(made.codes, made.scales, x.numel(), bits, block)
    expected = reference.quantize(x, bits, block, seed, offset, scale)
    assert same_bits(made.codes, expected.codes)
    assert same(made.scales, expected.scales)
    assert same(made.values, expected.values)
    again = reference.dequantize(made.codes, made.scales, x.numel(), bits, block)
    assert same(values, again)
    assert same(made.values, kernels.limited(values, x.dtype))
    count = kernels.scales_count(x.numel(), bits, block, seed is not None)
    assert made.scales.numel() == count


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("seed", [None, 5])
def test_several_threads_give_the_same_bits(bits: int, seed: int | None) -> None:
    x = Case("normal", 700_003, torch.float32).vector()
    expected = reference.quantize(x, bits, 1001, seed)
    for isa in ISAS:
        with using(isa, threads=2):
            made = kernels.quantize(x, bits, 1001, seed)
            values = kernels.dequantize(made.codes, made.scales, x.numel(), bits, 1001)
        assert all(map(same_bits, made, expected))
        assert same_bits(values, expected.values)


@given(isas, cases(), st.sampled_from([torch.float16, torch.bfloat16, torch.float32]))
def test_limited_has_the_bits_of_the_reference(isa: str, case: Case, dtype: torch.dtype) -> None:
    x = case.vector()
    with using(isa):
        assert same(kernels.limited(x, dtype), reference.limited(x, dtype))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_limited_rounds_to_nearest_and_stays_finite(isa: str, dtype: torch.dtype) -> None:
    """For all numbers of 16 bits, those halfway between two, and the next of these."""
    exact = torch.arange(0, 1 << 16, dtype=torch.int32).to(torch.int16).view(dtype).float()
    between = (exact[:-1] + exact[1:]) / 2
    step = torch.tensor(torch.inf)
    x = torch.cat((exact, between, between.nextafter(step), between.nextafter(-step)))
    with using(isa):
        assert same(kernels.limited(x, dtype), reference.limited(x, dtype))


@given(cases((torch.float32,)), bits_, blocks, seeds, scales_)
def test_values_stay_within_one_level(
    case: Case, bits: int, block: int, seed: int | None, scale: torch.dtype
) -> None:
    x = case.vector()
    values = kernels.quantize(x, bits, block, seed, scale=scale).values
    rows = torch.nn.functional.pad(x, (0, -x.numel() % block)).view(-1, block)
    largest = rows.abs().amax(dim=1).double().repeat_interleave(block)[: x.numel()]
    finite = largest.isfinite() & ~values.isnan()
    assert bool(values[~finite].isnan().all())
    assert bool(values[finite].isfinite().all())
    error = (values[finite].double() - x[finite].double()).abs()
    levels = 2 ** (bits - 1) - 1
    most = largest[finite] / levels
    if seed is None and bits > 2:
        most = most / 2 + largest[finite] / 2**9  # a scale of bfloat16 may be below the largest
    elif seed is not None:
        most = most * (1 + 2.0**-7)
    tiny = reference.SMALLEST if seed is None else torch.finfo(torch.float32).smallest_normal
    beyond = (largest[finite] - reference.LARGEST).clamp(min=0)
    assert bool((error <= most * (1 + 1e-5) + beyond + tiny).all())
    assert bool((values[finite] * x[finite].sign() >= 0).all())


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("scale", [torch.float32, torch.bfloat16], ids=str)
def test_the_mean_over_seeds_is_the_value(bits: int, scale: torch.dtype) -> None:
    x = Case("normal", 512, torch.float32).vector()
    draws = 4000
    total = torch.zeros(512, dtype=torch.float64)
    for seed in range(draws):
        total += kernels.quantize(x, bits, 512, seed, scale=scale).values
    level = float(x.abs().max()) / (2 ** (bits - 1) - 1)
    # Five standard errors of a fair coin toss between two levels.
    assert float((total / draws - x).abs().max()) < 5 * level / 2 / draws**0.5


@pytest.mark.parametrize("seed", [None, 3])
def test_levels_come_back_exactly(seed: int | None) -> None:
    x = torch.tensor([7.0, -7, 3, -1, 0, 6, -0.0])
    made = kernels.quantize(x, 4, 7, seed)
    assert made.scales.tolist() == [7]
    assert torch.equal(made.values, x)


def test_two_magnitudes_are_their_means() -> None:
    x = torch.tensor([1.0, -3, 10, -12, 2, 2, 8, -2])
    made = kernels.quantize(x, 2, 8)
    assert made.scales.tolist() == [2, 10]
    assert made.values.tolist() == [2, -2, 10, -10, 2, 2, 10, -2]


@pytest.mark.parametrize("seed", [None, 0])
@pytest.mark.parametrize("bits", BITS)
def test_block_of_zeros_and_block_with_nan(bits: int, seed: int | None) -> None:
    x = torch.tensor([0.0, 0, 1, torch.nan, 2, -2])
    values = kernels.quantize(x, bits, 2, seed).values
    assert values[:2].tolist() == [0, 0]
    assert bool(values[2:4].isnan().all())
    assert values[4:].tolist() == [2, -2]


def test_parts_of_a_vector_continue_the_random_sequence() -> None:
    x = Case("normal", 1000, torch.float32).vector()
    whole = kernels.quantize(x, 8, 100, seed=9).codes
    parts = [kernels.quantize(p, 8, 100, 9, 300 * i).codes for i, p in enumerate(x.split(300))]
    assert same_bits(torch.cat(parts), whole)


def test_philox_known_answer() -> None:
    # Random123's known answer for a counter and a key of zeros.
    words = [int(word) for word in philox(torch.tensor([0]), 0)]
    assert words == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


@given(st.integers(0, 2**40), st.integers(0, 9))
def test_uniform_numbers_depend_only_on_their_position(offset: int, skip: int) -> None:
    device = torch.device("cpu")
    assert same_bits(
        uniform(20, 1, offset, device)[skip:], uniform(20 - skip, 1, offset + skip, device)
    )


def test_uniform_numbers_fill_the_interval() -> None:
    numbers = uniform(100_000, 7, 0, torch.device("cpu"))
    assert 0 <= float(numbers.min()) < 1e-4
    assert 1 - 1e-4 < float(numbers.max()) < 1
    counts = torch.histc(numbers, bins=10, min=0, max=1)
    # Six standard deviations of a bin's count.
    assert float((counts - 10_000).abs().max()) < 6 * (100_000 * 0.1 * 0.9) ** 0.5


def test_lengths_must_fit() -> None:
    made = kernels.quantize(torch.ones(10), 4, 4)
    for bits in (4, 2):
        with pytest.raises(ValueError, match="have the length that fits size"):
            kernels.dequantize(made.codes, made.scales, 12, bits, 4)
    with pytest.raises(ValueError, match="bits must lie"):
        kernels.quantize(torch.ones(10), 9, 4)
    with pytest.raises(ValueError, match="block must be"):
        kernels.quantize(torch.ones(10), 4, 0)
