"""Chunks in, weights out, all or nothing."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
    Set,
)
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Event
from typing import TypeAlias

import torch
from torch import Tensor, nn

from sparcel.delta.bits import bits_of
from sparcel.delta.change import Change
from sparcel.delta.chunk import Chunk, Version, read_chunk
from sparcel.delta.decoding import FETCH, found_in, new_tensors
from sparcel.delta.found import Found
from sparcel.delta.parts import Part, Weights, memory_of, owners, parts_of, tensors_of
from sparcel.delta.threads import in_pool, in_threads
from sparcel.delta.writable import check_writable
from sparcel.errors import InputError, VersionError, few, shown
from sparcel.training.names import model_names

Chunks: TypeAlias = Iterable[bytes | memoryview | Chunk]
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
    _gone: Mapping[str, Tensor] = field(repr=False)
    _added: Mapping[str, Tensor] = field(repr=False)
    _ties: Mapping[str, str] = field(repr=False)
    _copies: Mapping[str, str] = field(repr=False)
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


def write_in_turn(parts: Mapping[str, Part], chunks: Iterable[Chunk]) -> None:
    """Check and write chunk after chunk, each thread one at a time: little memory is needed.

    After an error some are written, and others not. New tensors are left out.
    """

    def write(chunk: Chunk) -> None:
        found_in(chunk, parts).swap(parts)

    for _ in in_threads(partial(write, chunk) for chunk in chunks if not chunk.new):
        pass


def prepare(target: Target, chunks: Chunks, since: Version | None = None) -> Prepared:
    """Decode and check all chunks of a version, and write nothing yet.

    The weights may go on serving meanwhile. What `Prepared.apply` has left to do is to write what
    changes. Parameters and errors are those of `apply_`.
    """
    if isinstance(chunks, bytes | bytearray | memoryview):
        raise InputError("a version may have several chunks: pass a list of chunks")
    module = isinstance(target, nn.Module)
    read = [one if isinstance(one, Chunk) else read_chunk(one) for one in chunks]
    check_together(read)
    known = set() if module else {piece.name for chunk in read for piece in chunk.pieces}
    tensors = tensors_of(target, known)
    parts = parts_of(tensors)
    check_writable(parts, target)
    base = read[0].base
    version = base.after(read[0].target, sum(chunk.sum for chunk in read))
    if since not in (None, base):
        raise VersionError(
            f"this delta makes version {version} of version {base}, but the weights are version"
            f" {since}; fetch what follows that one, or a full version"
        )
    found = list(in_threads(partial(found_in, chunk, parts) for chunk in read))
    new = new_tensors(one for one in found if one.chunk.new)
    leaving = {name for chunk in read for name in chunk.leaving}
    _check_names(module, version, tensors.keys(), new.keys(), leaving)
    after = {name: tensor for name, tensor in tensors.items() if name not in leaving} | new
    ties = {a: name for chunk in read for a, name in chunk.ties.items() if name in after}
    owner = owners(parts_of(tensors_of(after, None))) if ties else {}
    apart = {alias: name for alias, name in ties.items() if owner.get(alias) != owner[name]}
    copies = {}
    if module:
        copies = {alias: name for alias, name in apart.items() if alias in after}
        _check_copies(version, copies, parts)
    else:
        after |= {alias: after[name] for alias, name in apart.items()}
    return Prepared(
        base,
        version,
        after,
        sum(chunk.changed for chunk in read),
        target if module else tensors,
        parts,
        [one for one in found if one.chunk.code != "removed" and not one.chunk.new],
        _gone={name: one for name, one in tensors.items() if after.get(name) is not one},
        _added={name: one for name, one in after.items() if tensors.get(name) is not one},
        _ties={alias: name for alias, name in ties.items() if alias in after},
        _copies=copies,
    )


def check_together(chunks: list[Chunk], some: bool = False) -> None:
    """Raise VersionError unless chunks are all those of one version, or some and the last ones."""
    if not chunks:
        raise VersionError("there are no chunks to apply; a version has at least one")
    first = chunks[0]
    shards: dict[int, list[Chunk]] = defaultdict(list)
    for chunk in sorted(chunks, key=lambda chunk: chunk.part):
        told = (chunk.base, chunk.target, chunk.shards)
        if told != (first.base, first.target, first.shards):
            raise VersionError(
                f"chunks of different versions: {first.base} to {first.target}, and {chunk.base} to"
                f" {chunk.target}"
            )
        shards[chunk.shard].append(chunk)
    for shard in range(first.shards):
        there = [chunk.part for chunk in shards[shard]]
        last = [chunk.part for chunk in shards[shard] if chunk.last]
        numbers = sorted(set(there)) if some else list(range(len(there)))
        if not there or there != numbers or last != there[-1:]:
            raise VersionError(
                f"version {first.target} is not whole: of shard {shard} there are {len(there)}"
                f" chunks, of which the first are {there[:3]}, and the last one is {last[:3]};"
                " fetch it again"
            )
    pieces = Counter(p for chunk in chunks if chunk.code != "removed" for p in chunk.pieces)
    counts: Counter[str] = Counter()
    for piece, times in pieces.items():
        counts[piece.name] += piece.count * times
    twice = [
        shown(piece.name)
        for piece, times in pieces.items()
        if (times > 1 and piece.count) or counts[piece.name] > piece.size
    ]
    if twice:
        raise VersionError(
            f"version {first.target} has elements of {twice[0]} twice; one process encodes them, of"
            " those that hold the same"
        )


def _check_names(
    module: bool, version: Version, there: Set[str], added: Set[str], leaving: Set[str]
) -> None:
    """Raise VersionError unless a delta's new tensors can appear, and its old ones vanish."""
    if module and (added or leaving):
        names = ", ".join(few(sorted(added | leaving)))
        raise VersionError(
            f"version {version} has other tensors than the module, or ties others: {names}; begin"
            " with a module that has its tensors and ties"
        )
    already, missing = sorted(added & there - leaving), sorted(leaving - there)
    if already or missing:
        raise VersionError(
            f"these weights are not the base of version {version}: {few(already)} are there"
            f" already, and {few(missing)} are not; {FETCH}"
        )


