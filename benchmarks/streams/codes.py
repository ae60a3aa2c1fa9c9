"""How short messages are and how long encoding and decoding them takes, for each format.

    python -m benchmarks.streams.codes

Streams have coordinates drawn evenly, normal values, and one thread to encode them. Formats take
turns in each repetition; times are medians. ``index_bits`` are compared with the entropy of the
choice of coordinates, ``value_bits`` count scales. A message that travels dense has no index bits.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.machine import machine
from benchmarks.record import RESULTS, Row, write
from sparcel import SparseStream
from sparcel.core.formats import Format, decode, format_named

SIZE = 16 << 20
DENSITIES = (0.001, 0.01, 0.1)
FORMATS = ("raw", "packed", "packed:bfloat16", "packed:8", "packed:4", "packed:2")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--output", type=Path, default=RESULTS / "codes.json")
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = [row for density in DENSITIES for row in measured(density, given.repeats)]
    for row in rows:
        print(
            f"{row['density']:6.1%} {row['format']:16} {row['index_bits']:5.2f} index bits"
            f" (entropy {row['entropy']:.2f}), {row['value_bits']:5.2f} value bits,"
            f" encode {row['encode_ns']:.2f} + decode {row['decode_ns']:.2f} ns an entry"
        )
    write(given.output, machine(), rows)


def measured(density: float, repeats: int) -> list[Row]:
    """Measure all formats at one density."""
    torch.manual_seed(0)
    indices = (torch.rand(SIZE) < density).nonzero().squeeze(1).int()
    stream = SparseStream(indices, torch.randn(indices.numel()), SIZE)
    formats = [format_named(name) for name in FORMATS]
    messages = [format.encode(stream).message for format in formats]
    encode: list[list[float]] = [[] for _ in formats]
    read: list[list[float]] = [[] for _ in formats]
    for _ in range(repeats):
        for place, (format, message) in enumerate(zip(formats, messages, strict=True)):
            encode[place].append(seconds(lambda f=format: f.encode(stream)))
            read[place].append(seconds(lambda m=message: decode(m)))
    share = stream.nnz / SIZE
    entropy = -math.log2(share) - (1 - share) / share * math.log2(1 - share)
    return [
        {
            "density": density,
            "entries": stream.nnz,
            "format": format.name,
            "entropy": entropy,
            **bits(format, stream),
            "encode_ns": 1e9 * statistics.median(encode[place]) / stream.nnz,
            "decode_ns": 1e9 * statistics.median(read[place]) / stream.nnz,
        }
        for place, format in enumerate(formats)
    ]


def bits(format: Format, stream: SparseStream) -> Row:
    """Return the bits of an index and of a value, headers and padding left out."""
    indices = format.index_code.nbytes(stream.nnz, stream.size)
    values = sum(format.value_code.part_bytes(stream.nnz, stream.dtype.itemsize))
    return {"index_bits": 8 * indices / stream.nnz, "value_bits": 8 * values / stream.nnz}


def seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
