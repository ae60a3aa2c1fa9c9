"""Quantised messages: decoded values, lengths, and refusal of corrupt messages."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparcel import SparseStream, formats
from sparcel.errors import FormatError, InputError
from sparcel.formats import Qsgd
from tests.strategies import FLOATS, same_stream

bits = st.sampled_from([2, 4, 8])
buckets = st.sampled_from([8, 24, 1024])


def dense_stream(size, dtype=torch.float32, seed=0):
    values = torch.randn(size, generator=torch.Generator().manual_seed(seed))
    return SparseStream(None, values.to(dtype), size)


@given(bits, buckets, st.integers(0, 200), st.sampled_from(FLOATS), st.integers(0, 2**70))
def test_decoded_values_differ_by_at_most_a_level(bits, bucket, size, dtype, seed):
    stream = dense_stream(size, dtype, seed % 1000)
    decoded = formats.decode(Qsgd(bits, bucket, seed).encode(stream, start=3).message, stream)
    assert (decoded.dtype, decoded.size, decoded.is_dense) == (dtype, size, True)
    levels = 2 ** (bits - 1) - 1
    for start in range(0, size, bucket):
        part = stream.values[start : start + bucket].double()
        error = (decoded.values[start : start + bucket].double() - part).abs()
        rounding = part.abs().max() * torch.finfo(dtype).eps
        assert bool((error <= part.abs().max() / levels + rounding).all())


@given(bits, buckets, st.integers(1, 50))
def test_message_has_the_documented_length(bits, bucket, size):
    def padded(count):
        return (count + 7) // 8 * 8

    message = Qsgd(bits, bucket).encode(dense_stream(size)).message
    expected = 40 + padded(4 * -(-size // bucket)) + padded(-(-size * bits // 8))
    assert message.numel() == expected


@given(bits, st.integers(1, 100), st.booleans())
def test_same_seed_gives_the_same_message_also_for_a_part(bits, size, finite):
    stream = dense_stream(16 + size)
    stream.finite = finite
    whole = Qsgd(bits, 8, seed=7).encode(stream).message
    assert torch.equal(whole, Qsgd(bits, 8, seed=7).encode(stream).message)
    assert formats.decode(whole).finite == finite
    part = formats.decode(
        Qsgd(bits, 8, seed=7).encode(stream.slice(16, 16 + size), start=16).message
    )
    assert torch.equal(part.values, formats.decode(whole).values[16:])


def test_rounding_is_unbiased():
    """The mean over seeds comes within five standard errors of every value."""
    stream = dense_stream(32)
    rounds = torch.stack(
        [formats.decode(Qsgd(2, 8, seed).encode(stream).message).values for seed in range(2000)]
    )
    bound = 5 * rounds.std(dim=0) / 2000**0.5 + 1e-6
    assert bool(((rounds.mean(dim=0) - stream.values).abs() <= bound).all())


@given(bits, st.integers(0, 40))
def test_zeros_stay_zero(bits, size):
    stream = SparseStream(None, torch.zeros(size), size)
    assert same_stream(formats.decode(Qsgd(bits, 8, seed=1).encode(stream).message), stream)


@given(st.data(), bits)
def test_truncated_and_overwritten_messages_are_refused_or_harmless(data, bits):
    message = Qsgd(bits, 8, seed=1).encode(dense_stream(30)).message
    length = data.draw(st.integers(0, message.numel() - 1))
    with pytest.raises(FormatError):
        formats.decode(message[:length])
    message[data.draw(st.integers(0, message.numel() - 1))] = data.draw(st.integers(0, 255))
    try:
        stream = formats.decode(message)
    except FormatError:
        return
    assert stream.nnz == stream.values.shape[0] <= stream.size


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bits": 3}, "bits must be 8, 4 or 2, got 3"),
        ({"bits": 4, "bucket": 12}, "multiple of 8 from 8 to 65528, got 12"),
        ({"bits": 4, "bucket": 65536}, "got 65536"),
    ],
)
def test_unsupported_settings_are_refused(settings, message):
    with pytest.raises(InputError, match=message):
        Qsgd(**settings)
