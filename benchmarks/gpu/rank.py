"""What each rank of `steps.py` does: train on one card with each method, and time the steps.

The first argument is a job, see `Job`. Rank 0 prints a line of JSON a method. A step is forward,
backward, exchange and optimiser, timed until the card has done it; its time is that of the slowest
rank.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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
from benchmarks.gpu.checks import expect
from sparcel import device
from sparcel.comm import ring_bytes
from sparcel.profiling import timed_by

WARM_UP_STEPS = 4
"""DDP lays out its buckets anew after the first, and PowerSGD begins in the third."""
MOST_STEPS, LEAST_STEPS = 20, 3

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
    seconds
        About how long to time each method.
    """

    device: str
    width: int
    layers: int
    batch: int
    seconds: float


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


def default(model: Model, optimizer: Optimizer) -> sparcel.Handle:
    # By default the first 127 steps send everything.
    return sparcel.attach(model, optimizer=optimizer, frontload=False)


def topk(model: Model, optimizer: Optimizer) -> sparcel.Handle:
    return sparcel.attach(model, "topk", density=0.01, optimizer=optimizer, frontload=False)


METHODS: dict[str, Attach] = {
    "DDP": alone,
    "DDP bf16": bf16,
    "PowerSGD 4": powersgd,
    "sparcel": default,
    "topk 1 %": topk,
}


class Training:
    """One method's training on this rank."""

    def __init__(self, job: Job, attach: Attach) -> None:
        self.job, self.device = job, torch.device(job.device)
        torch.manual_seed(0)
        square = [nn.Linear(job.width, job.width) for _ in range(job.layers)]
        hidden = [module for layer in square[:-1] for module in (layer, nn.ReLU())]
        module = nn.Sequential(*hidden, square[-1]).to(self.device)
        torch.manual_seed(1 + dist.get_rank())
        self.x, self.y = torch.randn(2, job.batch, job.width, device=self.device)
        # PowerSGD over Gloo needs one bucket: with several, its collectives come in another order
        # on each rank.
        self.model = DistributedDataParallel(
            module, gradient_as_bucket_view=True, bucket_cap_mb=1000 if attach is powersgd else None
        )
        self.optimizer = torch.optim.SGD(module.parameters(), lr=0.005)
        self.handle = attach(self.model, self.optimizer)
        self.parameters = sum(parameter.numel() for parameter in module.parameters())
        self.loss = torch.zeros(())

    def step(self) -> None:
        self.optimizer.zero_grad()
        # A sum over features, so that a few steps lower it at any width.
        self.loss = (self.model(self.x) - self.y).square().sum(dim=1).mean()
        self.loss.backward()
        self.optimizer.step()

    def seconds(self) -> float:
        """Take a step, and return the seconds of the slowest rank."""
        dist.barrier()
        start = perf_counter()
        self.step()
        self.finish()
        taken = torch.tensor(perf_counter() - start)
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        return taken.item()

    def finish(self) -> None:
        """Wait for the card."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def mean_loss(self) -> float:
        """Return the last step's loss over all ranks."""
        mean = self.loss.detach().cpu() / dist.get_world_size()
        dist.all_reduce(mean)
        return mean.item()

    def sent(self) -> tuple[int, int]:
        """Return the bytes sent so far, by sparcel's count and by the interface's; 0 for none."""
        counted = self.handle.stats().bytes_sent if self.handle else 0
        return counted, interface_bytes()

    def weights(self) -> str:
        """Return what tells whether two ranks have the same parameters."""
        whole = torch.cat([part.detach().flatten() for part in self.model.parameters()]).cpu()
        expect(whole.isfinite().all(), "all parameters are finite")
        return hashlib.sha256(whole.numpy().tobytes()).hexdigest()


def interface_bytes() -> int:
    """Return the bytes that the interface of this rank's node has sent; 0 if nobody counts them."""
    file, name = Path("/proc/net/dev"), os.environ.get("GLOO_SOCKET_IFNAME")
    lines = file.read_text().splitlines() if file.exists() else []
    counts = [line.split(":")[1].split() for line in lines if line.strip().startswith(f"{name}:")]
    return int(counts[0][8]) if counts else 0


