"""Models with known gradients: small integers that depend on rank, step, name and index."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import sparcel
from sparcel.core.comm import Communicator
from sparcel.core.training import Stats
from tests.evenly import attach_evenly

SHAPES = {
    "first": (40, 64),
    "bias": (40,),
    "second": (30, 100),
    "norm": (50,),
    "third": (50, 50),
}
"""Three tensors that are sparse by default, and two that stay dense."""

LARGE = ("first", "second", "third")
MANY_BUCKETS = {"bucket_cap_mb": 0.009}
"""Splits `Linear` into three buckets once DDP has rebuilt them."""

Poison = tuple[str, float]
"""A parameter, and a value for one element of its gradient."""


def known_gradient(name: str, like: Tensor, rank: int, step: int) -> Tensor:
    """Return multiples of 4, so that averages over 4 ranks are integers; few are large."""
    mixed = torch.arange(like.numel()) * (7 + 2 * rank) + crc32(name.encode()) % 101 + 13 * step
    values = mixed % 5 - 2 + 3 * (mixed % 31 == rank + step)
    return 4 * values.reshape(like.shape).to(like.dtype)


class Linear(nn.Module):
    """Computes the sum of <parameter, coefficients>, so its gradients are the coefficients."""

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]] = SHAPES,
        dtypes: Mapping[str, torch.dtype] | None = None,
        frozen: Collection[str] = (),
    ) -> None:
        super().__init__()
        for name, shape in shapes.items():
            dtype = (dtypes or {}).get(name, torch.float32)
            trained = name not in frozen
            self.register_parameter(name, nn.Parameter(torch.zeros(shape, dtype=dtype), trained))

    def forward(
        self, rank: int, step: int, unused: Collection[str] = (), poison: Poison | None = None
    ) -> Tensor:
        terms = []
        for name, parameter in self.named_parameters():
            coefficients = known_gradient(name, parameter, rank, step)
            if poison is not None and name == poison[0]:
                coefficients.view(-1)[3] = poison[1]
            if name not in unused:
                terms.append((parameter * coefficients).double().sum())
        return torch.stack(terms).sum()


@dataclass
class Trained:
    """A rank's ``updates`` and ``residuals`` by name, flat, in float64."""

    updates: dict[str, Tensor] = field(default_factory=dict)
    residuals: dict[str, Tensor] = field(default_factory=dict)
    every_update: list[dict[str, Tensor]] = field(default_factory=list)
    buckets: list[int] = field(default_factory=list)
    stats: Stats | None = None


def observe(ddp: DistributedDataParallel) -> dict[str, Tensor]:
    """Return the gradients for the optimizer."""
    return {
        name: parameter.grad.detach().double().flatten().clone()
        for name, parameter in ddp.module.named_parameters()
        if parameter.grad is not None
    }


def residuals_of(handle: sparcel.Handle, rank: int, kind: str = "rank") -> dict[str, Tensor]:
    """Return this rank's state by name: its residuals or, with ``kind="velocity"``, velocities."""
    prefix = f"{kind}{rank}."
    return {
        key.removeprefix(prefix): owed.double()
        for key, owed in handle.state_dict().items()
        if key.startswith(prefix)
    }


def count_buckets(handle: sparcel.Handle, counts: list[int]) -> None:
    """Append the number of buckets of each step to ``counts``, at the end of the step."""
    comm, account = handle._session.ranks.comm, handle._session.count
    submit, jobs = comm.submit, [0]
    others = 2 if handle._session.treatment.scope == "model" else 1

    def submit_and_count(job: Any) -> Any:
        jobs[0] += 1
        return submit(job)

    def account_and_count(*arguments: Any) -> None:
        counts.append(jobs[0] - others)  # the last jobs are of what is held, and of small tensors
        jobs[0] = 0
        account(*arguments)

    comm.submit, handle._session.count = submit_and_count, account_and_count


def train(
    comm: Communicator,
    scheme: str | None,
    steps: int = 4,
    model: Mapping[str, Any] | None = None,
    wrap: Mapping[str, Any] | None = None,
    unused: Mapping[int, Collection[str]] | None = None,
    unused_in: Collection[int] = range(100),
    micro_steps: int = 1,
    **settings: Any,
) -> Trained:
    """Train `Linear` for some steps; ``scheme=None`` is plain DDP.

    ``unused`` names for each rank the parameters that its forward passes leave out in the steps
    ``unused_in``. A step's gradient is the sum over ``micro_steps`` passes.
    """
    ddp = DistributedDataParallel(Linear(**(model or {})), **(wrap or {}))
    handle = None if scheme is None else attach_evenly(ddp, scheme, **settings)
    seen = Trained()
    if handle is not None:
        count_buckets(handle, seen.buckets)
    for step in range(steps):
        left_out = (unused or {}).get(comm.rank, ()) if step in unused_in else ()
        ddp.zero_grad()
        for micro_step in range(micro_steps - 1):
            with ddp.no_sync():
                ddp(comm.rank, step * micro_steps + micro_step, left_out).backward()
        ddp(comm.rank, (step + 1) * micro_steps - 1, left_out).backward()
        update = observe(ddp)
        seen.every_update.append(update)
        for name, part in update.items():
            seen.updates[name] = seen.updates.get(name, torch.zeros_like(part)) + part
    if handle is not None:
        seen.residuals, seen.stats = residuals_of(handle, comm.rank), handle.stats()
        handle.close()
    return seen


def gradient_sums(
    ranks: int,
    passes: int,
    model: Mapping[str, Any] | None = None,
    unused: Mapping[int, Collection[str]] | None = None,
    unused_in: Collection[int] = range(100),
) -> dict[str, Tensor]:
    """Return the sum over ranks and passes of the known gradients, by name."""
    sums: dict[str, Tensor] = {}
    for name, parameter in Linear(**(model or {})).named_parameters():
        parts = [
            known_gradient(name, parameter, rank, step).double().flatten()
            for rank in range(ranks)
            for step in range(passes)
            if step not in unused_in or name not in (unused or {}).get(rank, ())
        ]
        sums[name] = torch.stack(parts).sum(0) if parts else torch.zeros(parameter.numel()).double()
    return sums


def assert_conserved(
    ranks: list[Trained], gradients: dict[str, Tensor], exact: bool = True
) -> None:
    """Check Σ residuals + P·Σ updates = Σ gradients, by name."""
    for name, gradient in gradients.items():
        nothing = torch.zeros((), dtype=torch.float64)
        total = len(ranks) * ranks[0].updates.get(name, nothing) + sum(
            trained.residuals.get(name, nothing) for trained in ranks
        )
        tolerance = 0.0 if exact else 1e-3
        torch.testing.assert_close(
            total.expand_as(gradient),
            gradient,
            rtol=0,
            atol=tolerance,
            msg=f"{name} is not conserved",
        )


def assert_agreed(ranks: list[Trained]) -> None:
    """Check that all ranks have the same updates, bit by bit, and that there are some."""
    for trained in ranks:
        for mine, first in zip(trained.every_update, ranks[0].every_update, strict=True):
            assert mine.keys() == first.keys()
            for name in mine:
                assert torch.equal(mine[name], first[name]), name
