"""A delta that is checked: written once, or undone once, or neither."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from functools import partial
from threading import Event
from typing import TypeAlias

import torch
from torch import Tensor, nn

from sparcel.delta.bits import bits_of
from sparcel.delta.decoding import FETCH, Change, Found
from sparcel.delta.encoding import in_pool
from sparcel.delta.parts import Part, memory_of, tensors_of
from sparcel.errors import VersionError

Target: TypeAlias = nn.Module | MutableMapping[str, Tensor]


@dataclass
class Step:
    """What a delta changes: values that wait to be exchanged for those of weights, and back."""

    target: Target
    parts: Mapping[str, Part]
    found: list[Found]
    gone: Mapping[str, Tensor]
    added: Mapping[str, Tensor]
    ties: Mapping[str, str]
    copies: Mapping[str, str]
    kept: dict[str, Tensor] = field(default_factory=dict)
    state: str = "prepared"

    def swap(self, before: str, after: str, gone: Iterable[str], new: Mapping[str, Tensor]) -> None:
        """Exchange values, and tensors that go for new ones; if that fails, nothing is changed."""
        if self.state != before:
            raise VersionError(f"this step is {self.state} already; prepare another one")
        tensors = tensors_of(self.target)
        self._check_there(tensors, gone)
        self.state = "torn"  # if an interrupt comes too late to undo all
        begun: list[Found] = []
        try:
            swap_all(self.found, self.parts, begun)
        except BaseException:
            self.state = "torn" if begun else before
            raise
        for name in gone:
            del tensors[name]
        tensors.update(new)
        for copy, name in self.copies.items():
            bits = bits_of(tensors[copy])
            old = bits.clone()
            bits.copy_(self.kept.get(copy, bits_of(tensors[name])))
            self.kept[copy] = old
        self.state = after

    def _check_there(self, tensors: Mapping[str, Tensor], gone: Iterable[str]) -> None:
        changing = {piece.name for one in self.found for piece in one.chunk.pieces}
        for name in sorted(changing | set(gone)):
            moved = name in changing and name in tensors
            moved = moved and memory_of(tensors[name]) != memory_of(self.parts[name].local)
            if name not in tensors or moved:
                raise VersionError(
                    f"{name!r} was replaced since this step was prepared; prepare again, or {FETCH}"
                )

    def changes(self) -> Iterator[Change]:
        """Yield what has changed, after it is written."""
        for name, tensor in self.gone.items():
            yield Change.gone(name, tensor.dtype, tuple(tensor.shape))
        for name, tensor in self.added.items():
            yield Change.whole(name, tensor)
        names: dict[str, list[str]] = {}
        for alias, name in self.ties.items():
            if alias not in self.added:
                names.setdefault(name, []).append(alias)
        for piece, places in ((p, places) for one in self.found for p, places, _ in one.pieces()):
            numbers = piece.numbers(places if places is None else places.sort().values)
            part = self.parts[piece.name]
            _, local = part.here(numbers.to(part.local.device))
            values = part.take(local).cpu().view(piece.dtype)
            for name in (piece.name, *names.get(piece.name, [])):
                yield Change(name, piece.dtype, piece.shape, numbers, values)


def swap_all(
    found: Iterable[Found], parts: Mapping[str, Part], begun: list[Found] | None = None
) -> None:
    """Exchange what was found for what parts are; if that fails, undo what is done.

    ``begun`` is filled with what may be exchanged. After an error it is empty if all is undone: a
    chunk in which the error came, or a second interrupt, may be written in part.
    """
    begun, done, ended = [] if begun is None else begun, list[Found](), Event()

    def swap(one: Found) -> None:
        begun.append(one)
        if not ended.is_set():
            one.swap(parts)
            done.append(one)

    try:
        # An interrupt could stop the thread that calls within a chunk.
        for _ in in_pool((partial(swap, one) for one in found), torch.get_num_threads()):
            pass
    except BaseException:
        ended.set()
        whole = len(begun) == len(done)
        for one in done:
            one.swap(parts)
        if whole:
            begun.clear()
        raise
