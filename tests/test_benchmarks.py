"""Scripts of benchmarks/ measure what they say; `make check` compares their records and pages."""

from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.network import balancing, scale, tree
from benchmarks.network import two_tiers as counted
from benchmarks.training import frontier
from benchmarks.training import fsdp_model as fsdp
from sparcel import simulate, topk


@given(st.sampled_from([1, 2, 3, 5, 8]), st.integers(0, 60), st.sampled_from([1, 8, 20, 1000]))
@example(16, 37, 4)
@example(17, 37, 8)
def test_the_tree_sums_on_all_ranks(ranks: int, size: int, chunk: int) -> None:

    def on_rank(comm: Any) -> torch.Tensor:
        vector = torch.arange(size).float() * (comm.rank + 1)
        tree.tree_all_reduce(vector, comm, chunk)
        return vector

    report = simulate(ranks, on_rank)
    expected = torch.arange(size).float() * (ranks * (ranks + 1) // 2)
    assert all(torch.equal(vector, expected) for vector in report.results)
    # Up and down each edge, every coordinate once.
    assert sum(traffic.bytes_sent for traffic in report.traffic) == 2 * (ranks - 1) * 4 * size


def test_two_tiers_count_every_method() -> None:
    for name in counted.METHODS:
        assert counted.count(name, 2, 2)["bytes"] > 0


def test_scale_measures_every_collective() -> None:
    for name in scale.NAMES:
        assert scale.measure(name, 4, 1000, 10)["ranks"] == 4


def test_balancing_spares_an_owner_whose_region_has_everything() -> None:
    ranks, k, size = 4, 1000, 100_000
    vectors = torch.zeros(ranks, size)
    vectors[:, : size // ranks] = torch.rand(ranks, size // ranks)
    rows = balancing.measured([topk(vector, k) for vector in vectors], k)
    found = {(row["regions"], row["blocks"]): row for row in rows}
    everything = (ranks - 1) * 8 * k
    assert found["equal", "direct"]["reduce_bytes"] >= everything
    assert found["equal", "direct"]["gather_bytes"] >= everything
    assert found["equal", "evened"]["gather_bytes"] < everything
    for regions in ("averaged", "counted"):
        for blocks in balancing.BLOCKS:
            row = found[regions, blocks]
            assert row["reduce_bytes"] < everything / 2
            assert row["gather_bytes"] < everything / 2


@pytest.mark.processes
def test_bytes_of_sharded_models_are_predicted_exactly(run_on: Any) -> None:
    for by_label in run_on(4, train_all_sharded):
        for told, sent in by_label:
            assert told == (sent, True)


def train_all_sharded(comm: Any) -> Any:
    return [train_sharded(label) for label in ("topk 1 %", "topk 1 %, packed:4")]


def train_sharded(label: str) -> Any:
    """Return what a rank was to send in a step, and what it sent."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    replica = fsdp.Replica(fsdp.METHODS[label], mesh, (32, 2))
    for batch in islice(fsdp.random_batches(1), 2):
        replica.step(*batch)
    told = fsdp.predicted(fsdp.vectors_of(replica.model), replica.method, mesh)
    sent = replica.handle.stats().last.bytes_sent
    replica.close()
    return told, sent


@given(
    st.floats(0.01, 1),
    st.none() | st.floats(0.01, 1),
    st.lists(st.sampled_from(["front", "still"]), unique=True),
)
def test_a_run_names_its_settings(density: float, returned: float | None, words: Any) -> None:
    densities = str(density) if returned is None else f"{density}/{returned}"
    method = frontier.method_of(",".join(["bidirectional", densities, "mask:4", *words]))
    assert method.settings.pop("returned", None) == returned
    assert method.settings == {"density": density, "format": "mask:4"}
    assert (method.ahead, method.frontload) == ("still" not in words, "front" in words)
