"""What each rank of `commlib.py` does: train as a job says, and take the times of each step.

A step is taken apart by elapsed time that nothing else hides: waiting for the batch (*reading*);
from there to the last gradient (*computing*, with resizing); from the last gradient to the end of
the backward pass (*selecting* and *communicating*, which contains waiting for slower ranks, in the
proportion of the times that sparcel took of both); and the optimiser's step (*LARS*).
"""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset, DistributedSampler, Subset

import sparcel
from benchmarks.clock import gloo, took
from benchmarks.data.cache import Uncached
from benchmarks.network.commlib import PARTS
from sparcel.core.optim import LARS
from sparcel.products.data import Cached, PartSampler
from sparcel.tools.lab import link_bytes

sys.path.append(str(Path(__file__).parents[2] / "examples"))
import growing_images as example

MEMORY = "1 GiB"


class Training:
    """One training of a job: what `commlib.py` wrote into the first argument."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.job, self.rank, self.ranks = job, dist.get_rank(), dist.get_world_size()
        self.schedule = sparcel.Schedule(*map(self._phase, job["phases"]))
        train = example.Images(f"{job['store']}/train")
        test = example.Images(f"{job['images']}/test")
        self.request = request_seconds(train)
        if job["cached"]:
            self.data: Dataset[Any] = Cached(
                train,
                Path(job["cache"], f"node{os.environ['NODE_RANK']}"),  # each has a disk of its own
                memory=MEMORY,
                decode=example.decoded,
                transform=example.augmented,
                group=dist.group.WORLD,
            )
            self.sampler: Any = PartSampler(self.data, exchange_every=4, seed=job["seed"])
        else:
            self.data = Uncached(train, example.decoded, example.augmented)
            self.sampler = DistributedSampler(self.data, seed=job["seed"])  # type: ignore[arg-type]
        own = Subset(test, range(self.rank, len(test), self.ranks))
        images, labels = zip(*map(example.decoded, own), strict=True)
        self.test = torch.stack(images), torch.tensor(labels)
        torch.manual_seed(job["seed"])
        self.module = example.network(len(train.classes))
        self._connect()
        torch.manual_seed(self.ranks * job["seed"] + self.rank)  # each augments by itself
        self.seen = 0.0
        """When the last gradient was computed; that of the first layer."""
        next(self.module.parameters()).register_hook(self._note)

    def _phase(self, phase: dict[str, Any]) -> sparcel.Phase:
        scheme = sparcel.scheme(phase["scheme"], **phase["settings"])
        return sparcel.Phase(
            phase["length"],
            scheme,
            lr=tuple(phase["lr"]),
            resolution=phase["resolution"],
            batch_size=phase["batch_size"],
        )

    def _connect(self) -> None:
        """Make the model, the optimiser and what exchanges gradients."""
        self.model: nn.Module = self.module
        self.handle: sparcel.Handle | None = None
        if self.job["exchange"] != "none":
            self.model = DistributedDataParallel(
                self.module, gradient_as_bucket_view=True, broadcast_buffers=False
            )
        self.optimizer = LARS(
            self.module.parameters(), lr=1.0, weight_decay=1e-4, parallel=self.job["parallel"]
        )
        if self.job["exchange"] == "sparcel":
            self.handle = sparcel.attach(
                self.model, self.schedule.at(0).scheme, optimizer=self.optimizer
            )

    def _note(self, _: Tensor) -> None:
        self.seen = perf_counter()

    def run(self) -> None:
        """Train, and print what each epoch took and reached, a line of JSON on rank 0."""
        loader, batch_size = None, 0
        for epoch in range(math.ceil(self.schedule.length)):
            phase = self.schedule.at(epoch)
            if phase.batch_size != batch_size:
                batch_size = phase.batch_size
                loader = example.loader_of(self.data, batch_size, self.sampler)
            self.sampler.set_epoch(epoch)
            dist.barrier()
            start = perf_counter()
            steps = self._epoch(epoch, loader)
            dist.barrier()
            row = self._row(epoch, perf_counter() - start, steps)
            if self.rank == 0:
                print(json.dumps(row), flush=True)

    def _epoch(self, epoch: int, loader: Any) -> list[list[float]]:
        """Take the steps of an epoch, and return the seconds of their parts."""
        steps, batches, count = [], iter(loader), len(loader)
        phase = self.schedule.at(epoch)
        for number in range(count):
            if epoch + number / count >= self.schedule.length:
                break
            start = perf_counter()
            images, labels = next(batches)
            read = perf_counter()
            self._set(epoch + number / count)
            self.optimizer.zero_grad()
            loss = cross_entropy(self.model(example.resized(images, phase.resolution)), labels)
            loss.backward()
            exchanged = perf_counter()
            self.optimizer.step()
            updated = perf_counter()
            waited = exchanged - self.seen
            selecting = waited * self._selecting_share()
            parts = (read - start, self.seen - read, selecting, waited - selecting)
            steps.append([*parts, updated - exchanged, loss.item()])
        return steps

    def _set(self, now: float) -> None:
        """Bring learning rate and scheme to where the schedule has them."""
        if self.handle is not None:
            self.schedule.apply(now, self.handle, self.optimizer)
        else:
            self.optimizer.param_groups[0]["lr"] = self.schedule.lr(now)

    def _selecting_share(self) -> float:
        """Return how much of the last exchange's time was selection."""
        if self.handle is None:
            return 0.0
        last = self.handle.stats().last
        return last.select_seconds / max(1e-9, last.select_seconds + last.communicate_seconds)

    def _row(self, epoch: int, seconds: float, steps: list[list[float]]) -> dict[str, Any]:
        """Return an epoch's row; times are means over the ranks."""
        *parts, losses = torch.tensor(steps).unbind(1)
        here = torch.stack([*(part.median() for part in parts), *(part.sum() for part in parts)])
        numbers = torch.cat([here, losses.mean()[None]])
        dist.all_reduce(numbers)
        medians, sums, loss = (numbers / self.ranks).split([len(PARTS), len(PARTS), 1])
        phase = self.schedule.at(epoch)
        return {
            "epoch": epoch,
            "resolution": phase.resolution,
            "request_seconds": self.request,
            "images": len(steps) * phase.batch_size * self.ranks,
            "steps": len(steps),
            "seconds": seconds,
            "parts": dict(zip(PARTS, sums.tolist(), strict=True)),
            "median_step": dict(zip(PARTS, medians.tolist(), strict=True)),
            "loss": loss.item(),
            "node_bytes": node_bytes(),
            "accuracy": example.accuracy(self.module, *self.test, phase.resolution),
        }


def request_seconds(images: Dataset[Any], count: int = 20) -> float:
    """Return the median time of one image from the store, which the other ranks ask, too."""
    return median(took(images.__getitem__, index).seconds for index in range(count))


def node_bytes() -> dict[str, int]:
    """Return the bytes that the link of this rank's node has carried so far, headers included."""
    carried = link_bytes()
    assert carried is not None, "run it in the lab"
    return carried._asdict()


def main() -> None:
    """Train as the first argument says."""
    with gloo():
        training = Training(json.loads(sys.argv[1]))
        training.run()
        if training.handle is not None:
            training.handle.close()


if __name__ == "__main__":
    main()
