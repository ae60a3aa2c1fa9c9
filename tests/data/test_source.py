"""Samples come back from records as they were."""

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparcel.errors import InputError
from sparcel.products.data.records import pack, unpack

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


def unpacked(record):
    return unpack(bytearray(record))


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
    record = pack(0, sample)
    assert alike(sample, unpacked(record))
    assert alike(sample, unpacked(record + bytes(padding)))


def test_other_tensors_come_back_as_torch_pickles_them():
    parameter = torch.nn.Parameter(torch.ones(3))
    found = unpacked(pack(0, {"parameter": parameter, "conjugate": torch.ones(2, 2) * 1j}))
    assert isinstance(found["parameter"], torch.nn.Parameter)
    assert torch.equal(unpacked(pack(0, (torch.ones(2) * 1j).conj())), torch.ones(2) * -1j)


class Tagged(torch.Tensor):
    """A tensor with more than its elements, as those of torchvision are."""


def tagged(tensor):
    tensor.tag = "a name"
    return tensor


VIEWS = {
    "row": lambda base: base[3],
    "column": lambda base: base[:, 3],
    "conjugate": lambda base: base.to(torch.complex64)[3].conj(),
    "negative": lambda base: base.to(torch.complex64).conj().imag[3],
    "subclass": lambda base: tagged(base[3].as_subclass(Tagged)),
    "conjugate of a subclass": lambda base: base.to(torch.complex64)[3].conj().as_subclass(Tagged),
    "attribute": lambda base: tagged(base[3]),
    "learned": lambda base: base[3].requires_grad_(),
    "parameter": lambda base: torch.nn.Parameter(base[3]),
}


@pytest.mark.parametrize("kind", VIEWS)
def test_a_view_takes_the_room_of_its_elements(kind):
    view = VIEWS[kind](torch.arange(1e6).view(1000, 1000))
    record = pack(0, {"a": view, "b": [view]})
    found = unpacked(record)["a"]
    assert len(record) < view.nbytes + 1500
    assert type(found) is type(view)
    assert found.requires_grad == view.requires_grad
    assert found.__dict__ == view.__dict__
    assert torch.equal(found.detach(), view.detach())


OTHERS = {
    **VIEWS,
    "all of a subclass": lambda base: base.as_subclass(Tagged),
    "none of a subclass": lambda base: base[:0].clone().as_subclass(Tagged),
    "storage": lambda base: base[3].clone().untyped_storage(),
    "sparse": lambda base: base[:3].to_sparse(),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_equal_samples_are_equal_records_at_any_address(kind):
    samples = [OTHERS[kind](torch.arange(1e4).view(100, 100)) for _ in range(3)]
    records = [pack(0, sample) for sample in samples]
    assert records == records[:1] * 3
    assert pack(0, unpacked(records[0])) == records[0]
    assert type(unpacked(records[0])) is type(samples[0])


def test_tensors_of_a_sample_share_no_elements_and_can_be_changed():
    first, second = unpacked(pack(0, (torch.zeros(3, dtype=torch.uint8), np.zeros(3))))
    first += 1
    second += 2
    assert first.tolist() == [1] * 3
    assert second.tolist() == [2] * 3


def test_what_cannot_be_pickled_is_named():
    with pytest.raises(
        InputError, match=r"sample 7, of type tuple, cannot be pickled .* return plain"
    ):
        pack(7, (1, lambda: None))
