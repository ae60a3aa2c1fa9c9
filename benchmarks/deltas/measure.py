"""How short changes of weights are, and how fast they are told and applied, way beside way.

    python -m benchmarks.deltas.measure FOLDER

``FOLDER`` has pairs of weights of real fine-tuning, or gets them from `pairs.py`, which takes
minutes. Everything runs in one thread. Ways take turns, each turn with another pair; times are
medians of all turns. What is applied is compared with the new weights once for each pair.

``bits`` are those of whole messages, headers included, for each element that changes. Speeds are
elements of the model, changed or not, for each nanosecond, and in brackets for each nanosecond of
processor time: ``encode`` finds the changes too, and ``apply`` also checks, where sparcel is
concerned; the others check nothing. ``compare`` is torch's search for the changes alone, as used by
the ways that list them, and numpy's.

The entropies are those of places, and of steps in units in the last place, in bits for each change:
of one model for all elements, of one for each tensor, and of one for each tensor and exponent of
the old weight. They come from counts of the very pair, which a decoder does not have, so that those
with many conditions flatter: no code has to pay for the counts here.

``peak_bytes`` are the largest resident set of a process less what was resident before, the weights
included: see `remembered`. There, ``cpu_g`` is measured once, with many weights: small models pay
for each tensor.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from statistics import mean, median
from time import process_time

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.clock import alone, process_bytes, resident, took
from benchmarks.deltas.pairs import LEARNING_RATES, distances, pairs, tiled
from benchmarks.deltas.ways import WAYS, Weights, bits_of, found, same
from benchmarks.record import RESULTS, Row, machine, options, show, write

VERSIONS = 4
LARGE = 500_000_000
MEMORY_LR = 1e-6

Pair = tuple[Weights, Weights]
Times = dict[tuple[str, str], list[tuple[float, float]]]
"""Seconds, and processor seconds, by ways and stages."""


def compared(lr: float, versions: Sequence[Weights], repeats: int) -> Iterator[Row]:
    """Yield the rows of a learning rate."""
    both = list(pairwise(versions))
    elements = sum(tensor.numel() for tensor in versions[0].values())
    steps = [_steps(*pair) for pair in both]
    every = torch.cat(steps)
    changed = int((every != 0).sum())
    yield {
        "what": "weights",
        "lr": lr,
        "elements": elements,
        "pairs": len(both),
        "changed": changed / len(every),
        "by_one": int((every.abs() == 1).sum()) / changed,
        **_means([entropies(old, moved) for (old, _), moved in zip(both, steps, strict=True)]),
    }
    times = _in_turns(both, repeats)
    for label in ("torch", "numpy"):
        speed = _speed("compare", elements, times[label, "compare"])
        yield {"what": "compare", "lr": lr, "way": label, **speed}
    for way in WAYS:
        lengths = [sum(map(len, way.encode(now, old))) for old, now in both]
        row = {"what": "way", "lr": lr, "way": way.label, "bits": 8 * sum(lengths) / changed}
        for stage in ("encode", "apply"):
            row |= _speed(stage, elements, times[way.label, stage])
        yield row


def _steps(old: Weights, now: Weights) -> Tensor:
    return torch.cat([distances(old[name], now[name]).flatten() for name in old])


def entropies(old: Weights, moved: Tensor) -> Row:
    """Return the entropies of places and of steps, by what is known of an element."""
    sizes = torch.tensor([tensor.numel() for tensor in old.values()])
    tensors = torch.arange(len(sizes)).repeat_interleave(sizes)
    exponents = torch.cat([bits_of(tensor).int() >> 7 & 0xFF for tensor in old.values()])
    conditions = {
        "alone": torch.zeros_like(tensors),
        "by_tensor": tensors,
        "by_tensor_and_exponent": tensors << 8 | exponents,
    }
    there = moved != 0
    steps = moved[there].unique(return_inverse=True)[1]
    return {
        f"{what}_entropy_{name}": entropy(given, outcome) / len(steps)
        for name, cells in conditions.items()
        for what, given, outcome in (
            ("places", cells, there.long()),
            ("steps", cells[there], steps),
        )
    }


def entropy(given: Tensor, outcome: Tensor) -> float:
    """Return the bits that outcomes take, by the shares that they have in each cell."""
    kinds = int(outcome.max()) + 1
    cells = torch.bincount(given, minlength=int(given.max()) + 1).double()
    joint = torch.bincount(given * kinds + outcome, minlength=kinds * len(cells)).double()
    shares = joint.view(-1, kinds) / cells[:, None].clamp(min=1)
    return -float((joint * shares.clamp(min=1e-300).log2().flatten()).sum())


def _means(rows: Sequence[Row]) -> Row:
    return {name: mean(row[name] for row in rows) for name in rows[0]}


def _in_turns(both: Sequence[Pair], repeats: int) -> Times:
    """Return what comparisons and the stages of each way take, in turns."""
    times: Times = {}
    for turn in range(-len(both), repeats):
        old, now = both[turn % len(both)]
        bits = [[bits_of(of[name]).numpy() for name in old] for of in (now, old)]
        of_turn = {
            ("torch", "compare"): took(found, now, old),
            ("numpy", "compare"): took(_by_numpy, *bits),
        }
        for way in WAYS:
            told = took(lambda way=way: [*way.encode(now, old)])  # noqa: B023
            target = {name: tensor.clone() for name, tensor in old.items()}
            of_turn[way.label, "encode"] = told
            of_turn[way.label, "apply"] = took(way.apply, target, told.result)
            if turn < 0 and not same(target, now):
                raise SystemExit(f"{way.label} does not make the new weights")
        for name, one in of_turn.items() if turn >= 0 else ():
            times.setdefault(name, []).append((one.seconds, one.cpu_s))
    return times


def _by_numpy(now: Sequence[np.ndarray], old: Sequence[np.ndarray]) -> list[np.ndarray]:
    return [np.flatnonzero(a != b) for a, b in zip(now, old, strict=True)]


def _speed(stage: str, elements: int, times: Sequence[tuple[float, float]]) -> Row:
    seconds, busy = zip(*times, strict=True)
    return {
        f"{stage}_g": elements / median(seconds) / 1e9,
        f"{stage}_cpu_g": elements / median(busy) / 1e9,
        f"{stage}_ms": [1e3 * one for one in seconds],
    }


LENGTH = 8
"""Bytes that tell the length of a buffer in a file."""


def remembered(before: Path, after: Path, elements: int) -> Iterator[Row]:
    """Yield what each way takes at most, for a pair of weights repeated till it is large.

    Each measurement has a process of its own, whose resident set has nothing but modules, weights
    and what is measured. Buffers are written to a file as they come, and read as they are asked
    for.
    """
    with tempfile.TemporaryDirectory() as folder:
        for place, way in enumerate(WAYS):
            file = Path(folder) / "message"
            yield {
                "what": "memory",
                "way": way.label,
                **alone(_encoding, place, before, after, elements, file),
                "message_bytes": file.stat().st_size,
                **alone(_applying, place, before, elements, file),
            }


def _encoding(place: int, before: Path, after: Path, elements: int, file: Path) -> Row:
    torch.set_num_threads(1)
    old, now = tiled(before, elements), tiled(after, elements)
    before_bytes, busy = resident(), 0.0
    with file.open("wb") as out:
        start = process_time()
        for buffer in WAYS[place].encode(now, old):
            busy += process_time() - start
            out.write(len(buffer).to_bytes(LENGTH, "little"))
            out.write(buffer)
            start = process_time()
    elements = sum(tensor.numel() for tensor in old.values())
    return {
        "elements": elements,
        "model_bytes": sum(tensor.nbytes for tensor in old.values()),
        "encode_peak_bytes": process_bytes("VmHWM") - before_bytes,
        "encode_cpu_g": elements / busy / 1e9,
    }


def _applying(place: int, before: Path, elements: int, file: Path) -> Row:
    torch.set_num_threads(1)
    target = tiled(before, elements)
    before_bytes = resident()
    busy = took(WAYS[place].apply, target, _buffers(file)).cpu_s
    return {
        "apply_peak_bytes": process_bytes("VmHWM") - before_bytes,
        "apply_cpu_g": sum(tensor.numel() for tensor in target.values()) / busy / 1e9,
    }


def _buffers(file: Path) -> Iterator[bytes]:
    with file.open("rb") as there:
        while length := there.read(LENGTH):
            yield there.read(int.from_bytes(length, "little"))


def main() -> None:
    given = options(
        __doc__,
        "folder",
        lr=LEARNING_RATES,
        repeats=15,
        elements=LARGE,
        output=RESULTS / "deltas.json",
    )
    torch.set_num_threads(1)
    origin = machine()
    files, rows = pairs(given.folder, given.lr, VERSIONS), list[Row]()
    for lr, versions in files.items():
        rows += compared(lr, [load_file(file) for file in versions], given.repeats)
        write(given.output, origin, rows)
    if given.elements:
        lr = min(given.lr, key=lambda one: abs(one - MEMORY_LR))
        rows += (
            {**row, "lr": lr} for row in remembered(files[lr][0], files[lr][1], given.elements)
        )
        write(given.output, origin, rows)
    for _, group in groupby(rows, key=lambda row: str(row["what"])):
        show(group)


if __name__ == "__main__":
    main()
