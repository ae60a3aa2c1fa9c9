"""Samples come back from records as they were."""

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparcel.data.records import pack, unpack
from sparcel.data.source import unpacked
from sparcel.errors import InputError

DTYPES = (torch.float32, torch.bfloat16, torch.uint8, torch.int64, torch.bool, torch.complex64)
SHAPES = st.lists(st.integers(0, 4), max_size=3)


@st.composite
def tensors(draw):
    shape, dtype = draw(SHAPES), draw(st.sampled_from(DTYPES))
    made = torch.arange(int(np.prod(shape))).remainder(5).view(shape).to(dtype)
    return made.mT if made.ndim > 1 and draw(st.booleans()) else made


@st.composite
def arrays(draw):
    shape, dtype = draw(SHAPES), draw(st.sampled_from(("f4", "i2", "U3", "?", "O")))
    made = np.arange(int(np.prod(shape))).reshape(shape).astype(dtype)
    return made[..., ::2] if made.ndim and draw(st.booleans()) else made


PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
SAMPLES = st.recursive(
    PLAIN | tensors() | arrays(),
    lambda inner: (
        st.lists(inner, max_size=3).map(tuple)
        | st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=5,
)


def alike(a, b):
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        same = (a.dtype, a.shape) == (b.dtype, b.shape)
        return same and bool(np.array_equal(a, b))
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(alike, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(alike(a[key], b[key]) for key in a)
    return type(a) is type(b) and pickle.dumps(a) == pickle.dumps(b)


@given(SAMPLES, st.integers(0, 200))
def test_samples_come_back(sample, padding):
    record = pack(sample)
    assert alike(sample, unpacked(record))
    longer = np.frombuffer(bytearray(record) + bytes(padding), np.uint8)
    assert alike(sample, unpack(longer))


def test_other_tensors_come_back_as_torch_pickles_them():
    parameter = torch.nn.Parameter(torch.ones(3))
    found = unpacked(pack({"parameter": parameter, "conjugate": torch.ones(2, 2) * 1j}))
    assert isinstance(found["parameter"], torch.nn.Parameter)
    assert torch.equal(unpacked(pack((torch.ones(2) * 1j).conj())), torch.ones(2) * -1j)


def test_tensors_of_a_sample_share_no_elements_and_can_be_changed():
    first, second = unpacked(pack((torch.zeros(3, dtype=torch.uint8), np.zeros(3))))
    first += 1
    second += 2
    assert first.tolist() == [1] * 3
    assert second.tolist() == [2] * 3


def test_what_cannot_be_pickled_is_named():
    with pytest.raises(InputError, match=r"type tuple cannot be pickled .* return plain data"):
        pack((1, lambda: None))
