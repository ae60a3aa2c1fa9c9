"""Time of exact selection, compared with a copy of the vector and with torch.topk.

All kernels take turns on the same vector in each repetition, so that a busy machine disturbs them
alike; what counts is the ratio of the medians. Each vector's record also holds the time of
chunk-wise selection divided by that of the global selection of about as many entries, and how much
a second thread gains, beside what it gains a read of the vector. Run it as

    python -m benchmarks.streams.selection --output benchmarks/results/selection.json

With ``--selectors`` it measures all selectors of `sparcel.selectors` and `paper_selectors` instead:
the time of its thread to select, and to take from memory + gradient, how many they return, and
their overlap with the exact set.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.clock import in_turns
from benchmarks.record import machine, options, show, write
from benchmarks.streams.paper_selectors import DoubleSampling, GaussianK
from sparcel import _cpu
from sparcel.core import kernels
from sparcel.core.kernels.definitions import select as reference
from sparcel.core.selectors import SELECTORS, overlap, selector, topk

DENSITIES = (0.001, 0.01)
CHUNK, PER_CHUNK = 512, 5
SMOOTH = ("normal", "laplace", "gradient", "cauchy")


def gradient(size: int) -> Tensor:
    """Return the gradient of a square layer of an MLP, a few steps into training on digits."""
    from sklearn.datasets import load_digits

    width = round(size**0.5)
    data, target = load_digits(return_X_y=True)
    images, labels = torch.tensor(data, dtype=torch.float32) / 16, torch.tensor(target)
    layers = [torch.nn.Linear(64, width), torch.nn.Linear(width, width), torch.nn.Linear(width, 10)]
    model = torch.nn.Sequential(layers[0], torch.nn.ReLU(), layers[1], torch.nn.ReLU(), layers[2])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        batch = slice(64 * step, 64 * step + 64)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()
    whole = layers[1].weight.grad
    assert whole is not None
    return whole.reshape(-1)


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
    calls: Mapping[str, Callable[[], object]],
    repeats: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Return the median time of each call in ms, all taking turns."""

    def took(call: Callable[[], object]) -> float:
        start = clock()
        call()
        return 1e3 * (clock() - start)

    times = in_turns({name: partial(took, call) for name, call in calls.items()}, repeats)
    return {name: median(each) for name, each in times.items()}


def after(setting: Callable[[], object], call: Callable[[], object]) -> Callable[[], object]:
    """Return the call after its setting."""
    return lambda: (setting(), call())


def calls_on(x: Tensor, isas: list[str]) -> dict[str, Callable[[], object]]:
    """Return the calls to time on one vector, by name."""
    target, memory = torch.empty_like(x), torch.randn(x.numel()) * x.std() * 1e-3
    addition = kernels.Addition(memory, x, target)
    own: dict[str, Callable[[], object]] = {}
    for density in DENSITIES:
        k = round(density * x.numel())
        own[f"topk {density:g}"] = partial(kernels.topk, x, k)
        own[f"accumulate {density:g}"] = partial(kernels.accumulate_topk, addition, k)
    own[f"chunks {PER_CHUNK}/{CHUNK}"] = partial(kernels.topk_chunked, x, PER_CHUNK, CHUNK)
    return {"copy": lambda: target.copy_(x)} | {
        f"{isa} {name}": after(partial(_cpu.set_isa, isa), call)
        for isa in isas
        for name, call in own.items()
    }


def thread_gains(x: Tensor, repeats: int) -> dict[str, float]:
    """Return the time of each selection on one thread divided by that on two.

    The read selects nothing, since no magnitude exceeds infinity.
    """
    calls: dict[str, Callable[[], object]] = {
        "read": partial(kernels.threshold_select, x, float("inf")),
        f"chunks {PER_CHUNK}/{CHUNK}": partial(kernels.topk_chunked, x, PER_CHUNK, CHUNK),
    }
    for density in DENSITIES:
        calls[f"topk {density:g}"] = partial(kernels.topk, x, round(density * x.numel()))
    by_threads = {
        f"{threads} {name}": after(partial(torch.set_num_threads, threads), call)
        for threads in (1, 2)
        for name, call in calls.items()
    }
    medians = timed(by_threads, repeats)
    torch.set_num_threads(1)
    return {name: medians[f"1 {name}"] / medians[f"2 {name}"] for name in calls}


