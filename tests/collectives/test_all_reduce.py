"""Every algorithm of the table against the dense reference, on the simulated cluster."""

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparcel import SparseStream, simulate
from sparcel.core.auto import all_reduce
from sparcel.core.collectives import ALGORITHMS
from sparcel.core.formats import RAW, Format
from sparcel.core.formats.indices import INDEX_CODES
from sparcel.core.wire import Wire
from sparcel.errors import InputError
from tests.sampling import meeting
from tests.strategies import (
    DTYPES,
    LAYOUTS,
    OPS,
    SUM,
    case_of,
    cases,
    check_stored,
    dense_reference,
    full,
    parts_of,
    same_bits,
    same_stream,
    stored_by,
)

algorithms = pytest.mark.parametrize("algorithm", [*ALGORITHMS, "auto"])


def reduced(case, algorithm, max_nnz=None, format=RAW):
    """Run the algorithm on simulated ranks; return each rank's result."""

    def on_rank(comm):
        wire = Wire(comm, format)
        return all_reduce(case.streams[comm.rank], wire, case.op, algorithm, max_nnz)

    return simulate(case.world, on_rank).results


def check(case, algorithm, max_nnz=None, format=RAW):
    """Check values, and that the result stores what some rank stores, zero or not."""
    if algorithm == "dense" and case.op.name is None:
        with pytest.raises(InputError, match="takes any operation"):
            reduced(case, algorithm, max_nnz, format)
        return
    before = [parts_of(stream) for stream in case.streams]
    results = reduced(case, algorithm, max_nnz, format)
    assert torch.equal(full(results[0], case.op), dense_reference(case.streams, case.op))
    if algorithm not in ("dense", "auto") and case.size:  # auto may choose dense
        dense_from = format.dense_from(case.size, case.streams[0].value_bytes)
        check_stored(results[0], stored_by(case.streams), dense_from)
    assert results[0].dtype == case.streams[0].dtype
    assert all(same_stream(result, results[0]) for result in results)
    for stream, (indices, values, _, finite) in zip(case.streams, before, strict=True):
        assert same_bits(stream.indices, indices)
        assert same_bits(stream.values, values)
        assert stream.finite == finite


@algorithms
@given(
    case=cases(),
    bounded=st.booleans(),
    slack=st.integers(0, 5),
    format=st.sampled_from([Format(code) for code in INDEX_CODES]),
)
def test_result_equals_the_dense_reference_on_every_rank(algorithm, case, bounded, slack, format):
    check(case, algorithm, case.max_nnz + slack if bounded else None, format)


@algorithms
@pytest.mark.parametrize("world", range(1, 18))
def test_every_world_size(algorithm, world):
    sizes = (0, 1, world - 1, 3 * world + 1, 97)
    for size in {sizes[world % 5], sizes[(world + 2) % 5]}:  # each meets some worlds
        check(case_of("random", world, size), algorithm)


@algorithms
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(algorithm, layout):
    for world in (1, 2, 5, 8):
        case = case_of(layout, world, 61)
        check(case, algorithm)
        check(case, algorithm, case.max_nnz)


PAIRS = [*product(DTYPES, OPS)]


@pytest.mark.parametrize(
    ("algorithm", "pair"),
    # Engines sum dense vectors; streams are merged by the same kernel, whoever sends them.
    [
        *product(["dense"], PAIRS),
        *meeting([name for name in (*ALGORITHMS, "auto") if name != "dense"], PAIRS, each=10),
    ],
    ids=str,
)
def test_every_operation_and_dtype(algorithm, pair):
    dtype, op = pair[0], OPS[pair[1]]
    check(case_of("random", 6, 50, dtype, op), algorithm)
    check(case_of("dense", 5, 23, dtype, op, width=2), algorithm)


@algorithms
@pytest.mark.parametrize("world", [2, 3, 7, 8])
def test_all_equal_values(algorithm, world):
    stream = SparseStream(torch.arange(0, 40, 5), torch.full((8,), 3.0), 40)

    def on_rank(comm):
        return all_reduce(stream, Wire(comm), SUM, algorithm)

    for result in simulate(world, on_rank).results:
        assert torch.equal(full(result), full(stream) * world)


@algorithms
@settings(max_examples=settings.default.max_examples // 2)
@given(seed=st.integers(0, 1000), world=st.integers(1, 9))
def test_rounded_sums_agree_on_all_ranks_and_in_every_run(algorithm, seed, world):
    generator = torch.Generator().manual_seed(seed)
    case = case_of("random", world, 64, count=12, seed=seed)
    for stream in case.streams:
        stream.values = torch.randn(stream.nnz, generator=generator)
    results = reduced(case, algorithm)
    assert all(same_stream(result, results[0]) for result in results)
    assert all(map(same_stream, results, reduced(case, algorithm)))
    exact = sum(full(stream).double() for stream in case.streams)
    torch.testing.assert_close(full(results[0]).double(), exact, rtol=1e-5, atol=1e-5)


@algorithms
@pytest.mark.parametrize("world", [1, 2, 3, 5, 8])
def test_finite_flag_of_any_rank_reaches_every_rank(algorithm, world):
    for culprit in range(world):
        case = case_of(("random", "empty", "dense")[(world + culprit) % 3], world, 40)
        case.streams[culprit].finite = False
        assert not any(result.finite for result in reduced(case, algorithm))
    assert all(result.finite for result in reduced(case_of("random", world, 40), algorithm))


@algorithms
def test_indices_beyond_32_bits(algorithm):
    if algorithm == "dense":
        return  # it would allocate the dense vector
    size = 2**40 + 3

    def on_rank(comm):
        indices = torch.tensor([comm.rank, 2**39 + 7, size - 1])
        stream = SparseStream(indices, torch.tensor([1.0, 2.0, float(comm.rank)]), size)
        return all_reduce(stream, Wire(comm), SUM, algorithm, 3)

    for result in simulate(5, on_rank).results:
        assert result.indices.tolist() == [0, 1, 2, 3, 4, 2**39 + 7, size - 1]
        assert result.values.tolist() == [1, 1, 1, 1, 1, 10, 10]
