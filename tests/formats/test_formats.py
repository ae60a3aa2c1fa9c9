"""What formats are called, how long their messages are, and what their value codes lose."""

from __future__ import annotations

import pickle
from math import log2

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparcel import SparseStream
from sparcel.core import formats
from sparcel.core.formats import HEADER_BYTES, RAW, FewBits, Format, HalfValues, format_named
from sparcel.errors import InputError
from tests.strategies import FLOATS, make_stream

PACKED = Format("packed")
NAMES = [
    f"{indices}{values}"
    for indices in ("raw", "packed", "chunked")
    for values in ("", ":float16", ":bfloat16", ":8", ":4", ":2")
]
SIZES = st.integers(0, 2**63 - 1) | st.integers(0, 3000)
VALUE_BYTES = st.sampled_from([0, 2, 4, 8, 12, 400])
FLOAT_BYTES = st.sampled_from([2, 4, 8])
BITS = st.sampled_from([2, 4, 8])


@pytest.mark.parametrize("name", NAMES)
def test_formats_are_made_by_name(name):
    format = format_named(name)
    assert format.name == name
    assert format_named(format) is format
    assert format.loses == (":" in name)
    assert format.exact == Format(name.partition(":")[0])
    copy = pickle.loads(pickle.dumps(format))
    assert (copy, hash(copy), repr(copy)) == (format, hash(format), repr(format))


def test_value_codes_are_numbers_names_or_objects():
    assert Format("packed", 4) == Format("packed", "4") == Format("packed", FewBits(4))
    assert Format("raw", "bfloat16") == Format(values=HalfValues("bfloat16"))
    assert Format("raw", "plain") == Format() == RAW
    assert FewBits(4).block == 64
    assert FewBits(2).block == 32


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: format_named("pack"), "did you mean 'packed'"),
        (lambda: format_named("packed:9"), "did you mean 'packed:"),
        (lambda: format_named("auto", "answer"), "answer cannot be 'auto'; it must be one of raw,"),
        (lambda: format_named(4), "format cannot be 4; it must be one of raw, packed,"),
        (lambda: Format("bitmap"), "an index code"),
        (lambda: Format("raw", 9), "a value code"),
        (lambda: FewBits(9), "bits must lie in .2, 8., got 9"),
        (lambda: FewBits(4, 12), "multiple of 8 from 8 to 65536, got 12"),
        (lambda: FewBits(4, 1 << 17), "got 131072"),
        (lambda: FewBits(4, scale="float16"), "the dtype of a scale"),
        (lambda: HalfValues("float32"), "a 16-bit dtype"),
    ],
)
def test_unknown_codes_and_settings_are_refused(make, said):
    with pytest.raises(InputError, match=said):
        make()


@pytest.mark.parametrize("name", [name for name in NAMES if ":" in name])
def test_rows_and_integers_are_not_rounded(name):
    for stream in (make_stream([1], 0, 9, width=2), make_stream([1], 0, 9, torch.int64)):
        with pytest.raises(InputError, match=f"the format '{name}' rounds scalar floats"):
            format_named(name).encode(stream)


@given(st.integers(1, 2**40), st.data())
def test_packed_indices_take_few_bits_more_than_their_entropy(size, data):
    """0.6 bits an index, and padding, beyond what sparse indices anywhere hold at least."""
    nnz = data.draw(st.integers(1, size))
    index_bits = 8 * (PACKED.nbytes(nnz, size, 0) - HEADER_BYTES)
    assert index_bits <= nnz * (log2(size / nnz) + log2(2.718281828) + 0.6) + 128
    assert index_bits <= size + 64


@pytest.mark.parametrize("share", [0.001, 0.003, 0.01, 0.03, 0.06, 0.1])
def test_uniform_indices_take_at_most_an_eighth_above_their_entropy(share):
    size = 1 << 24
    entropy = -share * log2(share) - (1 - share) * log2(1 - share)
    bits = 8 * (PACKED.nbytes(round(share * size), size, 0) - HEADER_BYTES) / size
    assert entropy < bits <= 1.12 * entropy


