"""Quantised messages: decoded values, lengths, and refusal of corrupt messages."""

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparcel import SparseStream, formats
from sparcel.errors import FormatError, InputError
from sparcel.formats import COO, Qsgd
from sparcel.formats.header import Header
from sparcel.kernels import packed_words
from tests.strategies import FLOATS, full, same_stream, streams

bits = st.sampled_from([2, 4, 8])
buckets = st.sampled_from([8, 24, 1024])
SPACINGS = st.sampled_from([1, 7, 2**40])


def dense_stream(size, dtype=torch.float32, seed=0):
    values = torch.randn(size, generator=torch.Generator().manual_seed(seed))
    return SparseStream(None, values.to(dtype), size)


def sparse_stream(count, dtype=torch.float32, seed=0, spacing=7):
    """Return a stream of so many entries, ``spacing`` coordinates apart."""
    dense = dense_stream(count, dtype, seed)
    indices = 3 + spacing * torch.arange(count)
    return SparseStream(indices, dense.values, spacing * count + 5)


def padded(count):
    return (count + 7) // 8 * 8


@given(
    bits,
    buckets,
    st.integers(0, 200),
    st.sampled_from(FLOATS),
    st.integers(0, 2**70),
    st.booleans(),
    st.booleans(),
)
def test_decoded_values_differ_by_at_most_a_level(bits, bucket, size, dtype, seed, dense, packed):
    stream = (dense_stream if dense else sparse_stream)(size, dtype, seed % 1000)
    quantizer = Qsgd(bits, bucket, seed, packed)
    decoded = formats.decode(quantizer.encode(stream, start=3).message, stream)
    assert (decoded.dtype, decoded.size, decoded.is_dense) == (dtype, stream.size, dense)
    assert dense or torch.equal(decoded.indices, stream.indices)
    levels = 2 ** (bits - 1) - 1
    for start in range(0, size, bucket):
        part = stream.values[start : start + bucket].double()
        error = (decoded.values[start : start + bucket].double() - part).abs()
        rounding = part.abs().max() * torch.finfo(dtype).eps
        assert bool((error <= part.abs().max() / levels + rounding).all())


