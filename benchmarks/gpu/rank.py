"""What each process of `measure` does: train on one card with several methods that take turns.

The first argument is a job, see `Job`. Rank 0 prints a line of JSON a method. A step is forward,
backward, exchange and optimiser, timed until the card has done it; its time is that of the slowest
rank. What an exchange takes is the difference to a step without one.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import sparcel
from benchmarks.gpu.passes import Row, expect, work_of
from sparcel.core import device
from sparcel.core.schemes import SPARSER

WARM_UP_STEPS = 4
"""DDP lays out its buckets anew after the first, and PowerSGD begins in the third."""
LAST_STEPS = 3
"""Steps of which the host's time is taken, with and without an exchange."""
BY_NCCL = ", by NCCL"

Model, Optimizer = DistributedDataParallel, torch.optim.Optimizer
Attach = Callable[[Model, Optimizer], sparcel.Handle | None]
"""``(model, optimizer) -> handle``: gives DDP a way to exchange gradients; None if torch's own."""


@dataclass(frozen=True)
class Job:
    """What to train.

    Attributes
    ----------
    width, layers, batch
        An MLP of so many square layers, and the samples of a rank.
    rounds
        How many steps of each method are timed.
    nccl
        Whether NCCL carries what DDP exchanges, and, beside the host, what sparcel does.
    """

    device: str
    width: int
    layers: int
    batch: int
    rounds: int
    nccl: bool = False


def alone(model: Model, optimizer: Optimizer) -> None:
    """Leave DDP as it is."""


def bf16(model: Model, optimizer: Optimizer) -> None:
    # DDP refuses this hook by its name on every engine but NCCL.
    model.register_comm_hook(
        None, lambda group, bucket: default_hooks.bf16_compress_hook(group, bucket)
    )


def powersgd(model: Model, optimizer: Optimizer) -> None:
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def ours(model: Model, optimizer: Optimizer, name: str | None = None, **settings: Any) -> Any:
    # At 10 % the first 127 steps send everything.
    return sparcel.attach(model, name, optimizer=optimizer, frontload=False, **settings)


OURS: dict[str, Callable[..., Any]] = {
    "default": ours,
    "10 %": partial(ours, **SPARSER),
    "topk 1 %": partial(ours, name="topk", density=0.01),
}
BY_HOST: dict[str, Attach] = {"DDP": alone, "DDP bf16": bf16, "PowerSGD 4": powersgd, **OURS}


def methods(job: Job) -> dict[str, Attach]:
    """Return what takes turns, by name."""
    if not job.nccl:
        return BY_HOST
    by_nccl = {name + BY_NCCL: partial(one, carrier="nccl") for name, one in OURS.items()}
    return {"DDP": alone, **OURS, **by_nccl}


