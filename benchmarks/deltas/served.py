"""How short changes are of what engines serve: copies of bfloat16 weights in fewer bits.

    python -m benchmarks.deltas.served FOLDER

``FOLDER`` has pairs of weights of real fine-tuning, or gets them from `pairs.py`. Both weights of a
pair are cast as `casts.py` says; ``bf16`` are the weights themselves. All runs in one thread.

``bits`` are those of whole messages, headers included, for each element that changes: of what is
packed, a byte. ``entropy`` are those of places, and of new bits given the old ones (of dtypes
of more than a byte: of the steps between them), of each dtype apart. They come from counts of the
very pair: where there are fewer changes than old and new bits may have values, they say too little.
``encode_g`` and ``apply_g`` are weights, changed or not, for each nanosecond of processor time, the
median of all turns.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import process_time

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.deltas.casts import CASTS, cast
from benchmarks.deltas.measure import entropy
from benchmarks.deltas.pairs import pairs
from benchmarks.deltas.ways import Dense, Gaps, Plain, Sparcel, Way, Weights, bits_of, same
from benchmarks.machine import itself, machine
from benchmarks.record import RESULTS, Row, write

LEARNING_RATES = (1e-6, 3e-6, 1e-5)
VERSIONS = 4
WAYS: tuple[Way, ...] = (Sparcel("exponents"), Gaps(1, xor=True), Dense(), Plain())


def served(how: str, lr: float, weights: Sequence[Weights], repeats: int) -> Row:
    """Return the row of a cast."""
    elements = sum(tensor.numel() for tensor in weights[0].values())
    versions = weights if how == "bf16" else [cast(one, how) for one in weights]
    both = list(pairwise(versions))
    changed = sum(_changed(*pair) for pair in both)
    row = {
        "cast": how,
        "lr": lr,
        "elements": elements,
        "pairs": len(both),
        "changed": changed / len(both),
        "entropy": sum(_entropy(*pair) for pair in both) / changed,
        "bits": {},
        "encode_g": {},
        "apply_g": {},
    }
    for way in WAYS:
        size, times = 0, []
        for turn in range(repeats):
            old, now = both[turn % len(both)]
            target = {name: tensor.clone() for name, tensor in old.items()}
            start = process_time()
            message = list(way.encode(now, old))
            middle = process_time()
            way.apply(target, message)
            times.append((middle - start, process_time() - middle))
            if turn < len(both):
                size += sum(map(len, message))
                if not same(target, now):
                    raise SystemExit(f"{way.label} does not make the new weights of {how}")
        row["bits"][way.label] = 8 * size / changed
        for stage, took in zip(("encode_g", "apply_g"), zip(*times, strict=True), strict=True):
            row[stage][way.label] = elements / median(took) / 1e9
    return row


def _changed(old: Weights, now: Weights) -> int:
    return sum(int((bits_of(old[name]) != bits_of(now[name])).sum()) for name in old)


def _entropy(old: Weights, now: Weights) -> float:
    """Return the bits of places and of new bits, of each dtype apart."""
    by_dtype: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = defaultdict(list)
    for name, tensor in old.items():
        by_dtype[tensor.dtype].append((bits_of(tensor), bits_of(now[name])))
    total = 0.0
    for pieces in by_dtype.values():
        before, after = (torch.cat(side).long() for side in zip(*pieces, strict=True))
        there = before != after
        if not there.any():
            continue
        total += entropy(torch.zeros_like(before), there.long())
        narrow = pieces[0][0].itemsize == 1
        given = before[there] & 0xFF if narrow else torch.zeros_like(before[there])
        told = after[there] & 0xFF if narrow else after[there] - before[there]
        total += entropy(given, told.unique(return_inverse=True)[1])
    return total


def table(rows: Sequence[Row]) -> Table:
    """Return bits by cast, learning rate and way."""
    labels = [way.label for way in WAYS]
    shown = Table("cast", "lr", "changed", "entropy", *labels, "encode", "apply")
    for row in rows:
        speeds = (f"{row[stage][labels[0]]:.1f}" for stage in ("encode_g", "apply_g"))
        shown.add_row(
            row["cast"],
            f"{row['lr']:g}",
            f"{row['changed']:,.0f}",
            f"{row['entropy']:.1f}",
            *(f"{row['bits'][label]:.1f}" for label in labels),
            *speeds,
        )
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--lr", type=float, nargs="+", default=LEARNING_RATES)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--output", type=Path, default=RESULTS / "deltas_served.json")
    given = parser.parse_args()
    torch.set_num_threads(1)
    origin, rows = machine(), list[Row]()
    origin["command"] = shlex.join(["python", *itself(), "FOLDER", *sys.argv[2:]])
    for lr, files in pairs(given.folder, given.lr, VERSIONS).items():
        versions = [load_file(file) for file in files]
        for how in ("bf16", *CASTS):
            rows.append(served(how, lr, versions, given.repeats))
            write(given.output, origin, rows)
    Console(highlight=False, width=140).print(table(rows))


if __name__ == "__main__":
    main()