@given(bits, buckets, st.integers(0, 50), st.sampled_from(FLOATS), st.sampled_from([0, 4, 8]))
def test_message_has_the_documented_length(bits, bucket, count, dtype, index_bytes):
    stream = dense_stream(count, dtype)
    if index_bytes:
        stream = sparse_stream(count, dtype, spacing=2**40 if index_bytes == 8 else 7)
    message = Qsgd(bits, bucket).encode(stream).message
    exact = COO.encode(stream).message.numel()
    index_bytes = index_bytes if count else 0
    narrow = 40 + padded(4 * -(-count // bucket)) + padded(-(-count * bits // 8))
    assert message.numel() == min(exact, narrow + padded(count * index_bytes))
    nnz = None if stream.is_dense else count
    told = Qsgd(bits, bucket).expected_bytes(nnz, stream.size, dtype.itemsize)
    assert message.numel() == told
    assert message.numel() <= Qsgd(bits, bucket).max_bytes(nnz, stream.size, dtype.itemsize)
    if nnz is not None:
        short = Qsgd(bits, bucket, packed=True).encode(stream).message.numel()
        assert short == min(exact, narrow + 8 * packed_words(count, stream.size))


@given(bits, buckets, st.integers(0, 5000), st.sampled_from(FLOATS), st.booleans())
def test_a_stream_turns_dense_where_that_takes_fewer_bytes(bits, bucket, size, dtype, packed):
    format, value_bytes = Qsgd(bits, bucket, packed=packed), dtype.itemsize
    least = format.dense_from(size, value_bytes)
    dense = format.expected_bytes(None, size, value_bytes)
    assert format.expected_bytes(least - 1, size, value_bytes) <= dense
    assert least > size or format.expected_bytes(least, size, value_bytes) > dense


@pytest.mark.parametrize(("bits", "share"), [(8, 0.2), (4, 0.113), (2, 0.061)])
def test_quantised_streams_turn_dense_earlier_than_exact_ones(bits, share):
    assert Qsgd(bits).dense_from(10**6, 4) == pytest.approx(share * 10**6, rel=0.01)
    assert Qsgd(bits).dense_from(10**6, 40) == COO.dense_from(10**6, 40)  # rows


@given(streams())
def test_other_streams_travel_exactly(stream):
    """Rows, integers, and what is not finite; nothing is longer than with the plain format."""
    message, lost = Qsgd(4, 8).encode(stream)
    exact = COO.encode(stream).message
    assert message.numel() <= exact.numel()
    if lost is None:
        assert torch.equal(message, exact)
    else:
        assert stream.width is None and stream.dtype.is_floating_point
        assert same_indices(lost, stream)
        decoded = formats.decode(message, stream)
        rounding = 4 * torch.finfo(stream.dtype).eps * full(stream).abs()
        assert bool(((full(decoded) + full(lost) - full(stream)).abs() <= rounding).all())
    stream.finite = False
    assert same_stream(formats.decode(Qsgd(4, 8).encode(stream).message), stream)


def same_indices(one, other):
    return one.is_dense if other.is_dense else torch.equal(one.indices, other.indices)


@pytest.mark.parametrize("large", [float("inf"), float("nan"), 1e300])
@pytest.mark.parametrize("make", [dense_stream, sparse_stream])
def test_values_that_no_scale_holds_travel_exactly(make, large):
    stream = make(40, torch.float64)
    stream.values[7] = large
    message, lost = Qsgd(4).encode(stream)
    assert lost is None
    assert same_stream(formats.decode(message), stream)


@given(bits, st.integers(32, 100), st.booleans())
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


def test_a_sparse_stream_is_rounded_as_its_values_are():
    sparse, dense = sparse_stream(200), dense_stream(200)
    one, other = (
        formats.decode(Qsgd(4, 24, seed=5).encode(s, start=9).message) for s in (sparse, dense)
    )
    assert torch.equal(one.values, other.values)


@given(st.data(), bits, st.booleans(), st.booleans())
def test_truncated_and_overwritten_messages_are_refused_or_harmless(data, bits, dense, packed):
    stream = dense_stream(30) if dense else sparse_stream(30, spacing=data.draw(SPACINGS))
    message = Qsgd(bits, 8, seed=1, packed=packed).encode(stream).message
    length = data.draw(st.integers(0, message.numel() - 1))
    with pytest.raises(FormatError):
        formats.decode(message[:length])
    message[data.draw(st.integers(0, message.numel() - 1))] = data.draw(st.integers(0, 255))
    try:
        stream = formats.decode(message)
    except FormatError:
        return
    assert stream.nnz == stream.values.shape[0] <= stream.size
    SparseStream(stream.indices, stream.values, stream.size)  # checks the indices


def forged(**changes):
    """Return a sparse message whose header was changed, in a buffer with room after it."""
    message = Qsgd(4, 8).encode(sparse_stream(30)).message
    header = Header.parse(message)
    message = torch.cat((message, torch.zeros(1000, dtype=torch.uint8)))
    header._replace(**changes).pack_into(message)
    return message


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"nnz": 31}, "a qsgd message of 31 coordinates takes 200 bytes, its header says 192"),
        ({"length": 208}, "a qsgd message of 30 coordinates takes 192 bytes, its header says 208"),
        ({"wide_indices": True}, "torch.int64 indices do not belong"),
        ({"size": 2**40}, "torch.int32 indices do not belong"),
        ({"dense": True, "size": 30}, "a qsgd message of 30 coordinates takes 72 bytes"),
        ({"size": 100}, "corrupt message: index 101 at position 14"),
        ({"width": 1}, "impossible qsgd header"),
        ({"dtype": torch.int32}, "impossible qsgd header"),
        ({"detail": 3 << 16 | 8}, "impossible qsgd header: bits=3, bucket=8"),
        ({"detail": 4 << 16}, "impossible qsgd header: bits=4, bucket=0"),
        ({"detail": 1 << 25 | 4 << 16 | 8}, "impossible qsgd header: bits=516, bucket=8"),
    ],
)
def test_decode_says_what_is_wrong_with_a_message(changes, said):
    with pytest.raises(FormatError, match=re.escape(said)):
        formats.decode(forged(**changes))


def test_indices_out_of_order_are_refused():
    message = forged()
    message[192 - 4 * 30 : 192 - 4 * 29].view(torch.int32)[0] = 10  # as the second one
    with pytest.raises(FormatError, match="index 10 at position 1 is out of order"):
        formats.decode(message)


def test_packed_indices_that_are_missing_are_refused():
    message = Qsgd(4, 8, packed=True).encode(sparse_stream(30)).message
    message[40 + 16 + 16 :] = 0
    with pytest.raises(FormatError, match="it does not hold 30 packed indices"):
        formats.decode(message)


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
