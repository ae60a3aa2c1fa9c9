"""Measured fill-in, against sets, and the plot of it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from sparcel import SparseStream, topk
from sparcel.core.stream import reduce
from sparcel.errors import InputError, MissingDependencyError
from sparcel.tools.analysis import (
    Growth,
    expected_nnz,
    fill_in,
    gradients_of,
    growth,
    plot_fill_in,
)
from tests.strategies import Case, cases

SIZE, RANKS = 5000, 8


def random_gradients() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(SIZE, generator=generator) for _ in range(RANKS)]


@given(cases().filter(lambda case: case.size > 0))
def test_growth_counts_the_union_of_indices(case: Case) -> None:
    grown = growth(iter(case.streams))
    seen: set[int] = set()
    for rank, stream in enumerate(case.streams):
        stored = range(case.size) if stream.indices is None else stream.indices.tolist()
        seen.update(stored)
        assert grown.selected[rank] == stream.nnz
        assert grown.nnz[rank] == len(seen)
        assert grown.density[rank] == len(seen) / case.size
    assert len(grown.nnz) == case.world


@given(cases().filter(lambda case: case.size > 0))
def test_sum_is_dense_from_the_rank_that_growth_gives(case: Case) -> None:
    if any(stream.is_dense for stream in case.streams) or case.streams[0].width is not None:
        return
    dense_from = growth(case.streams).dense_from(case.streams[0].dtype)
    for ranks in range(2, case.world + 1):
        dense = reduce(case.streams[:ranks]).is_dense
        assert dense == (dense_from is not None and dense_from <= ranks)


@given(st.integers(1, 50), st.integers(1, 9), st.data())
def test_uniform_density_is_the_closed_form(size: int, ranks: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(0, size))
    grown = Growth(size, (k,) * ranks, (k,) * ranks)
    expected = [expected_nnz(size, k, r) / size for r in range(1, ranks + 1)]
    assert grown.uniform_density == pytest.approx(expected, rel=1e-13)


def test_fill_in_selects_as_the_schemes_do() -> None:
    gradients = random_gradients()
    measured = fill_in(iter(gradients), [0.01, 0.1])
    assert set(measured) == {(d, s) for d in (0.01, 0.1) for s in ("exact", "bucketed")}
    assert measured[0.01, "exact"] == growth(topk(g, 50) for g in gradients)
    # 9 full buckets of 512 and one of 392: round(512·0.01) = 5 of each.
    assert measured[0.01, "bucketed"].selected == (50,) * RANKS


@pytest.mark.parametrize("name", ["exact", "bucketed"])
def test_independent_ranks_fill_in_as_chance_expects(name: str) -> None:
    grown = fill_in(random_gradients(), [0.05], [name])[0.05, name]
    # Six standard deviations of the nnz, at most √(P·k) each.
    tolerance = 6 * (RANKS * grown.selected[0]) ** 0.5 / SIZE
    for measured, expected in zip(grown.density, grown.uniform_density, strict=True):
        assert abs(measured - expected) < tolerance


def test_identical_ranks_do_not_fill_in() -> None:
    same = fill_in([random_gradients()[0]] * RANKS, [0.01])
    for grown in same.values():
        assert set(grown.nnz) == {grown.selected[0]}
        assert grown.dense_from() is None


def test_fill_in_accepts_streams() -> None:
    gradients = random_gradients()
    streams = [topk(gradient, SIZE // 10) for gradient in gradients]
    exact = (0.01, "exact")
    assert fill_in(streams, [0.01])[exact] == fill_in(gradients, [0.01])[exact]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: growth([]), "at least one stream"),
        (lambda: growth([SparseStream.from_dense(torch.empty(0))]), "at least one coordinate"),
        (lambda: fill_in([], [0.1]), "at least one gradient"),
        (lambda: fill_in([torch.ones(4), torch.ones(5)], [0.1]), "one size, got 4 and 5"),
        (lambda: fill_in([torch.ones(4)], [10]), "for a percentage pass density=0.1"),
        (lambda: fill_in([torch.ones(4)], [0.1], ["exakt"]), "did you mean 'exact'"),
        (lambda: fill_in([torch.ones(2, 2)], [0.1]), "flatten it first"),
        (lambda: plot_fill_in({}, "nowhere.svg"), "at least one growth"),
    ],
)
def test_bad_input_is_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        call()


def model() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3)
    return nn.Sequential(*layers)


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(7, 6, generator=generator), torch.randint(3, (7,), generator=generator))
        for _ in range(count)
    ]


def test_gradients_equal_backward_and_the_model_is_unchanged() -> None:
    network, loss = model(), nn.CrossEntropyLoss()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    gradients = list(gradients_of(network, loss, batches(3)))
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert all(parameter.grad is None for parameter in network.parameters())
    for gradient, (inputs, targets) in zip(gradients, batches(3), strict=True):
        fresh = model()
        loss(fresh(inputs), targets).backward()
        flat = [p.grad.flatten() for p in fresh.parameters() if p.grad is not None]
        assert torch.equal(gradient, torch.cat(flat))


def test_unused_and_frozen_parameters_and_sparse_gradients() -> None:
    class Lookup(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.Embedding(4, 2, sparse=True)
            self.unused = nn.Parameter(torch.ones(3))
            self.frozen = nn.Parameter(torch.ones(5), requires_grad=False)

        def forward(self, indices: Tensor) -> Tensor:
            return self.rows(indices).sum() * self.frozen.sum()

    inputs = torch.tensor([1, 1, 3])
    (gradient,) = gradients_of(Lookup(), lambda output, _: output, [(inputs, inputs)])
    # A module's own parameters come before those of its submodules.
    assert gradient.tolist() == [0, 0, 0, 0, 0, 10, 10, 0, 0, 5, 5]


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_the_plot_is_written_and_repeats(suffix: str, tmp_path: Path) -> None:
    gradients = gradients_of(model(), nn.CrossEntropyLoss(), batches(4))
    measured = fill_in(gradients, [0.1, 0.01], ["exact", "bucketed", "chunkwise"])
    files = [tmp_path / f"{i}.{suffix}" for i in range(2)]
    for file in files:
        plot_fill_in(measured, file, title="a model")
    first, second = (file.read_bytes() for file in files)
    assert first == second
    assert first.startswith(b"\x89PNG" if suffix == "png" else b"<?xml")


def test_without_matplotlib_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'sparcel\[plots\]'"):
        plot_fill_in(fill_in(random_gradients(), [0.1]), "nowhere.svg")
