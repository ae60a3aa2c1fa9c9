"""Why sparse training ends worse: one switch at a time, and what each protection is worth.

    python -m benchmarks.training.causes DATA [--seeds 2] [--variants "k" "k, ahead"]

``DATA`` holds the folder ``fashion-mnist``. Eight ranks train a small CNN for two epochs at 1 %, in
one process: their memories are the rows of a matrix, so that a rule can be changed in a line. What
the schemes themselves do is measured by ``convergence.py``. Runs that the record has are not
repeated.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean

import torch
from torch import Tensor, nn

from benchmarks.pages.tables import table
from benchmarks.record import Row, among, grid, run_all, runs_told
from benchmarks.training.tasks import MOMENTUM, TASKS, batches, loss_of
from sparcel.core.schemes import front_loaded
from sparcel.core.schemes.density import count_for
from sparcel.core.selectors import topk
from sparcel.core.training import stays_dense

RANKS = 8


@dataclass(frozen=True)
class Rule:
    """What happens between gradients and update.

    Attributes
    ----------
    result
        ``"dense"``; ``"union"``: all that some rank selects is applied (topk, sparcml); ``"k"``:
        the k largest sums of that (gtopk, oktopk); ``"leader"``: what one rank selects (scalecom);
        ``"estimate"``: EF21 (Richtarik et al. 2021), where the memory is an estimate of a rank's
        gradient, selections correct it, and the mean of all estimates is applied.
    per
        From what a rank selects: ``"vector"``, ``"layer"``, or runs of that many coordinates.
    threshold
        Instead of a density, for ``"union"``: all magnitudes from here on are selected (Sahu et al.
        2021).
    density, front, dense_first, dense_last
        Share that is selected; whether `front_loaded`; how many steps are dense at either end.
    delay
        How many steps later a dense gradient is applied.
    memory, decay, beta
        Whether there is one; what it is multiplied by in each step; its low-pass filter.
    correction, masked
        Momentum before the memory instead of after it; whether what was sent loses its velocity.
    cap
        The largest release, in mean magnitudes of the ranks' gradients; the rest waits on.
    momentum
        The optimiser's.
    ahead
        Gradients are computed where ``ahead·lr·memory`` is applied.
    owners
        What the owner of a region does, for ``"k"``: nothing, ``"keep"`` the sums that do not win,
        or ``"add"`` as well all that it has of its region, while it selects k others to send.
    """

    result: str = "k"
    per: str = "vector"
    threshold: float | None = None
    density: float = 0.01
    front: bool = False
    dense_first: int = 0
    dense_last: int = 0
    delay: int = 0
    memory: bool = True
    decay: float = 1.0
    beta: float = 1.0
    correction: float = 0.0
    masked: bool = True
    cap: float | None = None
    momentum: float = MOMENTUM
    ahead: float = 0.0
    owners: str = ""


_DENSE, _K = Rule("dense"), Rule()
_TOPK, _SPARCML, _SCALECOM = Rule("union"), Rule("union", "512"), Rule("leader", "100")

VARIANTS: dict[str, Rule] = {
    "dense": _DENSE,
    "dense, 4 steps late": replace(_DENSE, delay=4),
    "dense, 16 steps late": replace(_DENSE, delay=16),
    "dense, 77 steps late": replace(_DENSE, delay=77),
    "dense, without momentum": replace(_DENSE, momentum=0.0),
    "topk": _TOPK,
    "sparcml": _SPARCML,
    "k": _K,
    "scalecom": _SCALECOM,
    "k, without memory": replace(_K, memory=False),
    "k, memory decays by 0.95": replace(_K, decay=0.95),
    "k, momentum before memory": replace(_K, correction=MOMENTUM, masked=False),
    "k, momentum before memory, masked": replace(_K, correction=MOMENTUM),
    "k, without momentum": replace(_K, momentum=0.0),
    "k, releases capped at 8": replace(_K, cap=8.0),
    "k, by layer": replace(_K, per="layer"),
    "k, by bucket of 512": replace(_K, per="512"),
    "k, by chunk of 100": replace(_K, per="100"),
    "scalecom, over the vector": replace(_SCALECOM, per="vector"),
    "scalecom, β=0.1": replace(_SCALECOM, beta=0.1),
    "EF21": Rule("estimate"),
    "EF21, momentum before memory": Rule("estimate", correction=MOMENTUM),
    "k, first 5 % dense": replace(_K, dense_first=94),
    "k, last 25 % dense": replace(_K, dense_last=468),
    "k, density 3 %": replace(_K, density=0.03),
    "k, front-loaded": replace(_K, front=True),
    "topk, ahead": replace(_TOPK, ahead=1.0),
    "sparcml, ahead": replace(_SPARCML, ahead=1.0),
    "k, ahead": replace(_K, ahead=1.0),
    "k, ahead by 3": replace(_K, ahead=3.0),
    "k, ahead by 10": replace(_K, ahead=10.0),
    "scalecom, ahead": replace(_SCALECOM, ahead=1.0),
    "scalecom β=0.1, ahead": replace(_SCALECOM, beta=0.1, ahead=1.0),
    "scalecom β=0.1, ahead by 10": replace(_SCALECOM, beta=0.1, ahead=10.0),
    "topk, ahead and front-loaded": replace(_TOPK, ahead=1.0, front=True),
    "sparcml, ahead and front-loaded": replace(_SPARCML, ahead=1.0, front=True),
    "k, ahead and front-loaded": replace(_K, ahead=1.0, front=True),
    "scalecom, ahead and front-loaded": replace(_SCALECOM, ahead=1.0, front=True),
    "k, ahead, density 2.4 %": replace(_K, ahead=1.0, density=0.024),
    "topk, ahead, threshold 0.1": replace(_TOPK, ahead=1.0, threshold=0.1),
    "topk, ahead, threshold 0.05": replace(_TOPK, ahead=1.0, threshold=0.05),
    "topk, ahead, density 2.4 %": replace(_TOPK, ahead=1.0, density=0.024),
    "topk, both": replace(_TOPK, ahead=1.9, front=True),
    "sparcml, both": replace(_SPARCML, ahead=1.9, front=True),
    "k, both": replace(_K, ahead=1.9, front=True),
    "k, both, owners keep": replace(_K, ahead=1.9, front=True, owners="keep"),
    "k, both, owners add": replace(_K, ahead=1.9, front=True, owners="add"),
    "scalecom, both": replace(_SCALECOM, ahead=1.9, front=True),
    "scalecom, over the vector, both": replace(_SCALECOM, per="vector", ahead=1.9, front=True),
}
"""``both``: ahead by 1 + momentum, and front-loaded, which is what `sparcel.attach` does. Of its
schemes, `oktopk` is here ``"owners add"``, `sparcml` is ``"topk"``, and `scalecom` selects over the
vector; ``"sparcml"`` and ``"scalecom"`` select as their papers do."""


class Exchange:
    """The memories of all ranks, a row each, and what a step makes of them."""

    def __init__(self, rule: Rule, sizes: list[int], steps: int) -> None:
        self.rule, self.sizes, self.steps = rule, sizes, steps
        size = sum(sizes)
        self.memory, self.velocity = torch.zeros(RANKS, size), torch.zeros(RANKS, size)
        self.owned = torch.arange(size) * RANKS // size == torch.arange(RANKS)[:, None]
        self.late: deque[Tensor] = deque()
        self.step, self.sent = 0, 0.0

    def update(self, gradients: Tensor) -> Tensor:
        """Return the update of gradients ``[ranks, size]``."""
        rule, step = self.rule, self.step
        self.step += 1
        if rule.result == "dense":
            self.sent += 1
            self.late.append(gradients.mean(0))
            return torch.zeros_like(self.late[0]) if step < rule.delay else self.late.popleft()
        entering = gradients
        if rule.correction:
            entering = self.velocity.mul_(rule.correction).add_(gradients)
        if rule.result == "estimate":
            return self._estimate(entering)
        before = self.memory
        waiting = entering + rule.decay * before if rule.memory else entering.clone()
        selected, chosen = self._applied(waiting)
        update = (waiting * chosen).mean(0)
        kept = waiting.masked_fill(chosen, 0)
        if rule.owners:
            lost = (kept * selected).sum(0)
            kept = kept.masked_fill(selected, 0) + lost * self.owned
        if rule.cap is not None:
            share = (rule.cap * entering.abs().mean(0) / update.abs().clamp_min(1e-20)).clamp_max(1)
            kept += waiting * chosen * (1 - share)
            update = update * share
        self.memory = kept if rule.beta == 1 else torch.lerp(before, kept, rule.beta)
        if rule.correction and rule.masked:
            self.velocity.masked_fill_(chosen, 0)
        return update

    def _estimate(self, entering: Tensor) -> Tensor:
        """Return the mean of the estimates after each rank has corrected its own."""
        density = self._density()
        self.sent += density
        wrong = entering - self.memory
        chosen = torch.stack([self._selected(rank, density) for rank in wrong])
        self.memory = self.memory + wrong * chosen
        return self.memory.mean(0)

    def _applied(self, waiting: Tensor) -> tuple[Tensor, Tensor]:
        """Return which coordinates of each rank are summed, and applied, ``[ranks, size]`` each."""
        if self.rule.threshold is not None:
            over = waiting.abs() >= self.rule.threshold
            self.sent += float(over.double().mean())
            return over, over
        density = self._density()
        self.sent += density
        if density == 1:
            everything = torch.ones_like(waiting, dtype=torch.bool)
            return everything, everything
        if self.rule.result == "leader":
            leader = waiting[(self.step - 1) % RANKS]
            leading = self._selected(leader, density).expand(RANKS, -1)
            return leading, leading
        adds = self.rule.owners == "add"
        sendable = waiting.masked_fill(self.owned, 0) if adds else waiting
        selected = torch.stack([self._selected(rank, density) for rank in sendable])
        if adds:
            selected |= self.owned
        if self.rule.result == "union":
            return selected, selected
        sums = (waiting * selected).sum(0)
        return selected, selected & _largest(sums, count_for(density, len(sums)))

    def _density(self) -> float:
        rule, step = self.rule, self.step - 1
        if step < rule.dense_first or step >= self.steps - rule.dense_last:
            return 1.0
        return front_loaded(rule.density, step) if rule.front else rule.density

    def _selected(self, vector: Tensor, density: float) -> Tensor:
        if self.rule.per == "vector":
            return _largest(vector, count_for(density, len(vector)))
        if self.rule.per == "layer":
            parts = vector.split(self.sizes)
            return torch.cat([_largest(one, count_for(density, len(one))) for one in parts])
        width = int(self.rule.per)
        rows = nn.functional.pad(vector.abs(), (0, -len(vector) % width)).view(-1, width)
        highest = rows.topk(max(1, round(density * width)), 1)
        chosen = torch.zeros_like(rows, dtype=torch.bool).scatter_(1, highest.indices, True)
        return chosen.flatten()[: len(vector)] & (vector != 0)


def _largest(vector: Tensor, k: int) -> Tensor:
    chosen = torch.zeros_like(vector, dtype=torch.bool)
    indices = topk(vector, k).indices
    assert indices is not None, "selections are sparse"
    chosen[indices.long()] = True
    return chosen


def tiny_cnn() -> nn.Sequential:
    """Return a CNN of 26,826 parameters for 28×28 images."""
    return nn.Sequential(
        *(nn.Unflatten(1, (1, 28, 28)), nn.Conv2d(1, 8, 5, 2, 2), nn.ReLU()),
        *(nn.Conv2d(8, 16, 3, 2, 1), nn.ReLU(), nn.Flatten()),
        *(nn.Linear(16 * 49, 32), nn.ReLU(), nn.Linear(32, 10)),
    )


def train(data: Path, variant: str, seed: int) -> Row:
    """Train once with a variant and return its row."""
    torch.set_num_threads(1)
    rule, task = VARIANTS[variant], TASKS["clothes"]
    split = task.read(data / task.folder, seed)
    samples = len(split.y_train)
    task = replace(task, steps=2 * (samples // task.batch))
    torch.manual_seed(seed)
    model = tiny_cnn()
    named = dict(model.named_parameters())
    large = [p for name, p in named.items() if not stays_dense(name, p)]
    small = [p for name, p in named.items() if stays_dense(name, p)]
    groups = [
        {"params": small},
        {"params": large, "momentum": 0.0 if rule.correction else rule.momentum},
    ]
    optimizer = torch.optim.SGD(groups, lr=task.lr, momentum=rule.momentum)
    exchange = Exchange(rule, [p.numel() for p in large], task.steps)
    norms, waits = [], []
    for step, batch in enumerate(batches(samples, task.batch, task.steps, seed)):
        lr = task.lr_at(step)
        of_small, of_large = [], []
        for rank, part in enumerate(batch.chunk(RANKS)):
            with moved(large, exchange.memory[rank] * (rule.ahead * lr)):
                loss = loss_of(model, split.x_train[part], split.y_train[part])
                found = torch.autograd.grad(loss, small + large)
            of_small.append(flat(found[: len(small)]))
            of_large.append(flat(found[len(small) :]))
        update = exchange.update(torch.stack(of_large))
        assign(large, update)
        assign(small, torch.stack(of_small).mean(0))
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        norms.append(float(update.norm()))
        taken = float(update.abs().sum())
        waits.append(float(exchange.memory.mean(0).abs().sum()) / taken if taken else 0.0)
    with torch.no_grad():
        logits = model(split.x_test)
        hidden = model[:-1](split.x_test)
    loss = float(nn.functional.cross_entropy(logits, split.y_test))
    return {
        "rule": asdict(rule),
        "steps": task.steps,
        "accuracy": float((logits.argmax(1) == split.y_test).double().mean()),
        "loss": loss if math.isfinite(loss) else None,
        "dead_units": float((hidden.amax(0) <= 0).double().mean()),
        "update_norm_first_tenth": _finite(norms[: len(norms) // 10]),
        "update_norm": _finite(norms),
        "wait_steps": _finite(waits[len(waits) // 2 :]),
        "mean_density": exchange.sent / task.steps,
    }


@contextmanager
def moved(parameters: list[nn.Parameter], by: Tensor) -> Iterator[None]:
    """Subtract a vector from parameters inside the block."""
    saved = [parameter.data for parameter in parameters]
    for parameter, part in zip(parameters, by.split([p.numel() for p in parameters]), strict=True):
        parameter.data = parameter.data - part.view(parameter.shape)
    yield
    for parameter, data in zip(parameters, saved, strict=True):
        parameter.data = data


def flat(tensors: tuple[Tensor, ...]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def assign(parameters: list[nn.Parameter], update: Tensor) -> None:
    parts = update.split([p.numel() for p in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.grad = part.view(parameter.shape)


def _finite(values: list[float]) -> float | None:
    average = mean(values)
    return average if math.isfinite(average) else None


SHOWN = {
    "dense": "dense",
    "dense, 4 steps late": "dense, applied 4 steps late",
    "dense, 77 steps late": "dense, applied 77 steps late",
    "k, without memory": "1 %, without memory",
    "k, memory decays by 0.95": "1 %, memory decays by 0.95",
    "k": "1 %, with memory",
    "k, density 3 %": "3 %, with memory",
    "k, last 25 % dense": "1 %, the last quarter dense",
    "k, ahead": "1 %, one step ahead",
    "k, ahead by 10": "1 %, ten steps ahead",
    "k, both": "1 %, ahead and front-loaded",
    "k, both, owners keep": "the same, owners keep what does not win",
    "scalecom": "one coordinate of each 100, by one rank",
    "scalecom, ahead": "the same, one step ahead",
    "EF21": "1 %, EF21's estimates for a memory",
}
"""The variants that why.md shows, with its words for them."""


def causes_table(rows: list[Row]) -> Iterator[str]:
    """Return the lines of a table of what each variant ended at, of one seed."""
    found = {row["variant"]: row for row in rows}
    columns = "variant", "accuracy", "loss", "dead units", "wait", "sent"
    return table(columns, ([name, *_cause(found[key])] for key, name in SHOWN.items()))


def _cause(row: Row) -> Iterator[str]:
    yield f"{row['accuracy']:.1%}"
    yield "diverged" if row["loss"] is None else f"{row['loss']:.3f}"
    yield f"{row['dead_units']:.0%}"
    yield "" if row["wait_steps"] is None else f"{row['wait_steps']:.0f}"
    yield f"{row['mean_density']:.1%}"


def main() -> None:
    told = runs_told(__doc__, "causes", seeds=2, variants=among(VARIANTS))
    run_all(told, train, grid(seed=range(told.seeds), variant=told.variants))


if __name__ == "__main__":
    main()
