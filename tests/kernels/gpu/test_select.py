"""Selection on a GPU, or in Triton's interpreter, selects what the definition does."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor

from sparcel.core import device
from sparcel.core.kernels import Addition
from sparcel.core.kernels.definitions import select as reference
from sparcel.core.selectors import MSTopK
from tests.card import launches, on_card, seen
from tests.card import moved as on_gpu
from tests.kernels.paths import Case, cases, counts
from tests.kernels.test_bracket import thresholds_for
from tests.sampling import meeting
from tests.strategies import FLOATS, same_bits

pytest.importorskip("triton")
import triton.runtime.interpreter as interpreter

from sparcel.core.kernels.gpu import _base, _mark, _radix
from sparcel.core.kernels.gpu import select as gpu

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.gpu
few = settings(max_examples=8, suppress_health_check=[*HealthCheck])


@pytest.fixture(autouse=True)
def small_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let short vectors be sampled, and be counted by several groups."""
    monkeypatch.setattr(gpu, "SAMPLES", 128)
    for module in (_base, _mark):
        monkeypatch.setattr(module, "GROUP", 1)


def moved(addition: Addition) -> Addition:
    """Return a copy of an addition on the GPU."""
    vectors = {name: part for name, part in vars(addition).items() if isinstance(part, Tensor)}
    return replace(addition, **{name: part.clone().to(DEVICE) for name, part in vectors.items()})


def same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return same_bits(one.cpu(), other.cpu())


