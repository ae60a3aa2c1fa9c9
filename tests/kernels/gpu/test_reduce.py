"""Merging, and writing into dense vectors, on a GPU or in Triton's interpreter."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

pytest.importorskip("triton")

from sparcel.core import device
from sparcel.core.kernels.definitions import reduce as reference
from sparcel.core.kernels.gpu import _base
from sparcel.core.kernels.gpu import reduce as kernels
from sparcel.core.ops import MAX, MIN, PRODUCT, SUM, Op
from sparcel.errors import FormatError, InputError
from tests.card import moved, on_card, seen
from tests.kernels.test_merge import Pair, random_streams
from tests.strategies import CIRCLE, DTYPES, FLOATS, same_bits

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BUILT_IN = (SUM, PRODUCT, MIN, MAX)
few = settings(max_examples=10)
pytestmark = [
    pytest.mark.gpu,
    # NumPy computes in Triton's interpreter.
    pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning"),
]

dtypes = st.sampled_from(DTYPES)
widths = st.sampled_from([None, None, 0, 1, 3])
index_dtypes = st.sampled_from([torch.int32, torch.int64])


def alike(found: Tensor, expected: Tensor) -> bool:
    """Tell whether two tensors hold the same bits; those of NaN are the device's choice."""
    found, expected = found.cpu(), expected.cpu()
    if found.is_floating_point():
        found = torch.where(found.isnan(), torch.nan, found)
        expected = torch.where(expected.isnan(), torch.nan, expected)
    return same_bits(found, expected)


def there(pairs: list[Pair]) -> list[Pair]:
    return [(indices.to(DEVICE), values.to(DEVICE)) for indices, values in pairs]


def salted(values: Tensor, seed: int) -> Tensor:
    """Replace some values by those that need care."""
    limits = torch.finfo if values.is_floating_point() else torch.iinfo
    special = [0, limits(values.dtype).max, limits(values.dtype).min]
    if values.is_floating_point():
        special += [torch.nan, torch.inf, -torch.inf]
    generator = torch.Generator().manual_seed(seed)
    picked = torch.randint(0, len(special), values.shape, generator=generator)
    kept = torch.randint(0, 4, values.shape, generator=generator) > 0
    return torch.where(kept, values, torch.tensor(special, dtype=values.dtype)[picked])


@st.composite
def stream_lists(draw: st.DrawFn) -> list[Pair]:
    """Draw streams over index spaces from crowded to nearly empty."""
    seed = draw(st.integers(0, 99))
    streams = random_streams(
        draw(st.sampled_from([1, 2, 5, 17])),
        draw(st.sampled_from([0, 1, 60])),
        draw(st.sampled_from([1, 10, 100, 2**31 - 1, 2**40])),
        draw(dtypes),
        draw(widths),
        seed,
    )
    if draw(st.booleans()):
        return streams
    return [(one, salted(values, seed + at)) for at, (one, values) in enumerate(streams)]


def check_merge(streams: list[Pair], op: Op) -> None:
    merged, expected = kernels.merge(there(streams), op), reference.merge(streams, op)
    assert same_bits(merged[0].cpu(), expected[0])
    assert alike(merged[1], expected[1])


@few
@given(stream_lists(), st.sampled_from([*BUILT_IN, CIRCLE]))
def test_merge_is_the_definition(streams: list[Pair], op: Op) -> None:
    check_merge(streams, op)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_merge_of_equal_indices(dtype: torch.dtype) -> None:
    index, generator = torch.arange(25, dtype=torch.int32) * 3, torch.Generator().manual_seed(0)
    values = (torch.randn(17, 25, generator=generator) * 100).to(dtype)
    streams = [(index, row) for row in values]
    for op in BUILT_IN:
        check_merge(streams, op)


