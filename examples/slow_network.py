"""Train a model on a slow network with sparcel and with what torch has; compare time and loss.

    sparcel lab run --nodes 4 --rate 1gbit --or-loopback -- python examples/slow_network.py

`make demo` runs this, and takes two to three minutes. The ranks train the same MLP several times:
by DistributedDataParallel alone, which sends whole gradients in 32 bits; with torch's hooks for 16
bits and for PowerSGD; with sparcel as `sparcel.attach` does it if no method is named, and at 10 %;
and with schemes that are named. Needs the extras ``cli``, ``lab`` and ``linear`` (for
scikit-learn's handwritten digits).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from time import perf_counter
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import sparcel
from sparcel.lab import link_bytes
from sparcel.tools.bench import results

HIDDEN, BATCH = 1600, 16
LR = 0.4
"""At the start; it falls linearly to 0. The value suits dense training on the digits."""
WARM_UP_STEPS = 10
"""First steps, which are not measured: they allocate memory, DDP rebuilds its buckets, and PowerSGD
is dense; torch's default for that, 1000 steps, is longer than this training."""
COMPUTE_STEPS = 20
"""Steps without an exchange, after training, to time the computation alone."""

LEGEND = (
    "",
    "Compute is a step without its exchange; exchange is the rest of the step.",
    "Sent: by the busiest node. ×: speed-up over DDP. sparcel: everything, in 5 bits.",
)

Model, Optimizer = DistributedDataParallel, torch.optim.Optimizer
Attach = Callable[[Model, Optimizer], sparcel.Handle | None]
"""``(model, optimizer) -> handle``: gives DDP a way to exchange gradients; None if torch's own."""


def alone(model: Model, optimizer: Optimizer) -> None:
    """Leave DDP as it is."""


def bf16(model: Model, optimizer: Optimizer) -> None:
    # DDP refuses this hook by its name on every engine but NCCL.
    model.register_comm_hook(
        None, lambda group, bucket: default_hooks.bf16_compress_hook(group, bucket)
    )


def powersgd(rank: int) -> Attach:
    def attach(model: Model, optimizer: Optimizer) -> None:
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=rank, start_powerSGD_iter=WARM_UP_STEPS
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

    return attach


def default(model: Model, optimizer: Optimizer) -> sparcel.Handle:
    return sparcel.attach(model, optimizer=optimizer)


def at_10_per_cent(model: Model, optimizer: Optimizer) -> sparcel.Handle:
    # The first 127 steps would send everything: little of a usual training, all of this one.
    return sparcel.attach(
        model, density=0.1, format="packed:4", optimizer=optimizer, frontload=False
    )


def named(scheme: str, density: float) -> Attach:
    def attach(model: Model, optimizer: Optimizer) -> sparcel.Handle:
        return sparcel.attach(model, scheme, density=density, optimizer=optimizer)

    return attach


POWERSGD: dict[str, Attach] = {f"PowerSGD {rank}": powersgd(rank) for rank in (4, 16)}
TORCH: dict[str, Attach] = {"DDP": alone, "DDP bf16": bf16, **POWERSGD}


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--schemes", nargs="*", default=["topk", "gtopk"], help="after the default")
    parser.add_argument("--density", type=float, default=0.01, help="what these schemes send")
    parser.add_argument("--steps", type=int, default=120, help="training steps with each method")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of the batches")
    parser.add_argument("--data", type=Path, help="an .npz such as Keras's mnist.npz; else digits")
    parser.add_argument("--json", type=Path, help="file for the results")
    arguments = parser.parse_args()
    if arguments.steps <= WARM_UP_STEPS:
        parser.error(f"--steps must exceed {WARM_UP_STEPS}, which are not measured")
    return arguments


def samples(file: Path | None) -> list[Tensor]:
    """Return inputs ``[samples, features]`` and classes, to train on and held out."""
    if file is None:
        digits = load_digits()
        held_out = np.zeros(len(digits.target), dtype=bool)
        for label in range(10):
            held_out[np.flatnonzero(digits.target == label)[::5]] = True
        parts = [of[rows] for rows in (~held_out, held_out) for of in (digits.data, digits.target)]
    else:
        with np.load(file) as arrays:
            parts = [arrays[name] for name in ("x_train", "y_train", "x_test", "y_test")]
    x, y, x_test, y_test = (torch.from_numpy(part) for part in parts)
    x, x_test = x.flatten(1).float(), x_test.flatten(1).float()
    mean, std = x.mean(), x.std()
    return [(x - mean) / std, y.long(), (x_test - mean) / std, y_test.long()]


