"""Training on a simulated cluster: one run of one method, and its measurements."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from math import isfinite
from statistics import mean
from typing import Any

import torch
from models import small_cnn
from torch import Tensor, nn

import sparcel
from sparcel.analysis import xi
from sparcel.comm import Communicator
from sparcel.demo.data import Dataset, batch_order, load
from sparcel.schemes import Meter, Request, Scheme
from sparcel.schemes.density import count_for
from sparcel.training import stays_dense

MOMENTUM = 0.9


@dataclass(frozen=True)
class Plan:
    """Settings that all methods share.

    ``batch`` is the batch of all ranks together. The learning rate rises to ``lr`` in ``ramp``
    steps and falls linearly to 0. The first ``warmup_epochs`` are uncompressed.
    """

    data: str
    ranks: int = 8
    batch: int = 128
    epochs: int = 3
    warmup_epochs: int = 1
    lr: float = 0.1
    ramp: int = 100
    density: float = 0.01
    xi_every: int = 40

    def lr_at(self, step: int, steps: int) -> float:
        return self.lr * min((step + 1) / self.ramp, (steps - step) / max(1, steps - self.ramp))

    def steps_of(self, epochs: int, samples: int) -> int:
        return epochs * (samples // self.batch)


@dataclass(frozen=True)
class Method:
    """A scheme with settings; ``sums_k`` tells whether its result should have k coordinates."""

    label: str
    scheme: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    sums_k: bool = False

    def make(self, density: float, warmup_steps: int) -> Scheme:
        """Return the scheme, uncompressed for the first ``warmup_steps`` steps."""
        if self.scheme in ("dense", "torus2d"):
            return sparcel.scheme(self.scheme, **self.settings)
        warmup = {"warmup": [1.0], "warmup_steps": warmup_steps} if warmup_steps else {}
        return sparcel.scheme(self.scheme, density=density, **warmup, **self.settings)

    @property
    def corrects_momentum(self) -> bool:
        return self.scheme == "dgc"

    @property
    def has_xi(self) -> bool:
        """Whether each rank selects from its own memory + gradient, as ξ assumes."""
        return self.scheme not in ("dense", "torus2d", "hitopk", "dgc")


class Tally:
    """Collects the selections and bytes of all ranks in the compressed steps."""

    def __init__(self) -> None:
        self.asked_ratios: list[float] = []
        self.result_ratios: list[float] = []
        self.result_densities: list[float] = []
        self.volumes: list[int] = []
        self.xis: list[float] = []

    def add(self, meters: list[Meter], volume: int) -> None:
        self.volumes.append(volume)
        for meter in meters:
            self.result_densities.append(meter.reduced / meter.coordinates)
            if 0 < meter.asked < meter.coordinates:
                self.asked_ratios.append(meter.selected / meter.asked)
                self.result_ratios.append(meter.reduced / meter.asked)

    def summary(self, sums_k: bool) -> dict[str, Any]:
        return {
            "result_density": mean(self.result_densities),
            "selected": deviation(self.asked_ratios),
            "result": deviation(self.result_ratios) if sums_k else None,
            # xi is NaN if training failed, and JSON has no NaN.
            "xi_mean": mean(self.xis) if self.xis and all(map(isfinite, self.xis)) else None,
            "xi_largest": max(self.xis, default=None),
            "bytes_a_step": mean(self.volumes),
        }


def deviation(ratios: list[float]) -> dict[str, float] | None:
    """Return the deviation of counts from the counts asked for, as shares of the latter."""
    if not ratios:
        return None
    return {
        "over_asked": mean(ratios),
        "deviation_mean": mean(abs(ratio - 1) for ratio in ratios),
        "deviation_largest": max(abs(ratio - 1) for ratio in ratios),
    }


def train(plan: Plan, method: Method, seed: int) -> dict[str, Any]:
    """Train once and return the row of results."""
    torch.set_num_threads(1)
    start, data = time.perf_counter(), dataset(plan.data)
    samples = len(data.y_train)
    warmup_steps, steps = (plan.steps_of(e, samples) for e in (plan.warmup_epochs, plan.epochs))
    torch.manual_seed(seed)
    trainer = Trainer(plan, method, warmup_steps)
    for step, batch in enumerate(batch_order(samples, plan.batch, steps, seed)):
        trainer.step(data.x_train[batch], data.y_train[batch], step, steps)
    return {
        "method": method.label,
        "scheme": method.scheme,
        "settings": dict(method.settings),
        "seed": seed,
        "steps": steps,
        "accuracy": trainer.accuracy(data.x_test, data.y_test),
        **trainer.tally.summary(method.sums_k),
        "seconds": round(time.perf_counter() - start, 1),
    }


@cache
def dataset(path: str) -> Dataset:
    return load(path)


class Trainer:
    """One model for all ranks; it checks that all ranks get the same updates.

    The tensors that `sparcel.attach` leaves dense stay dense here too.
    """

    def __init__(self, plan: Plan, method: Method, warmup_steps: int) -> None:
        self.plan, self.method, self.model = plan, method, small_cnn()
        self.warmup_steps = warmup_steps
        named = list(self.model.named_parameters())
        self.small = [parameter for name, parameter in named if stays_dense(name, parameter)]
        self.large = [parameter for name, parameter in named if not stays_dense(name, parameter)]
        self.schemes = [method.make(plan.density, warmup_steps) for _ in range(plan.ranks)]
        self.dense = [sparcel.scheme("dense") for _ in range(plan.ranks)]
        # If the scheme corrects momentum, the optimiser has none for the large tensors.
        of_large = 0.0 if method.corrects_momentum else MOMENTUM
        groups: list[dict[str, Any]] = [
            {"params": self.small, "momentum": MOMENTUM},
            {"params": self.large, "momentum": of_large},
        ]
        self.optimizer = torch.optim.SGD(groups, lr=plan.lr)
        self.tally = Tally()

    def step(self, x: Tensor, y: Tensor, step: int, steps: int) -> None:
        """Compute the gradient of every rank's part of the batch, and exchange them."""
        parts = zip(x.chunk(self.plan.ranks), y.chunk(self.plan.ranks), strict=True)
        gradients = [self._gradients(*part) for part in parts]
        compressed = step >= self.warmup_steps
        if compressed and self.method.has_xi and (step + 1) % self.plan.xi_every == 0:
            self.tally.xis.append(self._xi([large for _, large in gradients]))
        meters = [Meter() for _ in gradients]
        report = sparcel.simulate(self.plan.ranks, partial(self._exchange, gradients, meters))
        volume = max(max(t.bytes_sent, t.bytes_received) for t in report.traffic)
        if compressed:
            self.tally.add(meters, volume)
        for updates in report.results[1:]:
            assert all(map(same_bits, updates, report.results[0])), "ranks parted"
        for parameters, update in zip((self.small, self.large), report.results[0], strict=True):
            unflatten(update, parameters)
        for group in self.optimizer.param_groups:
            group["lr"] = self.plan.lr_at(step, steps)
        self.optimizer.step()

    def accuracy(self, x: Tensor, y: Tensor) -> float:
        with torch.no_grad():
            predicted = torch.cat([self.model(part).argmax(1) for part in x.split(1000)])
        return float((predicted == y).double().mean())

    def _gradients(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return one rank's gradients of the small and of the large tensors, ``[size]`` each."""
        loss = nn.functional.cross_entropy(self.model(x), y)
        gradients = torch.autograd.grad(loss, [*self.small, *self.large])
        flat = [gradient.reshape(-1) for gradient in gradients]
        return torch.cat(flat[: len(self.small)]), torch.cat(flat[len(self.small) :])

    def _exchange(
        self, gradients: list[tuple[Tensor, Tensor]], meters: list[Meter], comm: Communicator
    ) -> tuple[Tensor, Tensor]:
        small, large = gradients[comm.rank]
        request = Request(meter=meters[comm.rank])
        update = self.schemes[comm.rank].step(large, comm, request=request)
        return self.dense[comm.rank].step(small, comm), update

    def _xi(self, gradients: list[Tensor]) -> float:
        memories = [scheme.memory for scheme in self.schemes]
        accumulated = [
            gradient if memory is None else memory + gradient
            for memory, gradient in zip(memories, gradients, strict=True)
        ]
        k = count_for(self.plan.density, gradients[0].numel())
        return xi(accumulated, gradients, k)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Compare two float32 vectors, NaN included."""
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def unflatten(vector: Tensor, parameters: list[nn.Parameter]) -> None:
    """Set the parameters' gradients to the parts of a vector."""
    sizes = [parameter.numel() for parameter in parameters]
    for parameter, part in zip(parameters, vector.split(sizes), strict=True):
        parameter.grad = part.view(parameter.shape)
