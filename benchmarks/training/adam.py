"""Ways to let Adam lose less where a coordinate arrives with the gradients of many steps at once.

    python -m benchmarks.training.adam DATA --runs oktopk,0.1,packed:4 topk,0.01,raw

trains with AdamW on eight simulated ranks, as `frontier.py` does, with one thing changed at a time.
When a coordinate that has waited arrives, Adam squares the sum of its gradients, so its second
moment may grow too much, and later steps may be too short. Runs that the record has already are
not repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

import sparcel
from benchmarks.record import Row, parser_for, run_all
from benchmarks.training.convergence import RANKS
from benchmarks.training.frontier import method_of
from benchmarks.training.task_training import Run, evaluate
from benchmarks.training.tasks import TASKS
from sparcel import kernels
from sparcel.comm import Communicator
from sparcel.selectors import Selector
from sparcel.stream import SparseStream
from sparcel.training import Averager


class AsItIs(Run):
    """The training of `frontier.py`."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """AdamW, which trains the whole model."""
        (adamw,) = self.optimizers
        return adamw


@dataclass(eq=False)
class ByStep(Selector):
    """Selects the coordinates that would move the parameters the most: by |x| / √v."""

    root: Callable[[], Tensor | None]

    def select(self, x: Tensor, k: int, step: int = 0) -> SparseStream:
        root = self.root()
        indices, _ = kernels.topk(x if root is None else x / root, k)
        return SparseStream.unchecked(indices, x[indices.long()], x.numel())


class Selected(AsItIs):
    """Ranks select by |memory + gradient| / √v; all ranks have the same v."""

    def averager(self, comm: Communicator) -> Averager:
        self.scheme = replace(self.scheme, selector=ByStep(self._root))
        return super().averager(comm)

    def _root(self) -> Tensor | None:
        states = [self.optimizer.state.get(parameter) for parameter in self.named.values()]
        if not all(states):
            return None
        eps = self.optimizer.defaults["eps"]
        return torch.cat([state["exp_avg_sq"].flatten().sqrt() + eps for state in states])


class Spread(AsItIs):
    """A sum that has waited for w steps adds its square / w to v, as w equal gradients would."""

    def update(self, step: int) -> None:
        if step == 0:
            self.waited = {name: torch.zeros_like(p) for name, p in self.named.items()}
        if self.task.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.task.clip)
        (group,) = self.optimizer.param_groups
        (beta1, beta2), lr = group["betas"], self.task.lr_at(step)
        for name, parameter in self.named.items():
            gradient, state = parameter.grad, self.optimizer.state[parameter]
            assert gradient is not None
            if not state:  # as AdamW has it, so that step-ahead finds it
                moments = {one: torch.zeros_like(parameter) for one in ("exp_avg", "exp_avg_sq")}
                state.update(step=torch.tensor(0.0), **moments)
            state["step"] += 1
            waited = self.waited[name].add_(1)
            state["exp_avg"].lerp_(gradient, 1 - beta1)
            state["exp_avg_sq"].mul_(beta2).add_(gradient.square() / waited, alpha=1 - beta2)
            waited[gradient != 0] = 0
            done = float(state["step"])
            root = (state["exp_avg_sq"] / (1 - beta2**done)).sqrt_().add_(group["eps"])
            with torch.no_grad():
                parameter.mul_(1 - lr * group["weight_decay"])
                parameter.addcdiv_(state["exp_avg"], root, value=-lr / (1 - beta1**done))
        group["lr"] = lr


class Directions(AsItIs):
    """Ranks have moments of their own, and exchange Adam's directions in place of gradients."""

    def observe(
        self, comm: Communicator, step: int, gradients: Mapping[str, Tensor], averager: Averager
    ) -> None:
        if step == 0 and comm.rank == 0:
            zeros = [torch.zeros(2, *p.shape) for p in self.named.values()]
            self.moments = {
                rank: dict(zip(self.named, [one.clone() for one in zeros], strict=True))
                for rank in range(comm.size)
            }
        comm.gather_numbers(0)  # rank 0 has made the moments
        (beta1, beta2), eps = (self.optimizer.defaults[name] for name in ("betas", "eps"))
        for name, gradient in gradients.items():
            m, v = self.moments[comm.rank][name]
            m.lerp_(gradient, 1 - beta1)
            v.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
            root = (v / (1 - beta2 ** (step + 1))).sqrt_().add_(eps)
            gradient.copy_(m / (1 - beta1 ** (step + 1)) / root)

    def update(self, step: int) -> None:
        lr, decay = self.task.lr_at(step), self.optimizer.defaults["weight_decay"]
        with torch.no_grad():
            for parameter in self.named.values():
                assert parameter.grad is not None
                parameter.mul_(1 - lr * decay).sub_(parameter.grad, alpha=lr)


WAYS: dict[str, tuple[type[AsItIs], bool]] = {
    "as it is": (AsItIs, True),
    "squares spread over the wait": (Spread, True),
    "selected by |x| / √v": (Selected, True),
    "not ahead": (AsItIs, False),
    "directions exchanged, not ahead": (Directions, False),
}
"""What is changed, and whether step-ahead is on."""


def trained(data: Path, task: str, run: str, way: str, seed: int) -> Row:
    """Train once, and return the row."""
    kind, ahead = WAYS[way]
    training = kind(data, TASKS[task], replace(method_of(run), ahead=ahead), seed)
    sparcel.simulate(RANKS, training.rank)
    return {"steps": TASKS[task].steps, **evaluate(training.model, training.split)}


def main() -> None:
    parser = parser_for(__doc__, "adam")
    parser.add_argument("--task", choices=TASKS, default="medium words")
    parser.add_argument("--runs", nargs="+", required=True, metavar="SCHEME,DENSITY,FORMAT[,FIRST]")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, metavar="WAY")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="default: 0")
    told = parser.parse_args()
    every = product(told.seeds, told.runs, told.ways)
    jobs = ({"task": told.task, "run": run, "way": way, "seed": seed} for seed, run, way in every)
    run_all(told, trained, jobs)


if __name__ == "__main__":
    main()