class Training:
    """One method's training on this rank."""

    def __init__(self, job: Job, attach: Attach) -> None:
        self.device = torch.device(job.device)
        torch.manual_seed(0)
        square = [nn.Linear(job.width, job.width) for _ in range(job.layers)]
        hidden = [module for layer in square[:-1] for module in (layer, nn.ReLU())]
        module = nn.Sequential(*hidden, square[-1]).to(self.device)
        torch.manual_seed(1 + dist.get_rank())
        self.x, self.y = torch.randn(2, job.batch, job.width).to(self.device)
        # PowerSGD over Gloo needs one bucket: with several, its collectives come in another order
        # on each rank.
        self.model = DistributedDataParallel(
            module, gradient_as_bucket_view=True, bucket_cap_mb=1000 if attach is powersgd else None
        )
        self.optimizer = torch.optim.SGD(module.parameters(), lr=0.005)
        self.handle = attach(self.model, self.optimizer)
        self.parameters = sum(parameter.numel() for parameter in module.parameters())
        self.loss = torch.zeros(())
        self.step()
        self.first_loss = self.mean_loss()
        for _ in range(WARM_UP_STEPS - 1):
            self.step()
        self.ms: list[float] = []
        self.sent = 0.0

    def step(self) -> None:
        self.optimizer.zero_grad()
        # A sum over features, so that a few steps lower it at any width.
        self.loss = (self.model(self.x) - self.y).square().sum(dim=1).mean()
        self.loss.backward()
        self.optimizer.step()

    def timed(self) -> tuple[float, float]:
        """Take a step; return the slowest rank's milliseconds, and those of this rank's host."""
        self.finish()
        meet()
        start = perf_counter()
        self.step()
        host = perf_counter() - start
        self.finish()
        return most(1e3 * (perf_counter() - start)), 1e3 * host

    def turn(self) -> None:
        """Take a step that counts."""
        before = self.bytes_sent()
        self.ms.append(self.timed()[0])  # after which all ranks have sent what they send
        self.sent += self.bytes_sent() - before

    def finish(self) -> None:
        """Wait for the card."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def mean_loss(self) -> float:
        """Return the last step's loss over all ranks."""
        mean = self.loss.detach().cpu() / dist.get_world_size()
        dist.all_reduce(mean)
        return mean.item()

    def bytes_sent(self) -> float:
        """Return the bytes sent so far, by sparcel's count, or a share of what loopback has."""
        if self.handle is not None:
            return float(self.handle.stats().bytes_sent)
        return loopback_bytes() / dist.get_world_size()

    def waits(self) -> int:
        """Return how often the host has waited for the card in `sparcel.core.device.read`."""
        if self.handle is None:
            return 0
        comm = self.handle._session.ranks.comm  # its jobs run on a thread that counts for itself
        return device.reads() + comm.submit(device.reads).wait()

    def weights(self) -> str:
        """Return what tells whether two trainings, or two ranks, have the same parameters."""
        whole = torch.cat([part.detach().flatten() for part in self.model.parameters()]).cpu()
        expect(bool(whole.isfinite().all()), "all parameters are finite")
        return hashlib.sha256(whole.numpy().tobytes()).hexdigest()

    def row(self) -> Row:
        """Return the figures of the steps that counted, and of some more; it ends the training."""
        on_card = self.device.type == "cuda"  # in a trial nothing of a card is known
        last, before = self.mean_loss(), self.waits()
        whole = work_of(self.step, self.device)
        waits = self.waits() - before
        host = median(self.timed()[1] for _ in range(LAST_STEPS))
        with self.model.no_sync():  # after which the ranks' models differ
            alone = work_of(self.step, self.device)
            computing = [self.timed() for _ in range(LAST_STEPS)]
        if self.handle is not None:
            self.handle.close()
        return {
            "ranks": dist.get_world_size(),
            "parameters": self.parameters,
            "step_ms": median(self.ms),
            "min_ms": min(self.ms),
            "max_ms": max(self.ms),
            "repeats": len(self.ms),
            "compute_ms": median(step for step, _ in computing),
            "exchange_host_ms": host - median(host for _, host in computing),
            "exchange_device_ms": whole.device_ms - alone.device_ms if on_card else None,
            "exchange_launches": whole.launches - alone.launches if on_card else None,
            "waits": waits if on_card else None,
            "sent_bytes": most(self.sent / len(self.ms)),
            "loss": [self.first_loss, last],
        }


def meet() -> None:
    """Wait for all ranks."""
    dist.all_reduce(torch.zeros(1))


def most(figure: float) -> float:
    """Return the largest figure of any rank."""
    figures = torch.tensor(figure, dtype=torch.float64)
    dist.all_reduce(figures, dist.ReduceOp.MAX)
    return figures.item()


def loopback_bytes() -> int:
    """Return the bytes that this machine's processes have sent each other; 0 if nobody counts."""
    file = Path("/proc/net/dev")
    lines = file.read_text().splitlines() if file.exists() else []
    counts = [line.split(":")[1].split() for line in lines if line.strip().startswith("lo:")]
    return int(counts[0][8]) if counts else 0


def rows(job: Job) -> Iterator[Row]:
    """Yield the row of each method, which take turns; all ranks call.

    Raises
    ------
    WrongResultError
        If ranks end with different parameters, if a loss does not fall, or if NCCL brings others
        than the host.
    """
    trainings = {name: Training(job, attach) for name, attach in methods(job).items()}
    for _ in range(job.rounds):
        for training in trainings.values():
            training.turn()
    weights = {name: training.weights() for name, training in trainings.items()}
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, weights)
    for name, training in trainings.items():
        there = {one[name] for one in everywhere} | {weights[name.removesuffix(BY_NCCL)]}
        expect(len(there) == 1, f"{name}: the same parameters on all ranks, and by any carrier")
        row = training.row()
        first, last = row["loss"]
        expect(last < first, f"{name}: the loss falls")
        yield {"method": name, **row}


def main() -> None:
    torch.set_num_threads(1)  # the ranks share the cores
    job = Job(**json.loads(sys.argv[1]))
    if job.device != "cpu":
        torch.cuda.set_device(job.device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if job.nccl else "gloo")
    for row in rows(job):
        if dist.get_rank() == 0:
            print(json.dumps(row), flush=True)
    meet()
    # A thread of Gloo's may let go of a tensor while Python ends, and that aborts the process.
    os._exit(0)


if __name__ == "__main__":
    main()
