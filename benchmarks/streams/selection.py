"""Time of exact selection, compared with a copy of the vector and with torch.topk.

All kernels take turns on the same vector in each repetition, so that a busy machine disturbs them
alike; what counts is the ratio of the medians. Run it as

    python -m benchmarks.streams.selection --output benchmarks/results/selection.json

With ``--selectors`` it measures all selectors of `sparcel.selectors` and `paper_selectors` instead:
the processor time to select, and to take from memory + gradient, how many they return, and
their overlap with the exact set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import count, islice
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from benchmarks.clock import in_turns, took
from benchmarks.record import Row, machine, options, show, write
from benchmarks.streams.paper_selectors import DoubleSampling, GaussianK
from sparcel import _cpu
from sparcel.core import kernels
from sparcel.core.kernels.definitions import select as reference
from sparcel.core.selectors import SELECTORS, overlap, selector, topk

DENSITIES = (0.001, 0.01)
SMOOTH = ("normal", "laplace", "gradient", "cauchy")


def digits_gradients(width: int, steps: int | None = None) -> Iterator[list[Tensor]]:
    """Yield the gradients of an MLP's tensors at each step of learning handwritten digits.

    After so many steps it learns no more: the gradients that follow are of one and the same model.
    """
    from sklearn.datasets import load_digits

    data, target = load_digits(return_X_y=True)
    images, labels = torch.tensor(data, dtype=torch.float32) / 16, torch.tensor(target)
    linear, relu = torch.nn.Linear, torch.nn.ReLU
    model = torch.nn.Sequential(
        *(linear(64, width), relu(), linear(width, width), relu(), linear(width, 10))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in count():
        batch = torch.randint(len(images), (64,))
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
        if steps is None or step < steps:
            optimizer.step()
        yield [p.grad for p in model.parameters() if p.grad is not None]


def gradient(size: int) -> Tensor:
    """Return the gradient of a square layer of an MLP, a few steps into training on digits."""
    *_, last = islice(digits_gradients(round(size**0.5)), 6)
    return last[2].reshape(-1)


def vectors(size: int) -> Iterator[tuple[str, Tensor]]:
    """Yield each distribution's vector in turn."""
    normal = torch.randn(size)
    yield "normal", normal
    yield "laplace", torch.distributions.Laplace(0.0, 1.0).sample((size,))
    yield "gradient", gradient(size)
    yield "cauchy", torch.empty(size).cauchy_()
    yield "all equal", torch.ones(size)
    yield "mostly zero", torch.where(torch.rand(size) < 0.0005, normal, 0.0)
    yield "ascending", normal.abs().sort().values
    yield "descending", normal.abs().sort(descending=True).values
    bunched = normal.clone()
    start, run = size // 3, size // 1000
    bunched[start : start + run] *= 1000
    yield "bunched", bunched


def timed(
    calls: Mapping[str, Callable[[], object]], repeats: int, busy: bool = False
) -> dict[str, float]:
    """Return the median time of each call in ms, or the processor's, all taking turns."""
    times = in_turns({name: partial(took, call) for name, call in calls.items()}, repeats)
    return {
        name: 1e3 * median(one.cpu_s if busy else one.seconds for one in each)
        for name, each in times.items()
    }


def calls_on(x: Tensor, isas: list[str]) -> dict[str, Callable[[], object]]:
    """Return the calls to time on one vector, by name."""
    target, memory = torch.empty_like(x), torch.randn(x.numel()) * x.std() * 1e-3
    addition = kernels.Addition(memory, x, target)
    own: dict[str, Callable[[], object]] = {}
    for density in DENSITIES:
        k = round(density * x.numel())
        own[f"topk {density:g}"] = partial(kernels.topk, x, k)
        own[f"accumulate {density:g}"] = partial(kernels.accumulate_topk, addition, k)
    return {"copy": lambda: target.copy_(x)} | {
        f"{isa} {name}": partial(_by_isa, isa, call) for isa in isas for name, call in own.items()
    }


def _by_isa(isa: str, call: Callable[[], object]) -> None:
    _cpu.set_isa(isa)
    call()


def wrong_entries(x: Tensor, isa: str) -> int:
    """Count the entries in which the selections differ from the reference's."""
    _cpu.set_isa(isa)
    wrong = 0
    for density in DENSITIES:
        k = round(density * x.numel())
        chosen, expected = kernels.topk(x, k)[0], reference.topk(x, k)[0]
        wrong += len(set(chosen.tolist()) ^ set(expected.tolist()))
    return wrong


def measure(name: str, x: Tensor, isas: list[str], repeats: int) -> Row:
    """Time everything on one vector."""
    medians = timed(calls_on(x, isas), repeats)
    exact = {f"torch.topk {density:g}": partial(_by_torch, x, density) for density in DENSITIES}
    slow = timed(exact, repeats=3)
    wrong = {isa: wrong_entries(x, isa) for isa in isas}
    return {"distribution": name, "median_ms": medians | slow, "wrong_entries": wrong}


def _by_torch(x: Tensor, density: float) -> object:
    return torch.topk(x.abs(), round(density * x.numel()))


def measure_selectors(name: str, x: Tensor, repeats: int) -> Row:
    """Time all selectors on one vector, and compare with the exact set.

    The reused threshold was made with all magnitudes smaller by 1 %.
    """
    addition, rows = kernels.Addition(torch.zeros_like(x), x, torch.empty_like(x)), []
    for density in DENSITIES:
        k = round(density * x.numel())
        selectors = {each: selector(each) for each in SELECTORS}
        selectors |= {"gaussiank": GaussianK(), "dgc": DoubleSampling()}
        selectors["reuse"].select(x * 0.99, k, 0)
        exact = topk(x, k)
        selected = {each: s.select(x, k, 1) for each, s in selectors.items()}
        select = {n: partial(s.select, x, k, 1) for n, s in selectors.items()}
        take = {n: partial(s.take, addition, k, 1) for n, s in selectors.items()}
        select_ms, take_ms = (timed(calls, repeats, busy=True) for calls in (select, take))
        rows += [
            {
                "selector": repr(s),
                "density": density,
                "k": k,
                "selected": selected[each].nnz,
                "overlap": round(overlap(selected[each], exact), 4),
                "select_ms": select_ms[each],
                "take_ms": take_ms[each],
            }
            for each, s in selectors.items()
        ]
    return {"distribution": name, "selectors": rows}


def main() -> None:
    """Run the benchmark."""
    arguments = options(__doc__, size=25_000_000, repeats=15, selectors=False, output=Path)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    best = _cpu.isa()
    isas = [isa for isa in ("avx512", "avx2", "portable") if isa <= best or isa == "portable"]
    rows = []
    for name, x in vectors(arguments.size):
        if not arguments.selectors:
            rows.append(measure(name, x, isas, arguments.repeats))
            show(
                {"distribution": name, "call": k, "ms": ms}
                for k, ms in rows[-1]["median_ms"].items()
            )
        elif name in SMOOTH:
            rows.append(measure_selectors(name, x, arguments.repeats))
            show({"distribution": name, **one} for one in rows[-1]["selectors"])
    if arguments.output:
        origin = {"machine": machine(), "size": arguments.size, "threads": 1}
        write(arguments.output, origin, rows)


if __name__ == "__main__":
    main()
