"""Training on a simulated cluster: one run of one method on one task, and its measurements.

Every rank computes the gradients of its part of the batch and averages them as `sparcel.attach`
does, on a GPU if there is one. The selections, the exchanges and the bytes are real, the network is
not. The ranks share one model, because their updates are equal; that is checked in every step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

import sparcel
from benchmarks.record import rule_of
from benchmarks.training.tasks import TASKS, Split, Task, batches, loss_of
from sparcel.core.comm import Communicator
from sparcel.core.rates import Rates
from sparcel.core.selectors import Selector
from sparcel.core.training import Averager, stays_dense

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

LOOKS = 16
"""How many times a training looks at what ranks keep back, evenly from a fifth of its steps on."""


@dataclass(frozen=True)
class Method:
    """A scheme with settings, under a label; ``ahead`` and ``frontload`` as in `sparcel.attach`."""

    label: str
    scheme: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    ahead: bool = True
    frontload: bool = True

    def make(self) -> sparcel.schemes.Scheme:
        return sparcel.scheme(self.scheme, **self.settings)

    def told(self) -> dict[str, Any]:
        """Return what a row tells of the scheme."""
        settings = {
            name: repr(value) if isinstance(value, Selector) else value
            for name, value in self.settings.items()
        }
        rule = rule_of(self.scheme, self.settings)
        return {"scheme": self.scheme, "settings": settings, "rule": rule}


def train(
    data: Path,
    task: str,
    method: Method,
    seed: int,
    ranks: int,
    batch: int,
    lr: float,
    steps: int | None = None,
    rates: Rates | None = None,
) -> dict[str, Any]:
    """Train once and return the row of results.

    By default on as many samples with any batch, and with `sparcel.attach`'s default rates.
    """
    usual = TASKS[task]
    steps = steps or usual.steps * usual.batch // batch
    run = Run(data, replace(usual, lr=lr, batch=batch, steps=steps), method, seed, rates)
    row = trained(run, ranks)
    return {
        "method": method.label,
        "ahead": method.ahead,
        "frontload": method.frontload,
        **row,
        **run.kept(),
        "dense_steps": run.dense_steps,
        "clipped_steps": run.clipped_steps,
    }


def trained(run: Run, ranks: int) -> dict[str, Any]:
    """Train on ranks, and return what a row tells of it."""
    report, task = sparcel.simulate(ranks, run.rank), run.task
    volumes = [max(sent.bytes_sent, sent.bytes_received) for sent in report.traffic]
    return {
        **run.method.told(),
        "batch": task.batch,
        "steps": task.steps,
        "lr": task.lr,
        **evaluate(run.model, run.split),
        "train_losses": run.smoothed(),
        "density_before": report.results[0].density_before,
        "density_after": report.results[0].density_after,
        "bytes_a_step": max(volumes) / task.steps,
    }


class Run:
    """One training; `rank` is what each rank does."""

    def __init__(
        self, data: Path, task: Task, method: Method, seed: int, rates: Rates | None = None
    ) -> None:
        torch.set_num_threads(1)
        self.task, self.method, self.seed, self.rates = task, method, seed, rates
        read = task.read(data / task.folder, seed)
        torch.manual_seed(seed)
        self.model = task.model(read).to(DEVICE)
        self.split = Split(*(part.to(DEVICE) for part in vars(read).values()))
        if task.after is not None:
            self.model.load_state_dict(trained_before(data, task.after, seed))
        self.named = dict(self.model.named_parameters())
        self.scheme = method.make()
        adamw = task.adamw is not None
        if adamw and self.scheme.momentum:  # there is no correction of Adam's momentum
            self.scheme = replace(self.scheme, momentum=0.0)
        corrected = [name for name, p in self.named.items() if not stays_dense(name, p)]
        self.optimizers = task.optimizers(self.model, corrected if self.scheme.momentum else ())
        self.losses = [0.0] * task.steps
        self.dense_steps = self.clipped_steps = 0
        self._updates: dict[str, Tensor] = {}
        self._energies = dict.fromkeys(("kept", "computed", "owed", "summed"), 0.0)
        self._ages: list[float] = []
        self._summed = self._owed = torch.zeros((), device=DEVICE)
        self._ranks = 1

    def rank(self, comm: Communicator) -> sparcel.training.Stats:
        method = self.method
        averager = self.averager(comm)
        ahead = averager.ahead(self.named) if method.ahead else None
        if ahead is not None:
            for optimizer in self.optimizers:
                ahead.follow(optimizer)
        self._ranks = comm.size
        for step, part in enumerate(self.parts(comm)):
            gradients, loss = self.gradients(part, {} if ahead is None else ahead.moved())
            self.losses[step] += loss / comm.size
            self.observe(comm, step, gradients, averager)
            looks = step in self.looks
            if looks:
                self._look_at_gradients(gradients, averager)
            updates = averager.average(gradients)
            if looks:
                self._look_at_memory(averager)
            if comm.rank == 0:
                self._updates = updates
                self.dense_steps += averager.handle.stats().last.density_before > 0.99
            comm.gather_numbers(0)  # rank 0's updates are there
            for name, update in updates.items():
                assert same_bits(update, self._updates[name]), "ranks parted"
            comm.gather_numbers(0)  # all have compared
            if comm.rank == 0:
                if looks:
                    self._end_look()
                self.apply(updates, step)
            comm.gather_numbers(0)  # the model has changed
        return averager.handle.stats()

    @property
    def looks(self) -> range:
        """The steps in which the training looks at what ranks keep back."""
        steps = self.task.steps
        return range(steps // 5, steps, max(1, 4 * steps // (5 * LOOKS)))

    def kept(self) -> dict[str, float]:
        """Return energies, as shares, in the mean over the steps of `looks`.

        ``kept`` is what ranks keep back, of their gradients; ``owed`` what their sum is, of the sum
        of gradients; ``alike`` the sum of gradients, of what it would be if ranks had the same.
        ``age`` is how many steps memory waits, `Handle.memory_age`.
        """
        found, ranks = self._energies, self._ranks
        if not found["computed"]:
            return {}
        return {
            "kept": found["kept"] / found["computed"],
            "owed": found["owed"] / found["summed"],
            "alike": found["summed"] / (ranks * found["computed"]),
            "age": mean(self._ages),
        }

    def _look_at_gradients(self, gradients: Mapping[str, Tensor], averager: Averager) -> None:
        large = torch.cat([gradients[name].flatten() for name in sorted(averager.handle.eligible)])
        self._energies["computed"] += float(large.square().sum())
        self._summed = self._summed + large

    def _look_at_memory(self, averager: Averager) -> None:
        of, names = averager._session.residuals.of, sorted(averager.handle.eligible)
        none = torch.zeros(1, device=DEVICE)
        memory = torch.cat([of(name).get("memory", none).flatten() for name in names])
        self._energies["kept"] += float(memory.square().sum())
        self._ages.append(averager.handle.memory_age())
        self._owed = self._owed + memory

    def _end_look(self) -> None:
        """Add the energies of sums over the ranks, and begin new sums."""
        self._energies["summed"] += float(self._summed.square().sum())
        self._energies["owed"] += float(self._owed.square().sum())
        self._summed = self._owed = torch.zeros((), device=DEVICE)

    def parts(self, comm: Communicator) -> Iterator[Tensor]:
        """Yield the samples of each step that are a rank's."""
        task = self.task
        for batch in batches(len(self.split.y_train), task.batch, task.steps, self.seed):
            yield batch.chunk(comm.size)[comm.rank]

    def gradients(
        self, part: Tensor, moved: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], float]:
        """Return the gradients and the loss of samples, where some parameters have moved."""
        model = partial(functional_call, self.model, dict(moved))
        loss = loss_of(model, self.split.x_train[part], self.split.y_train[part])
        found = torch.autograd.grad(loss, list(self.named.values()))
        return dict(zip(self.named, found, strict=True)), loss.item()

    def alone(self, model: nn.Module) -> None:
        """Train in one process with whole batches; ``model`` is the run's, or what wraps it."""
        samples, task = len(self.split.y_train), self.task
        for step, batch in enumerate(batches(samples, task.batch, task.steps, self.seed)):
            model.zero_grad()
            loss = loss_of(model, self.split.x_train[batch], self.split.y_train[batch])
            loss.backward()
            self.losses[step] = loss.item()
            self.update(step)

    def averager(self, comm: Communicator) -> Averager:
        """Return what averages a rank's gradients, as `sparcel.attach` makes it."""
        return Averager(
            self.named, self.scheme, group=comm, frontload=self.method.frontload, rates=self.rates
        )

    def observe(
        self, comm: Communicator, step: int, gradients: Mapping[str, Tensor], averager: Averager
    ) -> None:
        """Look at a rank's gradients before they are averaged; for subclasses."""

    def apply(self, updates: Mapping[str, Tensor], step: int) -> None:
        for name, parameter in self.named.items():
            parameter.grad = updates[name]
        self.update(step)

    def update(self, step: int) -> None:
        """Let the optimiser change the model by its ``.grad``, which are the averages."""
        self.clipped_steps += self.task.update(self.model, self.optimizers, step)

    def smoothed(self, points: int = 50) -> list[float | None]:
        """Return the training loss as the means of equal parts of the training; None for NaN."""
        parts = torch.tensor(self.losses).tensor_split(points)
        means = [float(part.mean()) for part in parts]
        return [round(one, 4) if math.isfinite(one) else None for one in means]


@cache
def trained_before(data: Path, task: str, seed: int) -> Mapping[str, Any]:
    """Return the state of a model that was trained densely in one process."""
    run = Run(data, TASKS[task], Method("dense", "dense"), seed)
    run.alone(run.model)
    return run.model.state_dict()


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Compare two float32 tensors, NaN included."""
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def evaluate(model: nn.Module, split: Split) -> dict[str, Any]:
    """Return the loss (None if it is not finite) and the accuracy on what is held out.

    The model is in evaluation mode afterwards.
    """
    loss, right, count = 0.0, 0, split.y_test.numel()
    model.eval()
    with torch.no_grad():
        for x, y in zip(split.x_test.split(500), split.y_test.split(500), strict=True):
            logits, targets = model(x).flatten(0, -2), y.flatten()
            loss += float(nn.functional.cross_entropy(logits, targets, reduction="sum"))
            right += int((logits.argmax(1) == targets).sum())
    return {"loss": loss / count if math.isfinite(loss) else None, "accuracy": right / count}