class Training:
    """One method's training on this rank."""

    def __init__(self, attach: Attach, arguments: argparse.Namespace, data: list[Tensor]) -> None:
        self.steps, (self.x, self.y, self.x_test, self.y_test) = arguments.steps, data
        rank, ranks = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(arguments.seed)
        widths = [self.x.shape[1], HIDDEN, HIDDEN, HIDDEN, 1 + int(self.y.max())]
        layers = [nn.Linear(*pair) for pair in pairwise(widths)]
        hidden = [module for layer in layers[:-1] for module in (layer, nn.ReLU())]
        # With views, every method writes the update to .grad without a further copy. PowerSGD over
        # Gloo needs one bucket: with several, its collectives come in another order on each rank.
        model = nn.Sequential(*hidden, layers[-1])
        in_one = 1000 if attach in POWERSGD.values() else None
        self.model = DistributedDataParallel(
            model, gradient_as_bucket_view=True, bucket_cap_mb=in_one
        )
        self.optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        self.attach, self.handle = attach, attach(self.model, self.optimizer)
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        order, count = torch.Generator().manual_seed(arguments.seed), len(self.y)
        epochs = math.ceil(self.steps * BATCH * ranks / count)
        shuffled = torch.cat([torch.randperm(count, generator=order) for _ in range(epochs)])
        whole = shuffled[: self.steps * BATCH * ranks].view(self.steps, BATCH * ranks)
        self.batches = whole[:, rank::ranks]

    def step(self, index: int) -> float:
        """Take a step of the training and return its seconds."""
        start, batch = perf_counter(), self.batches[index]
        self.optimizer.param_groups[0]["lr"] = LR * (1 - index / self.steps)
        self.optimizer.zero_grad()
        cross_entropy(self.model(self.x[batch]), self.y[batch]).backward()
        self.optimizer.step()
        return perf_counter() - start

    def sent(self) -> tuple[int, int]:
        """Return the bytes sent so far, by sparcel's count and by the link's; 0 for no count."""
        link = link_bytes()
        return self.handle.stats().bytes_sent if self.handle else 0, link.sent if link else 0

    def ring_bytes(self, ranks: int) -> float | None:
        """Return what a ring sends, for DDP alone, which counts no bytes; hooks send less."""
        return 4 * 2 * self.parameters * (ranks - 1) / ranks if self.attach is alone else None

    def measured(self) -> dict[str, Any]:
        """Train, and return what this rank saw of a step, and the accuracy at the end."""
        for index in range(WARM_UP_STEPS):
            self.step(index)
        before, timed = self.sent(), range(WARM_UP_STEPS, self.steps)
        step_s = median([self.step(index) for index in timed])
        pairs = zip(before, self.sent(), strict=True)
        payload, on_link = ((end - start) / len(timed) for start, end in pairs)
        with torch.no_grad():
            logits = self.model.module(self.x_test)
        weights = b"".join(p.detach().numpy().tobytes() for p in self.model.parameters())
        dist.barrier()
        with self.model.no_sync():  # after which the ranks' models differ
            compute_s = median([self.step(index % self.steps) for index in range(COMPUTE_STEPS)])
        ranks = dist.get_world_size()
        return {
            "step_s": step_s,
            "compute_s": compute_s,
            "payload_bytes": payload or self.ring_bytes(ranks),
            "wire_bytes": on_link or None,
            "accuracy": (logits.argmax(1) == self.y_test).double().mean().item(),
            "loss": cross_entropy(logits, self.y_test).item(),
            "weights": hashlib.sha256(weights).hexdigest(),
        }


def combined(method: str, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a method's row: times are means over the ranks, bytes those of the busiest."""
    if len({rank["weights"] for rank in ranks}) != 1:
        raise RuntimeError(f"with {method}, the ranks ended with different models; please report")
    step_s, compute_s = (fmean(rank[name] for rank in ranks) for name in ("step_s", "compute_s"))
    return {
        "method": method,
        "step_s": step_s,
        "compute_s": compute_s,
        "exposed_s": step_s - compute_s,
        "payload_bytes": ranks[0]["payload_bytes"] and max(rank["payload_bytes"] for rank in ranks),
        "wire_bytes": ranks[0]["wire_bytes"] and max(rank["wire_bytes"] for rank in ranks),
        "accuracy": ranks[0]["accuracy"],
        "loss": ranks[0]["loss"],
    }


def report(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a table; speed-ups are over the first two, the dense methods."""
    lines = [
        "",
        "method         step  compute  exchange  sent a step  × fp32  × bf16 accuracy    loss",
    ]
    for row in rows:
        times = (1e3 * row[f"{part}_s"] for part in ("step", "compute", "exposed"))
        step, compute, exchange = (f"{time:.0f} ms" for time in times)
        sent_bytes = row["wire_bytes"] or row["payload_bytes"]
        sent = "not counted" if sent_bytes is None else f"{sent_bytes / 1e6:.2f} MB"
        fp32, bf16 = (f"{dense['step_s'] / row['step_s']:.1f}" for dense in rows[:2])
        lines.append(
            f"{row['method']:<12}{step:>7}{compute:>9}{exchange:>10}{sent:>13}{fp32:>8}{bf16:>8}"
            f"{row['accuracy']:>9.1%}{row['loss']:>8.3f}"
        )
    return "\n".join([*lines, *LEGEND])


def main() -> None:
    arguments = parsed()
    methods = {**TORCH, "sparcel": default, "sparcel 10 %": at_10_per_cent}
    methods |= {one: named(one, arguments.density) for one in arguments.schemes}
    data, rows = samples(arguments.data), []
    network = os.environ.get("SPARCEL_LAB_DESCRIPTION", "not emulated")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    speaks = dist.get_rank() == 0
    if speaks:
        print(f"Network: {network}", flush=True)
    for method, attach in methods.items():
        training = Training(attach, arguments, data)
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, training.measured())
        rows.append(combined(method, ranks))
        if speaks:
            print(f"{method}: {1e3 * rows[-1]['step_s']:.0f} ms a step", flush=True)
        if training.handle is not None:
            training.handle.close()
    if speaks:
        print(report(rows))
    if speaks and arguments.json:
        origin = {**results.machine(), "date": datetime.now(UTC).isoformat(timespec="seconds")}
        origin |= {"network": network, "command": " ".join(["python", *sys.argv])}
        about = {"batch_per_rank": BATCH, "parameters": training.parameters, "methods": rows}
        arguments.json.write_text(json.dumps(origin | about, indent=2) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
