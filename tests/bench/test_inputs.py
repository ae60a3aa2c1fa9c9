"""The benchmark's inputs have the distributions that their names say."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparcel.core.selectors import topk
from sparcel.errors import InputError
from sparcel.tools.bench.inputs import CLUSTERS, SPREAD, Case, load_gradients

SIZES = st.integers(1, 5000)
DENSITIES = st.floats(1e-4, 1)
MADE = st.sampled_from(["uniform", "clustered", "identical"])


@given(SIZES, DENSITIES, MADE, st.integers(1, 5))
def test_streams_hold_k_whole_numbers_whose_sum_is_exact(
    size: int, density: float, distribution: str, ranks: int
) -> None:
    case = Case(size, density, distribution, ranks)
    for stream in case.streams:
        assert stream.indices is not None
        assert stream.nnz == case.k
        assert torch.equal(stream.indices, stream.indices.unique())
        assert int(stream.indices[0]) >= 0 and int(stream.indices[-1]) < size
        assert torch.equal(stream.values, stream.values.round())
        assert stream.values.ne(0).all()
    assert float(case.total.values.abs().max()) < 2**24
    assert torch.equal(case.total.values, case.total.values.float().double())


@given(SIZES, DENSITIES, MADE)
def test_the_largest_coordinates_of_a_gradient_are_the_stream(
    size: int, density: float, distribution: str
) -> None:
    case = Case(size, density, distribution, ranks=2)
    gradient = case.gradient(1)
    assert torch.equal(gradient, gradient.round())
    selected, expected = topk(gradient, case.k), case.stream(1)
    assert torch.equal(selected.indices, expected.indices)
    assert torch.equal(selected.values, expected.values)


def test_every_rank_makes_the_same_streams() -> None:
    one, other = (Case(10_000, 0.01, "clustered", 3) for _ in range(2))
    for rank in range(3):
        assert torch.equal(one.stream(rank).indices, other.streams[rank].indices)
        assert torch.equal(one.gradient(rank), other.gradient(rank))


def test_ranks_with_identical_indices_have_different_values() -> None:
    first, second = Case(10_000, 0.01, "identical", 2).streams
    assert torch.equal(first.indices, second.indices)
    assert not torch.equal(first.values, second.values)


def test_uniform_ranks_overlap_by_chance() -> None:
    case = Case(100_000, 0.05, "uniform", 2)
    union = case.total.indices.numel()
    expected = case.size * (1 - 0.95**2)
    assert abs(union - expected) < 0.02 * expected


def test_clustered_ranks_lie_in_the_same_windows_and_overlap_by_a_quarter() -> None:
    case = Case(1_000_000, 0.004, "clustered", 4)
    width = SPREAD * case.k // CLUSTERS
    assert len((case.total.indices // width).unique()) == CLUSTERS
    first, second = case.streams[:2]
    shared = torch.isin(first.indices, second.indices).double().mean()
    assert abs(float(shared) - 1 / SPREAD) < 0.05


@pytest.mark.parametrize("suffix", [".npy", ".npz", ".pt"])
def test_gradients_come_from_a_file(suffix: str, tmp_path: Path) -> None:
    vectors = np.random.default_rng(0).standard_normal((2, 1000)).astype(np.float32)
    path = tmp_path / f"gradients{suffix}"
    if suffix == ".npy":
        np.save(path, vectors)
    elif suffix == ".npz":
        np.savez(path, vectors)
    else:
        torch.save(torch.from_numpy(vectors), path)
    loaded = load_gradients(path)
    case = Case(1000, 0.01, "file", 3, loaded)
    for rank in range(3):
        true = topk(torch.from_numpy(vectors[rank % 2]), 10)
        assert torch.equal(case.stream(rank).indices, true.indices)
    assert torch.equal(case.total.values, case.total.values.float().double())


def test_one_vector_serves_all_ranks(tmp_path: Path) -> None:
    np.save(tmp_path / "one.npy", np.arange(5.0))
    assert load_gradients(tmp_path / "one.npy").shape == (1, 5)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (np.zeros((1, 2, 3)), "must hold one finite vector"),
        (np.array([1.0, np.nan]), "must hold one finite vector"),
    ],
)
def test_files_without_gradients_are_refused(
    content: np.ndarray, message: str, tmp_path: Path
) -> None:
    np.save(tmp_path / "bad.npy", content)
    with pytest.raises(InputError, match=message):
        load_gradients(tmp_path / "bad.npy")


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="npz or"):
        load_gradients(tmp_path / "gradients.txt")
    np.savez(tmp_path / "two.npz", a=np.zeros(2), b=np.zeros(2))
    with pytest.raises(InputError, match="one array, got 2: a, b"):
        load_gradients(tmp_path / "two.npz")
