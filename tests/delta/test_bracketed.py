"""Publishers that keep one byte an element, and servers that prepare while they serve."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from sparcel.errors import InputError
from sparcel.products.delta import Folder, Publisher, Subscriber, read_index
from sparcel.products.delta.base import RememberedPart, remembered
from sparcel.products.delta.parts import parts_of
from tests.delta.histories import Failing
from tests.delta.pairs import LAYOUTS, laid_out

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.int32)
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def moved(tensor: Tensor, by: Tensor) -> None:
    """Move elements by so many bit patterns, which are units in the last place away from zero."""
    bits = tensor.view(INTEGERS[tensor.itemsize])
    bits += by.to(bits.dtype)


@given(st.sampled_from(DTYPES), st.integers(1, 5000), st.integers(0, 2**32))
def test_weights_that_move_little_are_recalled(dtype: torch.dtype, size: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensor = (torch.randn(size, generator=generator) * 8 + 64).to(dtype)  # far from zero
    before = tensor.clone()
    noted = remembered(parts_of({"x": tensor}))["x"]
    moved(tensor, torch.randint(-3, 4, (size,), generator=generator))
    recalled = noted.elements(0, size)
    assert torch.equal(recalled.view(torch.uint8), before.view(torch.uint8))
    begin = size // 3
    assert torch.equal(
        noted.elements(begin, size).view(torch.uint8), before[begin:].view(torch.uint8)
    )


def test_the_smallest_weights_may_move_far() -> None:
    tensor = torch.linspace(1, 2, 1000).bfloat16()
    tensor[5] = 1e-9
    noted = remembered(parts_of({"x": tensor}))["x"]
    assert isinstance(noted, RememberedPart)
    tensor[5] = -3.0
    assert noted.elements(5, 6).view(torch.bfloat16) == torch.tensor(1e-9).bfloat16()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (30,), (5, 6), (2, 3, 4, 5)])
def test_tensors_may_lie_in_memory_in_any_way(
    tmp_path: Path, shape: tuple[int, ...], layout: str
) -> None:
    weights = {"x": laid_out(torch.full(shape, 3.0).bfloat16(), layout)}
    publisher, subscriber = Publisher(tmp_path, bracketed=True), Subscriber(tmp_path)
    for _ in range(3):
        publisher.publish(weights)
        subscriber.update()
        assert torch.equal(subscriber.tensors["x"], weights["x"])
        moved(weights["x"], torch.ones(shape))
    assert kinds(tmp_path) == ["anchor", "delta", "delta"]


SPARSE = {
    "zeros": torch.zeros(1 << 16),
    "half zeros": torch.randn(1 << 16) * (torch.arange(1 << 16) % 2),
    "ones": torch.ones(1 << 16),
    "others": torch.randn(1 << 16),
}


@pytest.mark.parametrize("what", SPARSE)
def test_what_is_noted_is_never_longer_than_a_copy(what: str) -> None:
    """Of pruned weights all zeros are among the smallest, which would be noted whole."""
    weights = SPARSE[what].bfloat16()
    before = weights.clone()
    noted = remembered(parts_of({"x": weights}))["x"]
    own = [getattr(noted, name, None) for name in ("local", "low", "rare", "whole")]
    kept = [one for one in own if one is not None and one.data_ptr() != weights.data_ptr()]
    assert sum(one.nbytes for one in kept) <= weights.nbytes
    moved(weights, torch.ones(len(weights)))
    assert torch.equal(noted.elements(0, len(weights)), before.view(torch.int16))


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    """Those that are copied, and those that are not."""
    zeros, others = torch.zeros(500).bfloat16(), torch.randn(500).bfloat16()
    weights = {"a": zeros, "b": zeros, "c": others, "d": others}
    publisher, subscriber = (
        Publisher(Folder(tmp_path), bracketed=True),
        Subscriber(Folder(tmp_path)),
    )
    for _ in range(3):
        version = publisher.publish(weights)
        subscriber.update()
        assert subscriber.version == version
        for tensor in (zeros, others):
            moved(tensor, torch.arange(500) % 3)
    assert kinds(tmp_path) == ["anchor", "delta", "delta"]


def kinds(folder: Path) -> list[str]:
    return [entry.kind for entry in read_index(Folder(folder)).entries]


def test_a_bracketed_publisher_tells_what_an_optimiser_does(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model, served = nn.Linear(60, 40).bfloat16(), nn.Linear(60, 40).bfloat16()
    publisher = Publisher(Folder(tmp_path), bracketed=True)
    subscriber = Subscriber(Folder(tmp_path), served)
    optimiser = torch.optim.SGD(model.parameters(), lr=1e-4)
    for _ in range(4):
        version = publisher.publish(model)
        subscriber.update()
        assert subscriber.version == version
        assert torch.equal(served.weight, model.weight)
        model(torch.ones(1, 60).bfloat16()).sum().backward()
        optimiser.step()
    assert kinds(tmp_path) == ["anchor", "delta", "delta", "delta"]


def test_weights_that_move_far_are_published_whole(tmp_path: Path) -> None:
    weights = {"x": torch.linspace(1, 2, 1000).bfloat16()}
    publisher = Publisher(Folder(tmp_path), bracketed=True)
    publisher.publish(weights)
    weights["x"].mul_(-7)
    publisher.publish(weights)
    weights["x"][700] += 0.0625
    publisher.publish(weights)
    assert kinds(tmp_path) == ["anchor", "anchor", "delta"]
    subscriber = Subscriber(Folder(tmp_path))
    subscriber.update()
    assert torch.equal(subscriber.tensors["x"], weights["x"])


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", ["anchor", "delta", "index"])
def test_a_store_that_fails(tmp_path: Path, name: str, when: str) -> None:
    """The publisher's version is the last one that is there, and the next one is a whole model."""
    store, weights = Failing(tmp_path), {"x": torch.linspace(1, 2, 100).bfloat16()}
    Publisher(store).publish(weights)
    publisher = Publisher(store, bracketed=True, anchor_every=2)
    assert publisher.version == read_index(store).newest
    for number in range(1, 4):
        store.fail = (name, when) if number == 2 else None
        try:
            publisher.publish(weights)
        except OSError:
            assert number == 2
            found = read_index(store).newest
            assert publisher.version == found or (name, when) == ("index", "after")
        moved(weights["x"], torch.ones(100))
    reader = Subscriber(store)
    reader.update()
    assert reader.version == publisher.version
    moved(weights["x"], -torch.ones(100))
    assert torch.equal(reader.tensors["x"], weights["x"])


def test_a_bracketed_publisher_has_no_base(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="keeps no base"):
        Publisher(Folder(tmp_path), base=tmp_path / "base", bracketed=True)


def test_what_is_prepared_is_written_by_apply_alone(tmp_path: Path) -> None:
    weights = {"x": torch.arange(1000).float()}
    publisher, served = Publisher(Folder(tmp_path)), {"x": torch.zeros(1000)}
    subscriber = Subscriber(Folder(tmp_path), served)
    for step in range(3):
        publisher.publish(weights)
        before = served["x"].clone()
        ready = subscriber.prepare()
        assert ready is not None
        assert torch.equal(served["x"], before)
        update = ready.apply()
        assert update.version == ready.version == subscriber.version
        assert torch.equal(served["x"], weights["x"])
        weights["x"][step] += 1
    assert subscriber.prepare() is None
