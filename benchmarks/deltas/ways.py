"""Ways to send what has changed in bfloat16 weights, for `measure.py`: sparcel's, and others'.

A message is one or more buffers, whose bytes all count. Only sparcel's says what it applies to, and
is checked before it is written; the others trust that it arrives whole, at the right weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
import zstandard
from torch import Tensor

from sparcel import delta

Weights = dict[str, Tensor]
Message = Iterable[bytes]
Places = npt.NDArray[np.signedinteger]
Values = npt.NDArray[np.int16]

ESCAPE = 0xFFFF


class Way(Protocol):
    """How changes travel."""

    @property
    def label(self) -> str:
        """What tables call it."""

    def encode(self, now: Weights, old: Weights) -> Message:
        """Return what makes the weights ``now`` of the old ones; finding the changes included."""

    def apply(self, target: Weights, message: Message) -> None:
        """Make old weights new ones, in place."""


@dataclass(frozen=True)
class Sparcel:
    """Chunks of `sparcel.delta`, in one of its codes."""

    code: str

    @property
    def label(self) -> str:
        return f"sparcel, {self.code}"

    def encode(self, now: Weights, old: Weights) -> Iterator[bytes]:
        return delta.encode(now, old, code=self.code)

    def apply(self, target: Weights, message: Message) -> None:
        delta.apply_(target, message)


@dataclass(frozen=True)
class Changed:
    """What has changed in a tensor: places, and bits after and before."""

    places: Places
    after: Values
    before: Values


def bits_of(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.int16)


def found(now: Weights, old: Weights) -> list[Changed]:
    """Find what has changed in each tensor, as engines do: compare, nonzero, gather."""
    every = []
    for name, tensor in old.items():
        before, after = bits_of(tensor), bits_of(now[name])
        places = (before != after).nonzero().squeeze(1)
        parts = (places, after.index_select(0, places), before.index_select(0, places))
        every.append(Changed(*(part.numpy() for part in parts)))
    return every


class Listed:
    """Places and values of what has changed, in streams that subclasses make."""

    label: str

    def encode(self, now: Weights, old: Weights) -> Message:
        changes = found(now, old)
        counts = np.array([len(change.places) for change in changes], np.uint32)
        return [counts.tobytes(), *self._streams(changes)]

    def apply(self, target: Weights, message: Message) -> None:
        counted, *streams = message
        ends = np.cumsum(np.frombuffer(counted, np.uint32), dtype=np.int64)
        places, values = self._read(streams)
        for (begin, end), tensor in zip(_ranges(ends), target.values(), strict=True):
            bits, new = bits_of(tensor).numpy(), values[begin:end]
            self._write(bits, self._places(places[begin:end]), new)

    def _streams(self, changes: list[Changed]) -> list[bytes]:
        raise NotImplementedError

    def _read(self, streams: list[bytes]) -> tuple[Places, Values]:
        raise NotImplementedError

    def _places(self, told: Places) -> Places:
        return told.astype(np.int64)

    def _write(self, bits: Values, places: Places, values: Values) -> None:
        bits[places] = values


def _ranges(ends: Places) -> Iterator[tuple[int, int]]:
    begins = np.concatenate(([0], ends[:-1]))
    return zip(begins.tolist(), ends.tolist(), strict=True)


class Plain(Listed):
    """Places as int32 and new values as they are."""

    label = "int32 + bf16"

    def _streams(self, changes: list[Changed]) -> list[bytes]:
        places = np.concatenate([change.places.astype(np.int32) for change in changes])
        return [places.tobytes(), np.concatenate([change.after for change in changes]).tobytes()]

    def _read(self, streams: list[bytes]) -> tuple[Places, Values]:
        return np.frombuffer(streams[0], np.int32), np.frombuffer(streams[1], np.int16)


class Gaps(Listed):
    """Gaps between places in 16 bits, or 32 more where they are large, and values, through zstd."""

    def __init__(self, level: int, xor: bool) -> None:
        values = "XOR" if xor else "bf16"
        self.label = f"gaps + {values}, zstd-{level}"
        self._level, self._xor = level, xor

    def _streams(self, changes: list[Changed]) -> list[bytes]:
        gaps = np.concatenate([np.diff(change.places, prepend=-1) - 1 for change in changes])
        large = gaps >= ESCAPE
        values = [c.after ^ c.before if self._xor else c.after for c in changes]
        compressor = zstandard.ZstdCompressor(self._level)
        return [
            compressor.compress(stream.data)
            for stream in (
                np.where(large, ESCAPE, gaps).astype(np.uint16),
                gaps[large].astype(np.uint32),
                np.concatenate(values),
            )
        ]

    def _read(self, streams: list[bytes]) -> tuple[Places, Values]:
        small, large, values = (zstandard.ZstdDecompressor().decompress(one) for one in streams)
        gaps = np.frombuffer(small, np.uint16).astype(np.int64)
        gaps[gaps == ESCAPE] = np.frombuffer(large, np.uint32)
        return gaps, np.frombuffer(values, np.int16)

    def _places(self, told: Places) -> Places:
        return np.cumsum(told + 1) - 1

    def _write(self, bits: Values, places: Places, values: Values) -> None:
        bits[places] = bits[places] ^ values if self._xor else values


class Dense:
    """The XOR of all elements, changed or not, through zstd."""

    label = "XOR of all, zstd-1"

    def encode(self, now: Weights, old: Weights) -> Iterator[bytes]:
        compressor = zstandard.ZstdCompressor(1)
        for name, tensor in old.items():
            yield compressor.compress((bits_of(tensor) ^ bits_of(now[name])).numpy().data)

    def apply(self, target: Weights, message: Message) -> None:
        for tensor, frame in zip(target.values(), message, strict=True):
            bits = bits_of(tensor).numpy()
            bits ^= np.frombuffer(zstandard.ZstdDecompressor().decompress(frame), np.int16)


WAYS: tuple[Way, ...] = (
    Sparcel("exponents"),
    Sparcel("steps"),
    Sparcel("values"),
    Plain(),
    Gaps(1, xor=False),
    Gaps(1, xor=True),
    Gaps(3, xor=True),
    Dense(),
)


def same(weights: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> bool:
    """Tell whether weights are the same, bit for bit."""
    return all(torch.equal(bits_of(weights[name]), bits_of(one)) for name, one in others.items())
