"""QSGD quantisation: unbiased, bounded, and the same bits everywhere."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from sparcel import kernels
from sparcel.errors import InputError
from sparcel.kernels.definitions import qsgd as reference
from sparcel.kernels.philox import philox, uniform
from tests.kernels.paths import ISAS, Case, cases, isas, using
from tests.strategies import same_bits

BITS = (8, 4, 2)
bits_ = st.sampled_from(BITS)
buckets = st.sampled_from([1, 3, 64, 100, 512, 1024, 10**9])


@given(isas, cases(), bits_, buckets, st.integers(-5, 2**64), st.sampled_from([0, 1, 63, 2**40]))
def test_quantize_has_the_bits_of_the_reference(
    isa: str, case: Case, bits: int, bucket: int, seed: int, offset: int
) -> None:
    x = case.vector()
    if bucket == 10**9:
        bucket = max(1, x.numel())
    with using(isa):
        packed, scales = kernels.quantize(x, bits, bucket, seed, offset)
        values = kernels.dequantize(packed, scales, x.numel(), bits, bucket)
    expected = reference.quantize(x, bits, bucket, seed, offset)
    assert same_bits(packed, expected[0])
    assert torch.equal(scales.nan_to_num(-1), expected[1].nan_to_num(-1))
    again = reference.dequantize(packed, scales, x.numel(), bits, bucket)
    assert torch.equal(values.nan_to_num(-1), again.nan_to_num(-1))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("bits", BITS)
def test_several_threads_give_the_same_bits(isa: str, bits: int) -> None:
    x = Case("normal", 700_003, torch.float32).vector()
    expected = reference.quantize(x, bits, 1001, 5)
    with using(isa, threads=2):
        packed, scales = kernels.quantize(x, bits, 1001, 5)
        values = kernels.dequantize(packed, scales, x.numel(), bits, 1001)
    assert same_bits(packed, expected[0])
    assert same_bits(scales, expected[1])
    assert same_bits(values, reference.dequantize(*expected, x.numel(), bits, 1001))


@given(cases((torch.float32,)), bits_, buckets, st.integers(0, 99))
def test_values_stay_within_one_level(case: Case, bits: int, bucket: int, seed: int) -> None:
    x = case.vector()
    bucket = min(bucket, max(1, x.numel()))
    packed, scales = kernels.quantize(x, bits, bucket, seed)
    values = kernels.dequantize(packed, scales, x.numel(), bits, bucket)
    each = scales.repeat_interleave(bucket)[: x.numel()]
    finite = each.isfinite()
    assert bool(values[~finite].isnan().all())
    level = each[finite].double() / (2 ** (bits - 1) - 1)
    error = (values[finite].double() - x[finite].double()).abs()
    # Both the quotient and the value are rounded to float32.
    tiny = torch.finfo(torch.float32).smallest_normal * 2.0**-20
    assert bool((error <= level * (1 + 1e-5) + tiny).all())
    assert bool((values[finite] * x[finite].sign() >= 0).all())


@pytest.mark.parametrize("bits", BITS)
def test_the_mean_over_seeds_is_the_value(bits: int) -> None:
    x = Case("normal", 512, torch.float32).vector()
    draws = 4000
    total = torch.zeros(512, dtype=torch.float64)
    for seed in range(draws):
        total += kernels.dequantize(*kernels.quantize(x, bits, 512, seed), 512, bits, 512)
    level = float(x.abs().max()) / (2 ** (bits - 1) - 1)
    # Five standard errors of a fair coin toss between two levels.
    assert float((total / draws - x).abs().max()) < 5 * level / 2 / draws**0.5


def test_levels_come_back_exactly() -> None:
    x = torch.tensor([7.0, -7, 3, -1, 0, 6, -0.0])
    packed, scales = kernels.quantize(x, 4, 7, seed=3)
    assert scales.tolist() == [7]
    assert torch.equal(kernels.dequantize(packed, scales, 7, 4, 7), x)


def test_bucket_of_zeros_and_bucket_with_nan() -> None:
    x = torch.tensor([0.0, 0, 1, torch.nan, 2, -2])
    packed, scales = kernels.quantize(x, 8, 2, seed=0)
    values = kernels.dequantize(packed, scales, 6, 8, 2)
    assert values[:2].tolist() == [0, 0]
    assert bool(values[2:4].isnan().all())
    assert values[4:].tolist() == [2, -2]


def test_parts_of_a_vector_continue_the_random_sequence() -> None:
    x = Case("normal", 1000, torch.float32).vector()
    whole = kernels.quantize(x, 8, 100, seed=9)[0]
    parts = [kernels.quantize(p, 8, 100, 9, 300 * i)[0] for i, p in enumerate(x.split(300))]
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
    packed, scales = kernels.quantize(torch.ones(10), 4, 4, 0)
    with pytest.raises(InputError, match="need 6 bytes and 3 scales"):
        kernels.dequantize(packed, scales, 12, 4, 4)
    with pytest.raises(InputError, match="bits must be"):
        kernels.quantize(torch.ones(10), 3, 4, 0)
    with pytest.raises(InputError, match="bucket must be"):
        kernels.quantize(torch.ones(10), 4, 0, 0)
