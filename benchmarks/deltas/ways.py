"""Ways to send what has changed in weights, sparcel's and others', for `measure.py`, `served.py`.

A message is one or more buffers, whose bytes all count. Only sparcel's says what it applies to, and
is checked before it is written; the others trust that it arrives whole, at the right weights.

NeMo-RL sends gaps, in the least width that holds them, and the XOR of values, through zstd-1
(docs/design-docs/sparse-delta-refit.md of its commit 5a257c43). slime, Miles and SkyRL send the XOR
of all elements through zstd-1 (slime's update_weight_from_disk_delta.py of its commit 06236d02).
verl sends indices and values as they are.
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

from sparcel.products import delta

Weights = dict[str, Tensor]
Message = Iterable[bytes]
Places = npt.NDArray[np.signedinteger]
Values = npt.NDArray[np.signedinteger]

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


INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def bits_of(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(INTEGERS[tensor.dtype.itemsize])


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
        places, values = self._read(streams)
        place = value = 0
        for count, tensor in zip(
            np.frombuffer(counted, np.uint32).tolist(), target.values(), strict=True
        ):
            bits = bits_of(tensor).numpy()
            new = np.frombuffer(values, bits.dtype, count, value)
            self._write(bits, self._places(places[place : place + count]), new)
            place, value = place + count, value + new.nbytes

    def _streams(self, changes: list[Changed]) -> list[bytes]:
        raise NotImplementedError

    def _read(self, streams: list[bytes]) -> tuple[Places, bytes]:
        raise NotImplementedError

    def _places(self, told: Places) -> Places:
        return told.astype(np.int64)

    def _write(self, bits: Values, places: Places, values: Values) -> None:
        bits[places] = values


class Plain(Listed):
    """Places as int32 and new values as they are."""

    label = "int32 + bf16"

    def _streams(self, changes: list[Changed]) -> list[bytes]:
        places = np.concatenate([change.places.astype(np.int32) for change in changes])
        return [places.tobytes(), _joined(change.after for change in changes)]

    def _read(self, streams: list[bytes]) -> tuple[Places, bytes]:
        return np.frombuffer(streams[0], np.int32), streams[1]


class Gaps(Listed):
    """Gaps between places in 16 bits, or 32 more where they are large, and values, through zstd."""

    def __init__(self, level: int, xor: bool) -> None:
        values = "XOR" if xor else "bf16"
        self.label = f"gaps + {values}, zstd-{level}"
        self._level, self._xor = level, xor

    def _streams(self, changes: list[Changed]) -> list[bytes]:
        gaps = np.concatenate([np.diff(change.places, prepend=-1) - 1 for change in changes])
        large = gaps >= ESCAPE
        values = (c.after ^ c.before if self._xor else c.after for c in changes)
        compressor = zstandard.ZstdCompressor(self._level)
        return [
            compressor.compress(stream.data)
            for stream in (
                np.where(large, ESCAPE, gaps).astype(np.uint16),
                gaps[large].astype(np.uint32),
                np.frombuffer(_joined(values), np.uint8),
            )
        ]

    def _read(self, streams: list[bytes]) -> tuple[Places, bytes]:
        small, large, values = (zstandard.ZstdDecompressor().decompress(one) for one in streams)
        gaps = np.frombuffer(small, np.uint16).astype(np.int64)
        gaps[gaps == ESCAPE] = np.frombuffer(large, np.uint32)
        return gaps, values

    def _places(self, told: Places) -> Places:
        return np.cumsum(told + 1) - 1

    def _write(self, bits: Values, places: Places, values: Values) -> None:
        bits[places] = bits[places] ^ values if self._xor else values


def _joined(values: Iterable[Values]) -> bytes:
    return b"".join(each.tobytes() for each in values)


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
            bits ^= np.frombuffer(zstandard.ZstdDecompressor().decompress(frame), bits.dtype)


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