@pytest.mark.parametrize(("width", "entries"), [(None, 900), (3, 300), (130, 9)])
def test_merge_of_several_programs(
    width: int | None, entries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (kernels, _base):  # each program is a group
        monkeypatch.setattr(module, "GROUP", 1)
    streams = random_streams(3, entries, 2 * entries, torch.float32, width)
    streams.insert(1, (streams[0][0][:0], streams[0][1][:0]))
    check_merge(streams, SUM)


def test_merge_returns_new_tensors() -> None:
    (stream,) = there(random_streams(1, 9, 99, torch.float32))
    for streams in ([stream], [stream, (stream[0][:0], stream[1][:0])]):
        indices, values = kernels.merge(streams, SUM)
        assert same_bits(indices, stream[0])
        assert same_bits(values, stream[1])
        assert indices.data_ptr() != stream[0].data_ptr()
        assert values.data_ptr() != stream[1].data_ptr()


@few
@given(st.integers(0, 99), index_dtypes, st.sampled_from([None, 3]))
def test_merge_of_corrupt_indices_stays_in_bounds(
    seed: int, dtype: torch.dtype, width: int | None
) -> None:
    generator = torch.Generator().manual_seed(seed)
    shape = (30,) if width is None else (30, width)
    streams = [
        (torch.randint(-5, 5, (30,), generator=generator).to(dtype), torch.ones(shape))
        for _ in range(4)
    ]
    indices, values = kernels.merge(there(streams), SUM)
    assert indices.numel() == values.shape[0] <= 120


def test_streams_must_agree() -> None:
    index = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    one = torch.ones(1, device=DEVICE)
    with pytest.raises(InputError, match="at least one stream"):
        kernels.merge([], SUM)
    with pytest.raises(InputError, match="same dtypes"):
        kernels.merge([(index, one), (index, one.double())], SUM)
    with pytest.raises(InputError, match="value or row"):
        kernels.merge([(index, torch.ones(2, device=DEVICE))], SUM)


@few
@given(
    dtypes,
    dtypes,
    widths,
    index_dtypes,
    st.sampled_from([*BUILT_IN, CIRCLE, "scatter", "expand"]),
    st.integers(0, 99),
)
def test_writing_is_the_definition(
    dtype: torch.dtype,
    given: torch.dtype,
    width: int | None,
    index: torch.dtype,
    how: Op | str,
    seed: int,
) -> None:
    ((indices, values),) = random_streams(1, 60, 100, given, width, seed)
    indices = indices.to(index)
    generator = torch.Generator().manual_seed(seed)
    dense = (torch.randn((100, *values.shape[1:]), generator=generator) * 10).to(dtype)
    if dtype == given:
        values, dense = salted(values, seed), salted(dense, seed + 1)
    expected, found = dense.clone(), dense.clone().to(DEVICE)
    for module, vector, pair in (
        (reference, expected, (indices, values)),
        (kernels, found, there([(indices, values)])[0]),
    ):
        if isinstance(how, Op):
            module.scatter_reduce(vector, *pair, how)
        elif how == "scatter":
            module.scatter(vector, *pair)
        else:
            module.expand(vector, *pair, 1)
    assert alike(found, expected)


@pytest.mark.parametrize("dtype", FLOATS[2:], ids=str)
def test_sums_saturate_as_in_the_definition(dtype: torch.dtype) -> None:
    most = torch.finfo(dtype).max
    numbers = torch.tensor(
        [0.0, -0.0, 1.0, -2.5, most, -most, torch.inf, -torch.inf, torch.nan], dtype=dtype
    )
    every = torch.cartesian_prod(numbers, numbers)
    dense = torch.zeros(2 * len(every), dtype=dtype)
    dense[::2] = every[:, 0]
    indices, added = torch.arange(0, len(dense), 2), every[:, 1].contiguous()
    expected, found = dense.clone(), dense.clone().to(DEVICE)
    reference.add_saturated(expected, indices, added)
    kernels.add_saturated(found, indices.to(DEVICE), added.to(DEVICE))
    assert alike(found, expected)


@pytest.mark.parametrize("width", [None, 3])
@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
def test_indices_out_of_range_are_ignored(width: int | None, index: torch.dtype) -> None:
    ends = torch.iinfo(index)
    indices = torch.tensor([ends.min, -1, 0, 3, 9, 10, 11, 13, ends.max], dtype=index)
    sound = (indices >= 0) & (indices < 10)
    columns = () if width is None else (width,)
    values = torch.ones(9, *columns).cumsum(0)
    for how in ("scatter_reduce", "scatter", "expand", "add_saturated"):
        if how == "add_saturated" and width:
            continue
        op = (SUM,) if how == "scatter_reduce" else ()
        around = torch.full((30, *columns), 77.0, device=DEVICE)
        expected = around.cpu()
        pair = indices.to(DEVICE), values.to(DEVICE)
        getattr(kernels, how)(around[10:20], *pair, *op)
        getattr(reference, how)(expected[10:20], indices[sound], values[sound], *op)
        assert same_bits(around.cpu(), expected)


@pytest.mark.skipif(DEVICE != "cpu", reason="the card stands for a GPU where there is none")
def test_a_users_own_operation_sees_no_corrupt_indices() -> None:
    with on_card():
        dense, indices, values = map(moved, (torch.zeros(3), torch.tensor([7]), torch.ones(1)))
        device.later(kernels.indices_fault(indices, 3), lambda: FormatError("corrupt message"))
        with pytest.raises(FormatError):
            kernels.scatter_reduce(dense, indices, values, CIRCLE)


def test_writing_refuses_wrong_shapes() -> None:
    dense, index = torch.zeros(4, 3, device=DEVICE), torch.zeros(1, dtype=torch.int32).to(DEVICE)
    with pytest.raises(InputError, match="value or row"):
        kernels.scatter(dense, index, torch.ones(2, 3, device=DEVICE))
    with pytest.raises(InputError, match="width"):
        kernels.scatter(dense, index, torch.ones(1, 2, device=DEVICE))


def fault(indices: Tensor, size: int) -> bool:
    found = kernels.indices_fault(indices.to(DEVICE), size)
    assert (found.dtype, found.shape) == (torch.bool, ())
    return bool(found)


@few
@given(st.lists(st.integers(-2, 12), max_size=8), index_dtypes)
def test_a_fault_is_what_the_definition_finds(listed: list[int], dtype: torch.dtype) -> None:
    for indices in (torch.tensor(listed, dtype=dtype), torch.tensor(listed, dtype=dtype).unique()):
        assert fault(indices, 10) == (reference.check_indices(indices, 10) >= 0)


@pytest.mark.parametrize("position", [0, 1, 511, 512, 513, 1499])
def test_a_fault_is_found_at_every_position(position: int) -> None:
    indices = torch.arange(1500, dtype=torch.int32) * 2
    assert not fault(indices, 2999)
    assert fault(indices, 2998)
    for wrong in (-1, 10**6, int(indices[position - 1]) if position else -5):
        changed = indices.clone()
        changed[position] = wrong
        assert fault(changed, 2999)


def test_large_indices_are_no_fault() -> None:
    indices = torch.tensor([0, 2**31, 2**40 - 1])
    assert not fault(indices, 2**40)
    assert fault(indices, 2**40 - 1)


@few
@given(st.sampled_from(FLOATS), st.sampled_from([3, 1 / 3, 7e30]), st.integers(0, 99))
def test_averages_are_the_quotients(dtype: torch.dtype, divisor: float, seed: int) -> None:
    total = salted(torch.randn(600, dtype=torch.float64).mul(100).to(dtype), seed)
    found = kernels.average(total.to(DEVICE), divisor)
    assert alike(found, reference.average(total, divisor))
    there = total.to(DEVICE)
    assert kernels.average(there, divisor, out=there) is there
    assert alike(there, found)


@pytest.mark.skipif(DEVICE != "cpu", reason="the card stands for a GPU where there is none")
def test_only_the_length_of_a_union_is_read() -> None:
    streams = random_streams(3, 60, 100, torch.float32)
    with on_card():
        on_the_card = [(moved(indices), moved(values)) for indices, values in streams]
        before = device.reads()
        union, reduced = kernels.merge(on_the_card, SUM)
        assert device.reads() == before + 1
        dense = moved(torch.zeros(100))
        kernels.scatter_reduce(dense, union, reduced, SUM)
        kernels.add_saturated(dense, union, reduced)
        kernels.scatter(dense, union, reduced)
        kernels.expand(dense, union, reduced.double(), 1)
        wrong = kernels.indices_fault(union, 100)
        assert device.reads() == before + 1
    expected = reference.merge(streams, SUM)
    assert same_bits(seen(union), expected[0])
    assert same_bits(seen(reduced), expected[1])
    vector = torch.zeros(100)
    reference.expand(vector, *expected, 1)
    assert same_bits(seen(dense), vector)
    assert not bool(seen(wrong))