class Reads:
    """How often the host waited for the card in `sparcel.device.read`, by part of a step.

    ``blocks`` has the name of each part that ran, on any thread, and the reads in it that were not
    in a part inside of it.
    """

    def __init__(self) -> None:
        self.blocks: list[tuple[str, int]] = []
        self._thread = threading.local()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the reads in the block."""
        outer = getattr(self._thread, "inside", 0)
        self._thread.inside, before = 0, device.reads()
        try:
            yield
        finally:
            reads = device.reads() - before
            self.blocks.append((name, reads - self._thread.inside))
            self._thread.inside = outer + reads


def synchronisations(training: Training) -> dict[str, Any] | None:
    """Count how often the host waits for the card in a step of sparcel.

    torch warns of the waits that it knows; those of `sparcel.device.read`, by events, are not among
    them.
    """
    handle, reads = training.handle, Reads()
    if handle is None:
        return None
    comm = handle._session.ranks.comm  # its jobs run on a thread that counts for itself
    on_thread = lambda: comm.submit(device.reads).wait()  # noqa: E731
    on_card = training.device.type == "cuda"
    before = device.reads() + on_thread()
    with warnings.catch_warnings(record=True) as caught, timed_by(reads.part):
        warnings.simplefilter("always")
        if on_card:
            torch.cuda.set_sync_debug_mode("warn")
        training.step()
        if on_card:
            torch.cuda.set_sync_debug_mode("default")
    total = device.reads() + on_thread() - before
    waits = [one for one in caught if "called a synchronizing" in str(one.message)]
    places = Counter(f"{Path(one.filename).name}:{one.lineno}" for one in waits)
    return {
        "reads": total,
        "reads_in_parts": sum(count for _, count in reads.blocks),
        "most_reads_in_a_part": max((count for _, count in reads.blocks), default=0),
        "parts": dict(Counter(name for name, _ in reads.blocks)),
        "reads_by_part": dict(sum((Counter({n: c}) for n, c in reads.blocks), Counter())),
        "warnings": len(waits),
        "warned_at": dict(places.most_common(10)),
    }


def measured(job: Job, name: str) -> dict[str, Any]:
    """Train with a method, and return its row; the same on all ranks but for the counts."""
    training = Training(job, METHODS[name])
    training.seconds()
    ranks, first = dist.get_world_size(), training.mean_loss()
    taken = min(training.seconds() for _ in range(WARM_UP_STEPS - 1))
    steps = min(MOST_STEPS, max(LEAST_STEPS, round(job.seconds / taken)))
    before = training.sent()
    times = [training.seconds() for _ in range(steps)]
    payload, wire = ((b - a) / steps for a, b in zip(before, training.sent(), strict=True))
    last = training.mean_loss()
    waits = synchronisations(training)
    weights, there = training.weights(), [""] * ranks
    dist.all_gather_object(there, weights)
    expect(len(set(there)) == 1, f"{name}: all ranks have the same parameters")
    expect(last < first, f"{name}: the loss falls")
    with training.model.no_sync():  # after which the ranks' models differ
        alone = [training.seconds() for _ in range(LEAST_STEPS)]
    step, compute = median(times), median(alone)
    row = {
        "method": name,
        "ranks": ranks,
        "parameters": training.parameters,
        "step_ms": 1e3 * step,
        "min_ms": 1e3 * min(times),
        "max_ms": 1e3 * max(times),
        "repeats": steps,
        "compute_ms": 1e3 * compute,
        "payload_bytes": payload,
        "wire_bytes": wire,
        "ring_bytes": ring_bytes(4 * training.parameters, ranks),
        "loss": [first, last],
        "synchronisations": waits,
    }
    if training.handle is not None:
        training.handle.close()
    return row


def rows(job: Job) -> Iterator[dict[str, Any]]:
    """Yield the row of each method, with the bytes of the busiest rank.

    ``exchange_share`` is the share of a step beyond the computation of DDP alone.
    """
    compute_ms = None
    for name in METHODS:
        row = measured(job, name)
        compute_ms = compute_ms or row["compute_ms"]
        row["exchange_share"] = max(0.0, 1 - compute_ms / row["step_ms"])
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, row)
        for count in ("payload_bytes", "wire_bytes"):
            row[count] = max(one[count] for one in everywhere)
        yield row


def main() -> None:
    torch.set_num_threads(1)  # the ranks share the cores
    dist.init_process_group("gloo")
    for row in rows(Job(**json.loads(sys.argv[1]))):
        if dist.get_rank() == 0:
            print(json.dumps(row), flush=True)
    dist.barrier()
    # A thread of Gloo's may let go of a tensor while Python ends, and that aborts the process.
    os._exit(0)


if __name__ == "__main__":
    main()
