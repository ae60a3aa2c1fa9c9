"""The ranks of an exchange: those of other shards are named by their numbers among all."""

from __future__ import annotations

import pytest
import torch

import sparcel
from sparcel import simulate
from sparcel.core.comm import Communicator
from sparcel.core.cost import stated_rates
from sparcel.core.schemes import TopK
from sparcel.core.training import Averager
from sparcel.core.training.ranks import Shard
from sparcel.errors import MismatchError
from tests.evenly import even_averager


def sharded(comm: Communicator, size: int = 2000, **settings: object) -> Averager:
    """Return an averager on two replicas of two shards."""
    shard = Shard(comm.rank % 2, {})
    tensors = {"a": torch.zeros(size)}
    return even_averager(tensors, TopK(0.1), group=comm, shard=shard, **settings)


def test_ranks_that_hold_another_shard_shape_are_named() -> None:
    def on_rank(comm: Communicator) -> str:
        with pytest.raises(MismatchError) as told:
            sharded(comm, 2000 + (comm.rank == 3))
        return str(told.value)

    first, second, third, fourth = simulate(4, on_rank).results
    assert first.startswith("ranks of another shard average something else than rank 0")
    assert second.startswith("ranks [3] average something else than rank 1")
    assert third.startswith("ranks of another shard average something else than rank 2")
    assert fourth.startswith("ranks [1] average something else than rank 3")


def test_shards_share_the_links_between_nodes() -> None:
    rates = stated_rates(bandwidth=1e9, latency_s=1e-4, ranks=4, ranks_per_node=2)

    def on_rank(comm: Communicator) -> bool:
        ranks = sharded(comm, rates=rates)._session.ranks
        whole = ranks.everyone.rates
        assert whole is not None and whole.ranks_per_node == 2
        assert ranks.comm.rates is not None
        return ranks.comm.rates.to_json() == whole.across_nodes().to_json() != whole.to_json()

    assert all(simulate(4, on_rank, ranks_per_node=2).results)


TWINS = {
    **{f"{name} weight": torch.zeros(40, 50) for name in ("one", "other")},
    **{f"{name} bias": torch.zeros(40) for name in ("one", "other")},
    **{f"{name} rows": torch.zeros(60, 4) for name in ("one", "other")},
}


@pytest.mark.parametrize("scheme", ["bidirectional", "topk", "dense"])
@pytest.mark.parametrize("kind", ["weight", "bias", "rows"])
def test_ranks_that_exchange_other_tensors_of_the_same_sizes_are_told(
    scheme: str, kind: str
) -> None:
    """As if a pass of theirs had used other parts of the model."""
    rows = [name for name in TWINS if name.endswith("rows")]

    def on_rank(comm: Communicator) -> None:
        averager = even_averager(TWINS, sparcel.scheme(scheme), group=comm, rows=rows)
        name = f"{'one' if comm.rank else 'other'} {kind}"
        if kind == "rows":
            averager.queue_rows(name, torch.ones(60, 4).to_sparse(1))
        else:
            size = TWINS[name].numel()
            averager.queue(torch.ones(size), {name: (0, size)})
        with pytest.raises(MismatchError, match=f"rank 0 called .*tensors='other {kind}'"):
            averager.finish()

    simulate(3, on_rank)
