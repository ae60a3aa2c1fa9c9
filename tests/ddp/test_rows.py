"""Sparse gradients, as of an embedding that is looked up in a few places, travel as rows."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from sparcel.core.comm import Communicator
from sparcel.core.formats import RAW
from tests.ddp.models import known_gradient, observe, residuals_of
from tests.evenly import attach_evenly

pytestmark = pytest.mark.processes

ROWS, WIDTH = 500, 6


def looked_up(rank: int, step: int, rows: int) -> Tensor:
    """Return the rows that a rank looks up; some several times, some also on other ranks."""
    return torch.tensor([7, 7, 3 + step, 11 * rank + 20, 7, 3 + step, 90 + rank]) % rows


class Words(nn.Module):
    """An embedding and, unless ``alone``, a dense layer; gradients are small integers."""

    def __init__(self, sparse: bool, rows: int, bag: bool, alone: bool, dtype: torch.dtype) -> None:
        super().__init__()
        kind = partial(nn.EmbeddingBag, mode="sum") if bag else nn.Embedding
        self.words = kind(rows, WIDTH, sparse=sparse, dtype=dtype)
        nn.init.zeros_(self.words.weight)
        if not alone:
            self.layer = nn.Parameter(torch.zeros(50, 40))

    def forward(self, rank: int, step: int, indices: Tensor, factor: float = 1.0) -> Tensor:
        found = self.words(indices[:, None] if isinstance(self.words, nn.EmbeddingBag) else indices)
        loss = (found * known_gradient("words", found, rank, step) * factor).double().sum()
        if hasattr(self, "layer"):
            loss = loss + (self.layer * known_gradient("layer", self.layer, rank, step)).sum()
        return loss


def learn(
    comm: Communicator,
    scheme: str | None,
    sparse: bool = True,
    rows: int = ROWS,
    bag: bool = False,
    alone: bool = False,
    idle_rank: int | None = None,
    poisoned_step: int | None = None,
    dtype: torch.dtype = torch.float32,
    static: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    """Return updates, bytes sent so far and residuals of three steps."""
    ddp = DistributedDataParallel(Words(sparse, rows, bag, alone, dtype), static_graph=static)
    handle = None if scheme is None else attach_evenly(ddp, scheme, **settings)
    updates, bytes_sent, residuals = [], [], []
    for step in range(3):
        indices = looked_up(comm.rank, step, rows)
        if comm.rank == idle_rank:
            indices = indices[:0]
        factor = float("nan") if step == poisoned_step and comm.rank == 1 else 1.0
        ddp.zero_grad()
        ddp(comm.rank, step, indices, factor).backward()
        if (gradient := ddp.module.words.weight.grad).is_sparse:
            assert gradient.is_coalesced()
            ddp.module.words.weight.grad = gradient.to_dense()
        updates.append(observe(ddp))
        if handle is not None:
            bytes_sent.append(handle.stats().bytes_sent)
            residuals.append(residuals_of(handle, comm.rank))
    if handle is not None:
        handle.close()
    return {"updates": updates, "bytes_sent": bytes_sent, "residuals": residuals}


def assert_same(results: list[Any], expected: list[Any]) -> None:
    for mine, theirs in zip(results, expected, strict=True):
        for update, reference in zip(mine["updates"], theirs["updates"], strict=True):
            assert update.keys() == reference.keys()
            for name in update:
                assert torch.equal(update[name], reference[name]), name


@pytest.mark.parametrize(
    ("world_size", "bag", "scheme"),
    [(2, False, "topk"), (4, True, "topk"), (2, True, "dense"), (4, False, "dense")],
)
def test_rows_equal_the_dense_embedding(
    run_on: Any, world_size: int, bag: bool, scheme: str
) -> None:
    plain = run_on(world_size, partial(learn, scheme=None, sparse=False, bag=bag))
    settings = {"density": 1.0} if scheme == "topk" else {}
    assert_same(run_on(world_size, partial(learn, scheme=scheme, bag=bag, **settings)), plain)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_rows_of_other_dtypes(run_on: Any, dtype: torch.dtype) -> None:
    plain = run_on(4, partial(learn, scheme=None, sparse=False, dtype=dtype))
    assert_same(run_on(4, partial(learn, scheme="topk", density=1.0, dtype=dtype)), plain)


def test_rows_in_a_static_graph(run_on: Any) -> None:
    plain = run_on(2, partial(learn, scheme=None, sparse=False))
    assert_same(run_on(2, partial(learn, scheme="topk", density=1.0, static=True)), plain)


def test_rows_of_which_most_are_used(run_on: Any) -> None:
    plain = run_on(4, partial(learn, scheme=None, sparse=False, rows=8))
    assert_same(run_on(4, partial(learn, scheme="topk", density=1.0, rows=8)), plain)


def test_a_rank_that_looks_nothing_up(run_on: Any) -> None:
    plain = run_on(2, partial(learn, scheme=None, sparse=False, idle_rank=1))
    assert_same(run_on(2, partial(learn, scheme="topk", density=1.0, idle_rank=1)), plain)


def test_repeated_rows_travel_once(run_on: Any) -> None:
    results = run_on(2, partial(learn, scheme="topk", alone=True))
    for rank, result in enumerate(results):
        expected = 0
        for step, total in enumerate(result["bytes_sent"]):
            rows = looked_up(rank, step, ROWS).unique().numel()
            expected += RAW.nbytes(rows, ROWS, 4 * WIDTH)
            assert total == expected
        assert expected < 3 * ROWS * WIDTH * 4 / 20


def test_rows_keep_no_memory(run_on: Any) -> None:
    for result in run_on(2, partial(learn, scheme="topk")):
        assert all(set(residuals) == {"layer"} for residuals in result["residuals"])


@pytest.mark.parametrize("static", [False, True])
def test_nan_in_a_row_spoils_one_step_for_all_ranks(run_on: Any, static: bool) -> None:
    fine = run_on(2, partial(learn, scheme="topk", static=static))
    spoilt = run_on(2, partial(learn, scheme="topk", static=static, poisoned_step=1))
    for rank in range(2):
        words = [update["words.weight"] for update in spoilt[rank]["updates"]]
        assert torch.equal(words[0], fine[rank]["updates"][0]["words.weight"])
        spoilt_rows = spoilt[1 - rank]["updates"][1]["words.weight"].isnan()
        assert spoilt_rows.any()
        assert torch.equal(words[1].isnan(), spoilt_rows)
        assert torch.equal(words[2], fine[rank]["updates"][2]["words.weight"])
        assert spoilt[rank]["updates"][1]["layer"].isnan().all()
        before, after, later = (residuals["layer"] for residuals in spoilt[rank]["residuals"])
        assert torch.equal(before, after)
        assert not torch.equal(after, later)
