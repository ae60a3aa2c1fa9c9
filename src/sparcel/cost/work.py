"""The kinds of work on a rank: what each is, its phase, its default rate and how it is timed.

Five kinds predict as well as the fifteen that there were: whatever else ranks do takes about a
whole number of times as long as one of these (`sparcel.stages.copied` and its siblings).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from sparcel import kernels
from sparcel.formats import RAW, merge_messages
from sparcel.ops import SUM
from sparcel.stream import SparseStream

Run = Callable[[], object]

_COORDINATES = (256, 16 << 10, 256 << 10, 2 << 20, 16 << 20)


@dataclass(frozen=True)
class Kind:
    """A kind of work, which all ranks do at the same time.

    Attributes
    ----------
    phase
        The phase of a prediction that it belongs to.
    call_s, unit_s
        Default seconds of a call, and of a unit, on one core of a server of about 2022. They are
        conservative, like all defaults.
    amounts
        The amounts that are timed.
    trial
        Makes the call to time, of an amount and a seed.
    """

    phase: str
    call_s: float
    unit_s: float
    amounts: tuple[int, ...]
    trial: Callable[[int, int], Run]


def _select(size: int, seed: int) -> Run:
    generator = torch.Generator().manual_seed(seed)
    memory, scratch = torch.zeros(size), torch.empty(size)
    gradient = torch.randn(size, generator=generator)
    addition = kernels.Addition(memory, gradient, scratch)
    return lambda: kernels.accumulate_topk(addition, -(-size // 1000))


def _merge(entries: int, seed: int) -> Run:
    """Reduce the messages of two streams that have ``entries`` entries in total."""
    parts = [_stream(-(-entries // 2), seed + part) for part in range(2)]
    for part in parts:
        part.size = max(one.size for one in parts)
    messages = [RAW.encode(part).message for part in parts]
    return lambda: merge_messages(messages, parts[0], SUM)


def _add(size: int, seed: int) -> Run:
    vector = torch.zeros(size)
    return lambda: vector.sub_(1.0)


def _encode(nbytes: int, seed: int) -> Run:
    stream = _stream(nbytes // 8, seed)
    return lambda: RAW.encode(stream)


def _small(operations: int, seed: int) -> Run:
    counts = torch.arange(1024)

    def run() -> None:
        for _ in range(operations):
            counts.cumsum(0)

    return run


def _stream(entries: int, seed: int, gap: int = 100) -> SparseStream:
    """Return a stream that stores about one coordinate in ``gap``."""
    generator = torch.Generator().manual_seed(seed)
    gaps = torch.randint(1, 2 * gap, (entries,), dtype=torch.int32, generator=generator)
    indices = gaps.cumsum(0, dtype=torch.int32)
    values = torch.randn(entries, generator=generator)
    return SparseStream.unchecked(indices, values, 2 * gap * entries)


KINDS = {
    # Adding a gradient to the memory, and taking the largest out; coordinates.
    "select": Kind("select", 30e-6, 0.35e-9, _COORDINATES, _select),
    # Adding the sparse messages of two ranks; entries of both together.
    "merge": Kind("reduce", 15e-6, 2e-9, (16, 1 << 10, 16 << 10, 128 << 10, 1 << 20), _merge),
    # A pass over a dense vector, which adds to it, clears it or copies it; coordinates.
    "add": Kind("reduce", 5e-6, 0.3e-9, _COORDINATES, _add),
    # Writing a message of float32 entries; bytes.
    "encode": Kind("encode", 15e-6, 0.15e-9, (128, 8 << 10, 128 << 10, 1 << 20, 8 << 20), _encode),
    # A series of operations on tensors of about a thousand numbers; operations.
    "small": Kind("reduce", 0.0, 4e-6, (1, 100), _small),
}
"""Kinds of work by name, as `sparcel.rates.WORK` lists them; each comment ends with the unit."""
