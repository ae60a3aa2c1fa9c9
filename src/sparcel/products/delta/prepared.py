"""A delta that is decoded and checked: it is written, undone, and told of."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from dataclasses import dataclass, field, replace
from threading import Event
from typing import TypeAlias

import torch
from torch import Tensor, nn

from sparcel.core._threads import in_pool
from sparcel.errors import VersionError, shown
from sparcel.products.delta.chunk import Version
from sparcel.products.delta.decoding import FETCH, Change, Found
from sparcel.products.delta.elements import bits_of
from sparcel.products.delta.parts import Part, memory_of, owners, parts_of, tensors_of

Target: TypeAlias = nn.Module | MutableMapping[str, Tensor]


@dataclass
class Prepared:
    """A delta that is decoded and checked, and waits to be written.

    Attributes
    ----------
    base
        The version that it applies to.
    version
        The version that it makes.
    tensors
        The tensors that it makes.
    changed
        How many elements change; all of those that are sent whole.
    """

    base: Version
    version: Version
    tensors: Mapping[str, Tensor] = field(repr=False)
    changed: int
    _target: Target = field(repr=False)
    _parts: Mapping[str, Part] = field(repr=False)
    _found: list[Found] = field(repr=False)
    _ties: Mapping[str, str] = field(repr=False)
    _gone: Mapping[str, Tensor] = field(default_factory=dict, repr=False)
    _added: Mapping[str, Tensor] = field(default_factory=dict, repr=False)
    _copies: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Names of tensors that the version ties to others, but that the module keeps as copies."""
    _kept: dict[str, Tensor] = field(default_factory=dict, repr=False)
    _state: str = field(default="prepared", repr=False)

    @property
    def waits(self) -> bool:
        """Whether it can be written."""
        return self._state == "prepared"

    @property
    def sum(self) -> int:
        """What it adds to the sum of the tensors that stay."""
        return sum(one.chunk.sum for one in self._found)

    def places(self) -> Iterator[tuple[str, Tensor]]:
        """Yield which elements change (int64, ``[k]``), in parts of each tensor that stays."""
        for one in self._found:
            for piece, places, _ in one.pieces():
                yield piece.name, piece.numbers(places)

    def apply(self) -> Inverse:
        """Write it, once; the weights must be what and where they were when it was prepared."""
        self._exchange("prepared", "written", self._gone, self._added)
        return Inverse(self.base, self.version, self.changed, self)

    def _exchange(
        self, before: str, after: str, gone: Mapping[str, Tensor], added: Mapping[str, Tensor]
    ) -> None:
        """Exchange values, remove tensors and add others; if that fails, nothing is changed."""
        if self._state != before:
            raise VersionError(f"this delta is {self._state} already; prepare it again")
        tensors = tensors_of(self._target)
        self._check_there(tensors, gone)
        self._state = "torn"  # if an interrupt comes too late to undo all
        begun: list[Found] = []
        try:
            swap_all(self._found, self._parts, begun)
        except BaseException:
            self._state = "torn" if begun else before
            raise
        for name in gone:
            del tensors[name]
        tensors.update(added)
        for copy, name in self._copies.items():
            bits = bits_of(tensors[copy])
            old = bits.clone()
            bits.copy_(self._kept.get(copy, bits_of(tensors[name])))
            self._kept[copy] = old
        self._state = after

    def _check_there(self, tensors: Mapping[str, Tensor], gone: Iterable[str]) -> None:
        """Raise VersionError unless the tensors that change or go are still the same ones."""
        changing = {piece.name for one in self._found for piece in one.chunk.pieces}
        for name in sorted(changing.union(gone)):
            there = name in tensors
            if there and name in changing:
                there = memory_of(tensors[name]) == memory_of(self._parts[name].local)
            if not there:
                raise VersionError(
                    f"'{shown(name)}' was replaced since this delta was prepared; prepare it again,"
                    f" or {FETCH}"
                )

    def _in_place(self) -> Iterator[Change]:
        """Yield what differs in tensors that stay, with the values that are there now."""
        names: dict[str, list[str]] = defaultdict(list)
        for alias, name in self._ties.items():
            if alias not in self._added:
                names[name].append(alias)
        for change in (change for one in self._found for change in one.changes(self._parts)):
            yield change
            for name in names[change.name]:
                yield replace(change, name=name, tied_to=change.name)