def agree(one: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> bool:
    return all(map(same, one, other))


@few
@given(cases(), st.data(), st.sampled_from([None, 1, 100, 512, 5000]))
def test_topk_is_the_definition(case: Case, data: st.DataObject, chunk: int | None) -> None:
    x = case.vector()
    k = data.draw(counts(chunk or case.length))
    if chunk is None:
        assert agree(gpu.topk(x.to(DEVICE), k), reference.topk(x, k))
    else:
        expected = reference.topk_chunked(x, k, chunk)
        assert agree(gpu.topk_chunked(x.to(DEVICE), k, chunk), expected)


@few
@given(
    cases((torch.float32, torch.float64)),
    cases(),
    st.data(),
    st.sampled_from([None, None, 16, 512]),
    st.sampled_from([1.0, 1 / 3]),
    st.sampled_from([None, 0.9]),
    st.booleans(),
)
def test_accumulate_topk_is_the_definition(
    memory: Case,
    gradient: Case,
    data: st.DataObject,
    chunk: int | None,
    scale: float,
    momentum: float | None,
    clear: bool,
) -> None:
    m = memory.vector()
    g = replace(gradient, length=m.numel()).vector()
    made = Addition(m, g, torch.full_like(m, torch.nan), scale, clear=clear)
    if momentum is not None:
        velocity = replace(gradient, length=m.numel(), dtype=m.dtype, seed=100).vector()
        entering = data.draw(st.sampled_from([torch.full_like(m, torch.nan), None]))
        made = replace(made, momentum=momentum, velocity=velocity, entering=entering)
    k = data.draw(counts(chunk or m.numel()))
    here, there = moved(made), moved(made)
    expected, found = (
        reference.accumulate_topk(there, k, chunk),
        gpu.accumulate_topk(here, k, chunk),
    )
    assert bool(found[2]) is expected[2]
    assert same(here.gradient, there.gradient)
    assert same(here.memory, m)
    if found[2]:
        assert agree(found[:2], expected[:2])
        assert same(here.scratch, there.scratch)
        assert same(here.entering, there.entering)


@few
@given(cases(), st.sampled_from([0.0, 1e-30, 0.5, 1.0, 3.0]))
def test_threshold_select_is_the_definition(case: Case, threshold: float) -> None:
    x = case.vector()
    expected = reference.threshold_select(x, threshold)
    assert agree(gpu.threshold_select(x.to(DEVICE), threshold), expected)


@few
@given(cases(), st.integers(0, 12), st.sampled_from([0, 1, 4, 13]), st.integers(0, 40))
def test_histogram_is_the_definition(case: Case, shift: int, field: int, prefix: int) -> None:
    x = case.vector()
    expected = reference.magnitude_histogram(x, shift, 2**field, prefix)
    assert same(gpu.magnitude_histogram(x.to(DEVICE), shift, 2**field, prefix), expected)


@few
@given(cases(), st.data())
def test_bracket_is_the_definition(case: Case, data: st.DataObject) -> None:
    x, thresholds = case.vector(), data.draw(thresholds_for(case.vector()))
    k = data.draw(counts(case.length))
    found = gpu.bracket(x.to(DEVICE), thresholds.to(DEVICE), k)
    assert same(found, reference.bracket(x, thresholds, k))


@pytest.mark.parametrize("k", [40, 500])
def test_mstopk_has_the_bits_of_the_cpu_and_waits_no_more_for_more_samplings(k: int) -> None:
    """Of these numbers 4 in 10 exceed the mean, below which nothing is sampled."""
    x, waits = Case("normal", 1000, torch.float32).vector().mul(64).round(), []
    for samplings in (5, 15):
        expected = MSTopK(samplings).select(x, k, 3)
        with on_card():
            before = device.reads()
            found = MSTopK(samplings).select(on_gpu(x), k, 3)
            waits.append(device.reads() - before)
        assert same(seen(found.indices), expected.indices)
        assert same(seen(found.values), expected.values)
    assert waits[0] == waits[1]


@pytest.mark.parametrize(("kind", "dtype"), meeting(["few pass", "many pass"], FLOATS, each=2))
def test_a_sample_that_misleads_costs_time_alone(
    kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A threshold that lets too few or too many through does not change what is selected."""
    x = Case("normal", 8200, dtype).vector()
    above = {"few pass": 2**12 - 1, "many pass": 0}[kind] << (8 * dtype.itemsize - 13)
    sampled = []

    def misled(sum: object, work: Tensor, samples: int, rank: int) -> None:
        work.zero_()
        work[_radix.ABOVE] = above
        sampled.append(rank)

    monkeypatch.setattr(gpu, "sample", misled)
    assert agree(gpu.topk(x.to(DEVICE), 200), reference.topk(x, 200))
    assert sampled


def test_fewer_nonzeros_than_k_mislead_no_sample() -> None:
    """Then all of them pass the threshold, which is 0; the vector is not read again."""
    x = Case("mostly zero", 8200, torch.float32).vector()
    with on_card():
        before = device.reads()
        indices, values = gpu.topk(on_gpu(x), 500)
        assert device.reads() == before + 1
    assert agree((seen(indices), seen(values)), reference.topk(x, 500))
    assert 0 < values.numel() < 500


@pytest.mark.parametrize("size", [1000, 8200])
def test_a_selection_takes_seven_launches_and_one_read(size: int) -> None:
    """Nothing but kernels of its own, where a sample fills the memory that they share."""
    x = Case("normal", size, torch.float32).vector()
    with on_card():
        made = Addition(on_gpu(x), on_gpu(x), on_gpu(x), scale=0.5)
        with launches() as counted:
            gpu.accumulate_topk(made, 200)
        assert counted.kernels() <= 7
        assert counted.torch == ([] if size > 16 * 128 else ["new_zeros"])
        assert counted.copies == ["read"]


def test_no_entry_of_the_sum_that_is_not_finite_is_missed() -> None:
    x = torch.zeros(8200, device=DEVICE)
    for place, bad in ((0, torch.nan), (31, torch.inf), (4096, -torch.inf), (8199, torch.nan)):
        gradient = x.clone()
        gradient[place] = bad
        assert not gpu.accumulate_topk(Addition(x, gradient, torch.empty_like(x)), 7)[2]


def untouched(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return zeros whose memory the system gives when it is used."""
    kind = {2: np.int16, 4: np.int32, 8: np.int64}[dtype.itemsize]
    return torch.from_numpy(np.zeros(tuple(shape), kind)).view(dtype)


@pytest.mark.skipif(DEVICE != "cpu", reason="runs a few programs alone, in the interpreter")
def test_places_beyond_2_to_the_31st(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vector that is zero but at its end: the first and the last programs find all there is."""
    size = 2**31 + 8200
    builder = interpreter.interpreter_builder
    number, count = builder.set_grid_idx, builder.set_grid_dim

    def launch_few(kernel: Any, programs: int, *args: Any, **constants: Any) -> None:
        run = sorted({*range(min(programs, 1)), *range(max(0, programs - 3), programs)})
        monkeypatch.setattr(builder, "set_grid_dim", lambda x, y, z: count(programs, y, z))
        monkeypatch.setattr(builder, "set_grid_idx", lambda x, y, z: number(run[x], y, z))
        kernel[(len(run),)](*args, **constants)

    # The interpreter would copy the vectors onto themselves, which are shared with it.
    monkeypatch.setattr(interpreter.GridExecutor, "_restore_args_dev", lambda *_: None)
    for module in (gpu, _mark, _radix):
        monkeypatch.setattr(module, "launch", launch_few)
    for module in (_base, _mark):
        monkeypatch.setattr(module, "GROUP", 128)
    monkeypatch.setattr(
        Tensor, "new_empty", lambda x, *shape, dtype=None, **_: untouched(shape, dtype or x.dtype)
    )
    x = untouched([size], torch.float32)
    places = torch.tensor([2**31 - 1, 2**31, 2**31 + 4097, size - 1])
    x[places] = torch.tensor([1.0, -2.0, 2.0, -0.5])
    indices, values = gpu.topk(x, 3)
    assert indices.dtype == torch.int64
    assert indices.tolist() == places[:3].tolist()
    assert values.tolist() == [1, -2, 2]
    memory, scratch = (untouched([size], torch.float32) for _ in range(2))
    indices, values, finite = gpu.accumulate_topk(Addition(memory, x, scratch), 3)
    assert (indices.tolist(), values.tolist(), finite) == (places[:3].tolist(), [1, -2, 2], True)
    assert scratch[places].tolist() == [0, 0, 0, -0.5]
