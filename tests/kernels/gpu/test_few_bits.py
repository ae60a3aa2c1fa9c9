"""Few bits a value, on a GPU or in Triton's interpreter: the bits are those of the definition."""

from itertools import product

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

pytest.importorskip("triton")

from sparcel.core import device
from sparcel.core.kernels.definitions import few_bits as reference
from sparcel.core.kernels.gpu import few_bits as kernels
from tests.card import moved, on_card, seen
from tests.kernels.paths import KINDS, Case
from tests.sampling import meeting
from tests.strategies import FLOATS, same_bits

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
few = settings(max_examples=10)
pytestmark = [
    pytest.mark.gpu,
    # NumPy computes in Triton's interpreter.
    pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning"),
]

BITS = range(2, 9)
SCALES = (torch.bfloat16, torch.float32)
bits_ = st.sampled_from(BITS)
blocks = st.sampled_from([8, 32, 64, 512, 24, 1000, 4096])
seeds = st.none() | st.sampled_from([0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1, -5])
offsets = st.sampled_from([0, 4, 1, 2**34 + 3, 2**40])
scales_ = st.sampled_from(SCALES)


@st.composite
def vectors(draw: st.DrawFn) -> Tensor:
    """Draw a vector of every kind in turn, so that blocks of all kinds are in it."""
    lengths = st.sampled_from([0, 1, 7, 31, 64, 65, 300])
    dtype = draw(st.sampled_from(FLOATS))
    kinds = draw(st.permutations(KINDS))
    parts = [Case(kind, draw(lengths), dtype, draw(st.integers(0, 9))) for kind in kinds[:5]]
    return torch.cat([part.vector() for part in parts])[draw(st.booleans()) :]


def alike(found: Tensor, expected: Tensor) -> bool:
    """Tell whether two tensors hold the same bits; those of NaN are the device's choice."""
    found, expected = seen(found).cpu(), expected.cpu()
    if found.is_floating_point():
        found = torch.where(found.isnan(), torch.nan, found)
        expected = torch.where(expected.isnan(), torch.nan, expected)
    return same_bits(found, expected)


def check(
    x: Tensor, bits: int, block: int, seed: int | None, offset: int, scale: torch.dtype
) -> None:
    """Quantise on the device, and compare all results with the definition's."""
    made = kernels.quantize(x.to(DEVICE), bits, block, seed, offset, scale)
    expected = reference.quantize(x, bits, block, seed, offset, scale)
    assert all(map(alike, made, expected))
    values = kernels.dequantize(made.codes, made.scales, x.numel(), bits, block)
    scales = expected.scales
    assert alike(values, reference.dequantize(expected.codes, scales, x.numel(), bits, block))


@given(vectors(), bits_, blocks, seeds, offsets, scales_)
@few
def test_quantize_has_the_bits_of_the_definition(
    x: Tensor, bits: int, block: int, seed: int | None, offset: int, scale: torch.dtype
) -> None:
    check(x, bits, block, seed, offset, scale)


@pytest.mark.parametrize(
    ("bits", "vector"), meeting(BITS, product([None, 7], FLOATS), each=4), ids=str
)
def test_every_kind_of_vector_in_one(bits: int, vector: tuple[int | None, torch.dtype]) -> None:
    seed, dtype = vector
    x = torch.cat([Case(kind, 150, dtype).vector() for kind in KINDS])
    for scale in SCALES:
        check(x, bits, 32, seed, 0, scale)


@pytest.mark.parametrize(
    ("bits", "blocks"), meeting(BITS, product([None, 7], [32, 64, 512]), each=2), ids=str
)
def test_several_programs(bits: int, blocks: tuple[int | None, int]) -> None:
    seed, block = blocks
    check(Case("cauchy", 2 * 2048 + 13, torch.float32).vector(), bits, block, seed, 0, SCALES[0])


@pytest.mark.parametrize("block", [1, 100, 5000])
def test_other_blocks_are_left_to_the_definition(block: int) -> None:
    check(Case("normal", 10_001, torch.float32).vector(), 4, block, 3, 0, SCALES[0])


@given(vectors(), st.sampled_from(FLOATS))
@few
def test_limited_has_the_bits_of_the_definition(x: Tensor, dtype: torch.dtype) -> None:
    assert alike(kernels.limited(x.to(DEVICE), dtype), reference.limited(x, dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("wide", [torch.float32, torch.float64], ids=str)
def test_limited_rounds_to_nearest_and_stays_finite(wide: torch.dtype, dtype: torch.dtype) -> None:
    """For many numbers of 16 bits, those halfway between two, and the next of these."""
    exact = torch.arange(0, 1 << 16, 37, dtype=torch.int32).to(torch.int16).view(dtype).to(wide)
    following = (torch.arange(1, (1 << 16) + 1, 37) % (1 << 16)).to(torch.int16).view(dtype)
    between = (exact + following.to(wide)) / 2
    step = torch.tensor(torch.inf, dtype=wide)
    x = torch.cat((exact, between, between.nextafter(step), between.nextafter(-step)))
    assert alike(kernels.limited(x.to(DEVICE), dtype), reference.limited(x, dtype))


@given(st.integers(0, 200), bits_, st.sampled_from([8, 24, 64]), scales_, st.booleans())
@few
def test_any_codes_and_scales_are_read(
    size: int, bits: int, block: int, scale: torch.dtype, two: bool
) -> None:
    """Messages may hold what `quantize` never writes, such as scales that are negative."""
    generator = torch.Generator().manual_seed(size)
    count = reference.scales_count(size, bits, block, stochastic=not two)
    codes = torch.randint(0, 256, (-(-size * bits // 8),), generator=generator, dtype=torch.uint8)
    scales = torch.randint(0, 256, (count, scale.itemsize), generator=generator, dtype=torch.uint8)
    scales = scales.view(scale).view(-1)
    found = kernels.dequantize(codes.to(DEVICE), scales.to(DEVICE), size, bits, block)
    assert alike(found, reference.dequantize(codes, scales, size, bits, block))


@pytest.mark.skipif(DEVICE != "cpu", reason="the card stands for a GPU where there is none")
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("seed", [None, 7])
def test_nothing_waits_for_the_gpu(bits: int, seed: int | None) -> None:
    x = Case("normal", 1000, torch.float32).vector()
    before = device.reads()
    with on_card():
        for block in (64, 100):
            made = kernels.quantize(moved(x), bits, block, seed)
            values = kernels.dequantize(made.codes, made.scales, x.numel(), bits, block)
            narrow = kernels.limited(values, torch.float16)
            expected = reference.quantize(x, bits, block, seed)
            assert all(map(alike, made, expected))
            assert alike(narrow, reference.limited(expected.values, torch.float16))
    assert device.reads() == before