@dataclass
class Inverse:
    """What `apply_` has changed, and how to undo it.

    Attributes
    ----------
    base
        The version that the weights were.
    version
        What they are now.
    changed
        How many elements have changed; all of those that were sent whole.
    """

    base: Version
    version: Version
    changed: int
    _prepared: Prepared = field(repr=False)

    @property
    def waits(self) -> bool:
        """Whether it can be undone."""
        return self._prepared._state == "written"

    @property
    def sum(self) -> int:
        """What it added to the sum of the tensors that stayed."""
        return self._prepared.sum

    def changes(self) -> Iterator[Change]:
        """Yield what has changed in each tensor, under each of its names, with the new values."""
        now = tensors_of(self._prepared._target)
        return changes_of([self.done()], now) if self.waits else iter(())

    def undo(self) -> None:
        """Make the weights what they were, bit for bit; this can be done once."""
        self._prepared._exchange("written", "undone", self._prepared._added, self._prepared._gone)

    def done(self) -> Done:
        """Return what was done last: the delta was written, or undone."""
        one = self._prepared
        gone, added = (one._gone, one._added) if self.waits else (one._added, one._gone)
        return Done(gone, added, one._in_place)


@dataclass(frozen=True)
class Done:
    """A delta that was written or undone: the tensors gone and added, and what changed in others.

    Its changes have the values that are there when they are asked for.
    """

    gone: Mapping[str, Tensor]
    added: Mapping[str, Tensor]
    in_place: Callable[[], Iterator[Change]]


def whole_changes(now: Mapping[str, Tensor], names: Collection[str]) -> Iterator[Change]:
    """Yield the changes that make those tensors that have one of the names."""
    parts = parts_of(now)
    for name, owner in owners(parts).items():
        if name in names:
            yield _whole(parts[name], None if name == owner else owner)


def _whole(part: Part, tied_to: str | None) -> Change:
    piece, values = part.piece, part.local.reshape(-1)
    return Change(piece.name, piece.dtype, piece.shape, piece.numbers(), values, True, tied_to)


def changes_of(steps: Sequence[Done], now: Mapping[str, Tensor]) -> Iterator[Change]:
    """Yield what differs after several steps, with the values that are there now.

    An element that several steps changed comes several times, each time with that value.
    """
    before: dict[str, Tensor | None] = {}
    for step in steps:
        for name in step.gone.keys() | step.added.keys():
            before.setdefault(name, step.gone.get(name))
    for name, tensor in before.items():
        if tensor is not None:
            yield Change.gone(name, tensor.dtype, tuple(tensor.shape))
    if before:
        yield from whole_changes(now, before)
    for step in steps:
        yield from (change for change in step.in_place() if change.name not in before)


def swap_all(
    found: Iterable[Found], parts: Mapping[str, Part], begun: list[Found] | None = None
) -> None:
    """Exchange the values of all chunks with those of the parts; if that fails, undo it.

    ``begun`` lists the chunks whose exchange has begun. After an error it is empty if all is
    undone, but not if the error came within a chunk, or after a second interrupt.
    """
    begun, done, ended = [] if begun is None else begun, list[Found](), Event()

    def swap(one: Found) -> None:
        begun.append(one)
        if not ended.is_set():
            one.swap(parts)
            done.append(one)

    try:
        # An interrupt could stop the thread that calls within a chunk.
        for _ in in_pool(swap, found, torch.get_num_threads()):
            pass
    except BaseException:
        ended.set()
        whole = len(begun) == len(done)
        for one in done:
            one.swap(parts)
        if whole:
            begun.clear()
        raise
