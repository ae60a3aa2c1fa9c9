"""How short messages are and how long encoding and decoding them takes, for each format.

    python -m benchmarks.streams.codes

Streams have coordinates drawn evenly, normal values, and one thread to encode them. Formats take
turns in each repetition; times are medians. ``index_bits`` are compared with the entropy of the
choice of coordinates, ``value_bits`` count scales. A message that travels dense has no index bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from statistics import median

import torch

from benchmarks.clock import Took, in_turns, took
from benchmarks.record import RESULTS, Row, options, report
from sparcel import SparseStream
from sparcel.core.formats import Format, decode, format_named

SIZE = 16 << 20
DENSITIES = (0.001, 0.01, 0.1)
FORMATS = ("raw", "packed", "packed:bfloat16", "packed:8", "packed:4", "packed:2")


def main() -> None:
    given = options(__doc__, repeats=15, output=RESULTS / "codes.json")
    torch.set_num_threads(1)
    rows = [row for density in DENSITIES for row in measured(density, given.repeats)]
    report(given.output, rows)


def measured(density: float, repeats: int) -> list[Row]:
    """Measure all formats at one density."""
    torch.manual_seed(0)
    indices = (torch.rand(SIZE) < density).nonzero().squeeze(1).int()
    stream = SparseStream(indices, torch.randn(indices.numel()), SIZE)
    formats = [format_named(name) for name in FORMATS]
    jobs: dict[tuple[str, str], Callable[[], Took]] = {}
    for format in formats:
        message = format.encode(stream).message
        jobs["encode", format.name] = partial(took, format.encode, stream)
        jobs["decode", format.name] = partial(took, decode, message)
    turns = in_turns(jobs, repeats, 0)
    ns = {name: 1e9 * median(one.seconds for one in each) for name, each in turns.items()}
    share = stream.nnz / SIZE
    entropy = -math.log2(share) - (1 - share) / share * math.log2(1 - share)
    return [
        {
            "density": density,
            "entries": stream.nnz,
            "format": format.name,
            "entropy": entropy,
            **bits(format, stream),
            **{f"{way}_ns": ns[way, format.name] / stream.nnz for way in ("encode", "decode")},
        }
        for format in formats
    ]


def bits(format: Format, stream: SparseStream) -> Row:
    """Return the bits of an index and of a value, headers and padding left out."""
    indices = format.index_code.nbytes(stream.nnz, stream.size)
    values = sum(format.value_code.part_bytes(stream.nnz, stream.dtype.itemsize))
    return {"index_bits": 8 * indices / stream.nnz, "value_bits": 8 * values / stream.nnz}


if __name__ == "__main__":
    main()