def _check_copies(version: Version, copies: Mapping[str, str], parts: Mapping[str, Part]) -> None:
    """Raise VersionError unless the tensors to tie have the same dtype, shape and shard."""
    for alias, name in copies.items():
        if replace(parts[alias].piece, name=name) != parts[name].piece:
            raise VersionError(
                f"version {version} ties {shown(alias)} to {shown(name)}, which is unlike it here"
            )


def apply_(target: Target, chunks: Chunks, since: Version | None = None) -> Inverse:
    """Apply all chunks of a version, in any order, in place, or none of them.

    Nothing is written before all is checked: the sum of what each chunk changes, which counts old
    and new bits, must be the one that it states, and every chunk must be there once.

    Parameters
    ----------
    target
        A module, or tensors by name on any device. Tensors that appear or vanish need a mapping.
        DTensors must hold all elements of the chunks' pieces, as they do where they are cut as they
        were when these were encoded.
    chunks
        What `encode` made.
    since
        The version that ``target`` is; by default whatever the chunks say.

    Returns
    -------
    Inverse
        The version that ``target`` is now, and what it was. It holds the place and the old value of
        each changed element: six bytes for one of bfloat16.

    Raises
    ------
    FormatError
        If a chunk is torn or corrupt.
    VersionError
        If the chunks are for another version, or do not belong together.
    InputError
        If ``target`` has tensors that cannot be written element by element, or that have some in
        common without being tied as one. If it is a module whose state dict gives copies, as hooks
        make that cast or join parameters.
    """
    return prepare(target, chunks, since).apply()


def assign_(target: Weights, changes: Iterable[Change], *, partial: bool = False) -> None:
    """Write changes that were decoded and checked elsewhere.

    The target may hold its tensors on any device, and DTensors that are cut in any way: of each
    change it takes what it has.

    Parameters
    ----------
    target
        A module, or tensors by name. What wrappers put into names does not count.
    changes
        From `decode`, or from `Update.changes`, which tells a tied tensor under all its names.
    partial
        Whether what the target does not have is passed by, and what is gone stays as it is.

    Raises
    ------
    InputError
        If a tensor has another dtype or shape, is there under none of its names, or is gone; what
        was written before stays. If the target has tensors that `apply_` refuses.
    """
    given = parts_of(tensors_of(target, None))
    check_writable(given, target)
    parts = {name: given[own] for own, name in model_names(given).items()} | given
    names: dict[str, str] = {}
    gone, found, unknown = set[str](), set[str](), dict[str, str]()
    for change in changes:
        part = parts.get(change.name)
        if part and names.setdefault(part.piece.name, change.name) != change.name:
            raise InputError(
                f"'{shown(names[part.piece.name])}' and '{shown(change.name)}' both change, and"
                f" either may be '{shown(part.piece.name)}' of the weights; name tensors as the"
                " version does, and pass another one that does not begin with 'module.'"
            )
        if change.values is None:
            gone |= {part.piece.name} if part else set()
            continue
        owner = change.tied_to or change.name
        if part is None:
            unknown[change.name] = owner
            continue
        found.add(owner)
        gone.discard(part.piece.name)
        _check_change(part, change.values, change)
        here, places = part.places_of(change.indices)
        part.put(places, bits_of(change.values)[here])
    lacking = sorted(name for name, owner in unknown.items() if owner not in found)
    wrong = [f"{few(lacking)} change and are not in the weights"] if lacking else []
    wrong += [f"{few(sorted(gone))} are gone and still in the weights"] if gone else []
    if wrong and not partial:
        raise InputError(
            f"{', and '.join(wrong)}; name tensors as the version does, or pass partial=True"
        )


def _check_change(part: Part, values: Tensor, change: Change) -> None:
    """Raise InputError unless a change fits the part's tensor."""
    piece, indices = part.piece, change.indices
    kind = piece.dtype, piece.shape
    if kind != (change.dtype, change.shape) or kind != (values.dtype, change.shape):
        raise InputError(
            f"{shown(change.name)} is {piece.dtype} {list(piece.shape)}, and changes as"
            f" {change.dtype} {list(change.shape)} to values of {values.dtype}"
        )
    if indices.shape != values.shape or bool(((indices < 0) | (indices >= piece.size)).any()):
        raise InputError(
            f"{shown(change.name)} changes at {list(indices.shape)} indices to {list(values.shape)}"
            f" values; they must be as many, and below {piece.size}"
        )