@given(SIZES, st.sampled_from(NAMES), FLOAT_BYTES, st.data())
def test_lengths_never_fall_and_streams_turn_dense_where_that_is_shorter(
    size, name, value_bytes, data
):
    format = format_named(name)
    nnz = data.draw(st.integers(0, size))
    fewer = data.draw(st.integers(0, nnz))
    assert format.nbytes(fewer, size, value_bytes) <= format.nbytes(nnz, size, value_bytes)
    least, dense = format.dense_from(size, value_bytes), format.nbytes(None, size, value_bytes)
    if name != "raw":  # which goes by memory, without padding
        assert least > size or format.nbytes(least, size, value_bytes) > dense
        assert least == 1 or format.nbytes(least - 1, size, value_bytes) <= dense


@given(SIZES, VALUE_BYTES, st.data())
def test_no_packed_message_is_much_longer_than_a_plain_one(size, value_bytes, data):
    nnz = data.draw(st.integers(0, size))
    assert PACKED.nbytes(nnz, size, value_bytes) <= RAW.nbytes(nnz, size, value_bytes) + 16


@pytest.mark.parametrize(
    ("values", "bits", "extra"), [(8, 8.25, 0.01), (4, 4.25, 0.01), (2, 3.0, 0.01)]
)
def test_few_bits_take_few_bits_with_their_scales(values, bits, extra):
    count = 1 << 20
    nbytes = Format("raw", values).nbytes(None, count, 4) - HEADER_BYTES
    assert 8 * nbytes / count == pytest.approx(bits, abs=extra)


def dense_stream(size, dtype=torch.float32, seed=0):
    values = torch.randn(size, generator=torch.Generator().manual_seed(seed))
    return SparseStream(None, values.to(dtype), size)


CODES = [HalfValues("float16"), HalfValues("bfloat16"), *map(FewBits, range(2, 9))]


@pytest.mark.parametrize("code", CODES, ids=str)
@given(st.integers(0, 200), st.sampled_from(FLOATS), st.integers(0, 99))
def test_a_code_loses_less_than_the_values(code, size, dtype, seed):
    """Less than what is sent, so that what is given back fades."""
    stream = dense_stream(size, dtype, seed)
    held = Format("raw", code).encode(stream).stream
    assert (held.dtype, held.size, held.finite) == (dtype, size, True)
    lost = (stream.values - held.values).double()
    assert float(lost.norm()) <= 0.75 * float(stream.values.double().norm())


@pytest.mark.parametrize("code", CODES, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_finite_values_stay_finite(code, dtype):
    largest = torch.finfo(dtype).max
    values = torch.tensor([largest, -largest, 0.0, 1.0] * 20, dtype=dtype)
    held = Format("raw", code).encode(SparseStream(None, values, 80)).stream
    assert held.finite
    assert bool(held.values.isfinite().all())


@pytest.mark.parametrize("code", CODES, ids=str)
@pytest.mark.parametrize("special", [float("nan"), float("inf")])
def test_what_is_not_finite_makes_a_stream_that_says_so(code, special):
    values = torch.arange(80.0)
    values[7] = special
    message, held = Format("raw", code).encode(SparseStream(None, values, 80))
    assert not held.finite
    assert not formats.decode(message).finite


@pytest.mark.parametrize("code", CODES, ids=str)
def test_zeros_stay_zero(code):
    held = Format("raw", code).encode(SparseStream(None, torch.zeros(70), 70)).stream
    assert not held.values.any()


@given(BITS, st.integers(0, 2**64))
def test_random_rounding_follows_the_key_alone(bits, key):
    stream = dense_stream(100)
    by = Format("raw", FewBits(bits, 8, stochastic=True))
    again, other = by.encode(stream, key), by.encode(stream, key + 1)
    assert torch.equal(*again.message, *by.encode(stream, key).message)
    assert not torch.equal(*again.message, *other.message)
    nearest = Format("raw", FewBits(bits, 8))
    assert torch.equal(*nearest.encode(stream, key).message, *nearest.encode(stream).message)


@pytest.mark.parametrize("scale", ["float32", "bfloat16"])
def test_random_rounding_is_unbiased(scale):
    """The mean over keys comes within five standard errors of every value."""
    stream, by = dense_stream(32), Format("raw", FewBits(2, 8, scale, stochastic=True))
    rounds = torch.stack([by.encode(stream, key).stream.values for key in range(2000)])
    bound = 5 * rounds.std(dim=0) / 2000**0.5 + 1e-6
    assert bool(((rounds.mean(dim=0) - stream.values).abs() <= bound).all())
