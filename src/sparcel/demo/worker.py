"""One rank of the demo: trains the same model with each method, and reports its measurements.

The driver starts it on every node as ``python -m sparcel.demo.worker SETTINGS``. Reports are lines
of JSON on standard output, each with its kind under ``"event"``.
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from sparcel.ddp import Handle, attach
from sparcel.demo.data import Dataset, batch_order, load
from sparcel.demo.meter import Meter
from sparcel.demo.settings import (
    BATCH_PER_RANK,
    COMPUTE_STEPS,
    WARM_UP_STEPS,
    DemoSettings,
    Method,
    methods,
)

_HIDDEN = 1600
_LEARNING_RATE = 0.4
"""At the start; it falls linearly to 0. The value suits dense training on the digits."""


def build_model(features: int, classes: int, seed: int) -> nn.Module:
    """Return a multi-layer perceptron of at least 5.2 M parameters, the same for the same seed."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(features, _HIDDEN),
        nn.ReLU(),
        nn.Linear(_HIDDEN, _HIDDEN),
        nn.ReLU(),
        nn.Linear(_HIDDEN, _HIDDEN),
        nn.ReLU(),
        nn.Linear(_HIDDEN, classes),
    )


class Training:
    """One method's training run on this rank.

    Parameters
    ----------
    method
        Method of exchanging gradients.
    settings
        Settings of the demo.
    dataset
        The samples.
    """

    def __init__(self, method: Method, settings: DemoSettings, dataset: Dataset) -> None:
        self.settings, self.dataset = settings, dataset
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        model = build_model(dataset.features, dataset.classes, settings.seed)
        # With views, every method writes the update to .grad without a further copy.
        self.model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        self.handle: Handle | None = None
        if method.scheme is not None:
            # The demo shows what a step costs after the first ones, in which more would be sent.
            self.handle = attach(self.model, method.scheme, frontload=False, **method.options)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=_LEARNING_RATE)
        self.order = batch_order(
            len(dataset.y_train), BATCH_PER_RANK * self.world, settings.steps, settings.seed
        )[:, self.rank :: self.world]
        interface = os.environ["GLOO_SOCKET_IFNAME"] if settings.counts_wire else None
        self.meter = Meter(self.handle, interface)

    def step(self, index: int) -> float:
        """Take one optimiser step and return this rank's loss."""
        samples = self.order[index]
        self.optimizer.param_groups[0]["lr"] = _LEARNING_RATE * (1 - index / self.settings.steps)
        self.optimizer.zero_grad()
        outputs = self.model(self.dataset.x_train[samples])
        loss = nn.functional.cross_entropy(outputs, self.dataset.y_train[samples])
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def run(self, report: Callable[[int, float], None]) -> dict[str, Any]:
        """Train, and return the median of each quantity of a step, by name."""
        seen: list[dict[str, float]] = []
        for index in range(self.settings.steps):
            before, start = self.meter.read(), time.perf_counter()
            loss = self.step(index)
            seconds, after = time.perf_counter() - start, self.meter.read()
            report(index, loss)
            if index >= WARM_UP_STEPS:
                seen.append({"step_s": seconds, **{key: after[key] - before[key] for key in after}})
        return {key: statistics.median(step[key] for step in seen) for key in seen[0]}

    def compute_seconds(self) -> float:
        """Return the median time of the same step without the exchange, on all ranks at once.

        Afterwards the ranks' models differ and must not be used.
        """
        dist.barrier()
        seconds = []
        with self.model.no_sync():
            for index in range(COMPUTE_STEPS):
                start = time.perf_counter()
                self.step(index % self.settings.steps)
                seconds.append(time.perf_counter() - start)
        return statistics.median(seconds)

    @torch.no_grad()
    def accuracy(self) -> float:
        """Return the share of the held-out samples that the model classifies correctly."""
        chunks = zip(self.dataset.x_test.split(1000), self.dataset.y_test.split(1000), strict=True)
        right = sum(int((self.model.module(x).argmax(1) == y).sum()) for x, y in chunks)
        return right / len(self.dataset.y_test)

    def fingerprint(self) -> str:
        """Return a digest of all parameters, which must be the same on all ranks."""
        digest = hashlib.sha256()
        for parameter in self.model.parameters():
            digest.update(parameter.detach().numpy().tobytes())
        return digest.hexdigest()

    def parameters(self) -> int:
        """Return the number of the model's parameters."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def payload_bytes(self) -> int:
        """Return the least bytes that DDP's own dense all-reduce hands to the network in a step.

        DDP does not count bytes. A ring, which is optimal for dense vectors, sends 2n(P - 1)/P
        values.
        """
        return round(4 * 2 * self.parameters() * (self.world - 1) / self.world)


def _run_method(
    method: Method, settings: DemoSettings, dataset: Dataset, report: Callable[..., None]
) -> None:
    training = Training(method, settings, dataset)
    quiet = training.rank != 0

    def on_step(index: int, loss: float) -> None:
        # Report rarely, because drawing the progress takes time from the ranks.
        if not quiet and (index % 10 == 0 or index + 1 == settings.steps):
            report("step", method=method.name, step=index + 1, loss=loss)

    result = training.run(on_step)
    result.setdefault("payload_bytes", training.payload_bytes())
    result |= {
        "accuracy": training.accuracy(),
        "fingerprint": training.fingerprint(),
        "parameters": training.parameters(),
    }
    result["compute_s"] = training.compute_seconds()
    if training.handle is not None:
        training.handle.close()
    report("result", method=method.name, **result)
    dist.barrier()


def _reporter() -> Callable[..., None]:
    """Reserve standard output for the reports; all other prints go to standard error."""
    stream: TextIO = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def report(event: str, **fields: Any) -> None:
        print(json.dumps({"event": event, **fields}), file=stream, flush=True)

    return report


def main() -> None:
    """Run all methods of the settings in the first argument."""
    settings = DemoSettings.from_json(sys.argv[1])
    report = _reporter()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    dataset = load(settings.data)
    for method in methods(settings):
        _run_method(method, settings, dataset, report)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