def torch_topk(x: Tensor, k: int) -> object:
    """Select as one would without sparcel."""
    return torch.topk(x.abs(), k)


def wrong_entries(x: Tensor, isa: str) -> int:
    """Count the entries in which the selections differ from the reference's."""
    _cpu.set_isa(isa)
    wrong = 0
    for density in DENSITIES:
        k = round(density * x.numel())
        chosen, expected = kernels.topk(x, k)[0], reference.topk(x, k)[0]
        wrong += len(set(chosen.tolist()) ^ set(expected.tolist()))
    return wrong


def measure(name: str, x: Tensor, isas: list[str], repeats: int) -> dict[str, Any]:
    """Time everything on one vector."""
    medians = timed(calls_on(x, isas), repeats)
    chunks, whole = f"chunks {PER_CHUNK}/{CHUNK}", f"topk {DENSITIES[-1]:g}"
    ratios = {isa: medians[f"{isa} {chunks}"] / medians[f"{isa} {whole}"] for isa in isas}
    _cpu.set_isa(isas[0])
    gains = thread_gains(x, repeats)
    torch_calls = {
        f"torch.topk {density:g}": partial(torch_topk, x, round(density * x.numel()))
        for density in DENSITIES
    }
    slow = timed(torch_calls, repeats=3)
    wrong = {isa: wrong_entries(x, isa) for isa in isas}
    return {
        "distribution": name,
        "median_ms": medians | slow,
        "chunks_over_global": ratios,
        "two_threads_gain": gains,
        "wrong_entries": wrong,
    }


def measure_selectors(name: str, x: Tensor, repeats: int) -> dict[str, Any]:
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
        select_ms, take_ms = (timed(calls, repeats, time.thread_time) for calls in (select, take))
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


def print_row(row: dict[str, Any]) -> None:
    """Print one vector's times, as multiples of the copy's too, and what follows from them."""
    medians = row["median_ms"]
    print(f"\n{row['distribution']}")
    show({"call": call, "ms": ms, "× copy": ms / medians["copy"]} for call, ms in medians.items())
    for name in ("chunks_over_global", "two_threads_gain", "wrong_entries"):
        print(f"{name}: {row[name]}")


def print_spread(rows: list[dict[str, Any]], isas: list[str]) -> None:
    """Print for each kernel its time on the worst distribution divided by that on the best.

    Times are divided by that of a copy made in the same minute, because the machine's speed varies.
    """
    print("\nslowest distribution / fastest, in copies")
    for name in rows[0]["median_ms"]:
        if name.split()[0] in isas:
            medians = {row["distribution"]: row["median_ms"] for row in rows}
            copies = {each: ms[name] / ms["copy"] for each, ms in medians.items()}
            slowest = max(copies, key=lambda each: copies[each])
            print(f"  {name:26}{copies[slowest] / min(copies.values()):6.2f}×  ({slowest})")


def main() -> None:
    """Run the benchmark."""
    arguments = options(__doc__, size=25_000_000, repeats=15, selectors=False, output=Path)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    best = _cpu.isa()
    isas = [isa for isa in ("avx512", "avx2", "portable") if isa <= best or isa == "portable"]
    print(f"# {json.dumps(machine())}")
    print(f"# {arguments.size} float32 entries, one thread, medians of {arguments.repeats} (ms)")
    rows = []
    for name, x in vectors(arguments.size):
        if not arguments.selectors:
            rows.append(measure(name, x, isas, arguments.repeats))
            print_row(rows[-1])
        elif name in SMOOTH:
            rows.append(measure_selectors(name, x, arguments.repeats))
            show({"distribution": name, **one} for one in rows[-1]["selectors"])
    if not arguments.selectors:
        print_spread(rows, isas)
    if arguments.output:
        origin = {"machine": machine(), "size": arguments.size, "threads": 1}
        write(arguments.output, origin, rows)


if __name__ == "__main__":
    main()
