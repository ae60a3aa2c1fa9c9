"""Chunks in, weights out, all or nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from sparcel import _cpu
from sparcel.delta.bits import bits_of
from sparcel.delta.checks import check_names, check_together, check_writable
from sparcel.delta.chunk import Chunk, Version, read_chunk
from sparcel.delta.decoding import Change, Found, check_sum, check_tensor, elements_of, found_in
from sparcel.delta.encoding import in_threads
from sparcel.delta.parts import Part, owners, parts_of
from sparcel.errors import FormatError, InputError, VersionError


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
    _tensors: MutableMapping[str, Tensor] = field(repr=False)
    _parts: Mapping[str, Part] = field(repr=False)
    _found: list[Found] = field(repr=False)
    _added: list[str] = field(repr=False)
    _gone: dict[str, Tensor] = field(repr=False)
    _copies: dict[str, str] = field(repr=False)

    def changes(self) -> Iterator[Change]:
        """Yield what has changed in each tensor, with the new values."""
        for name, tensor in self._gone.items():
            yield Change.gone(name, tensor.dtype, tuple(tensor.shape))
        for name in self._added:
            yield Change.whole(name, self._tensors[name])
        for found in self._found:
            for piece, places, _ in found.pieces():
                numbers = piece.numbers(places.sort().values)
                part = self._parts[piece.name]
                _, local = part.here(numbers.to(part.local.device))
                values = part.take(local).cpu().view(piece.dtype)
                yield Change(piece.name, piece.dtype, piece.shape, numbers, values)

    def undo(self) -> None:
        """Make the weights what they were, bit for bit; this can be done once."""
        swap_all(self._found, self._parts)
        for name in self._added:
            del self._tensors[name]
        self._tensors.update(self._gone)
        _copy(self._copies, self._tensors)
        self._found, self._added, self._gone = [], [], {}


@dataclass
class Prepared:
    """A delta that is decoded and checked, and waits to be written.

    Attributes
    ----------
    base
        The version that it applies to.
    version
        The version that it makes.
    """

    base: Version
    version: Version
    _target: nn.Module | MutableMapping[str, Tensor] = field(repr=False)
    _tensors: MutableMapping[str, Tensor] = field(repr=False)
    _parts: Mapping[str, Part] = field(repr=False)
    _chunks: list[Chunk] = field(repr=False)
    _found: list[Found] = field(repr=False)
    _added: dict[str, Tensor] = field(repr=False)
    _leaving: set[str] = field(repr=False)

    def apply(self) -> Inverse:
        """Write it; the weights must be what they were when it was prepared."""
        tensors = self._tensors
        swap_all(self._found, self._parts)
        gone = {name: tensors.pop(name) for name in self._leaving}
        tensors.update(self._added)
        added = list(self._added)
        told = {alias: name for chunk in self._chunks for alias, name in chunk.ties.items()}
        ties = _apart(tensors, told)
        if isinstance(self._target, nn.Module):
            _copy(ties, tensors)
        else:
            added += [alias for alias in ties if alias not in tensors]
            gone |= {alias: tensors[alias] for alias in ties if alias in tensors}
            tensors.update({alias: tensors[name] for alias, name in ties.items()})
            ties = {}
        changed = sum(chunk.changed for chunk in self._chunks)
        return Inverse(
            self.base,
            self.version,
            changed,
            tensors,
            self._parts,
            self._found,
            added,
            gone,
            ties,
        )


def prepare(
    target: nn.Module | MutableMapping[str, Tensor],
    chunks: Iterable[bytes | memoryview],
    since: Version | None = None,
) -> Prepared:
    """Decode and check all chunks of a version, and write nothing yet.

    The weights may go on serving meanwhile. What `Prepared.apply` has left to do is to write what
    changes. Parameters and errors are those of `apply_`.
    """
    tensors: MutableMapping[str, Tensor] = (
        target.state_dict() if isinstance(target, nn.Module) else target
    )
    parts = parts_of(tensors)
    check_writable(parts)
    seen, found = found_in_parts(parts, chunks, since)
    check_together(seen)
    added = _added([one for one in found if one.chunk.new])
    leaving = _names(seen, "removed") | {name for chunk in seen for name in chunk.untied}
    check_names(target, tensors, added, leaving)
    base = seen[0].base
    version = base.after(seen[0].target, sum(chunk.sum for chunk in seen))
    kept = [one for one in found if not one.chunk.new]
    return Prepared(base, version, target, tensors, parts, seen, kept, added, leaving)


def apply_(
    target: nn.Module | MutableMapping[str, Tensor],
    chunks: Iterable[bytes | memoryview],
    since: Version | None = None,
) -> Inverse:
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
        If ``target`` has tensors that cannot be written element by element.
    """
    return prepare(target, chunks, since).apply()


def assign_(target: nn.Module | MutableMapping[str, Tensor], changes: Iterable[Change]) -> None:
    """Write changes that were decoded and checked elsewhere.

    The target may hold its tensors on any device, and DTensors that are cut in any way: of each
    change it takes what it has.

    Parameters
    ----------
    target
        A module, or tensors by name. Names that it does not have are passed by.
    changes
        From `decode`, or from `Update.changes`.

    Raises
    ------
    InputError
        If a tensor has another dtype or shape; what was written before stays.
    """
    tensors = target.state_dict() if isinstance(target, nn.Module) else target
    parts = parts_of(tensors)
    for change in changes:
        part = parts.get(change.name)
        if part is None or change.values is None:
            continue
        if (part.piece.dtype, part.piece.shape) != (change.dtype, change.shape):
            raise InputError(
                f"{change.name} is {part.piece.dtype} {list(part.piece.shape)}, and changes as"
                f" {change.dtype} {list(change.shape)}"
            )
        here, places = part.here(change.indices)
        part.put(places, bits_of(change.values)[here])


def found_in_parts(
    parts: Mapping[str, Part], chunks: Iterable[bytes | memoryview], since: Version | None
) -> tuple[list[Chunk], list[Found]]:
    """Decode chunks and check them by what parts are; return them, and what they change."""
    seen: list[Chunk] = []
    found = list(in_threads(_jobs(parts, chunks, since, seen)))
    return seen, [one for one in found if one is not None]


def swap_all(found: Iterable[Found], parts: Mapping[str, Part]) -> None:
    """Exchange what was found for what parts are; if that fails, nothing is changed."""
    done: list[Found] = []

    def swap(one: Found) -> None:
        one.swap(parts)
        done.append(one)

    try:
        for _ in in_threads(partial(swap, one) for one in found):
            pass
    except BaseException:
        for one in done:
            one.swap(parts)
        raise


def _jobs(
    parts: Mapping[str, Part],
    chunks: Iterable[bytes | memoryview],
    since: Version | None,
    seen: list[Chunk],
) -> Iterator[partial[Found | None]]:
    for data in chunks:
        chunk = read_chunk(data)
        if since is not None and chunk.base != since:
            raise VersionError(
                f"this delta makes version {chunk.target} of version {chunk.base}, but the weights"
                f" are version {since}; fetch what follows that one, or a full version"
            )
        seen.append(chunk)
        yield partial(_found, chunk, parts)


def _found(chunk: Chunk, parts: Mapping[str, Part]) -> Found | None:
    """Check a chunk, and return what it changes; nothing if its tensors are gone."""
    if chunk.code != "removed":
        return found_in(chunk, None if chunk.new else parts)
    for piece in chunk.pieces:
        check_tensor(chunk, piece, parts)
    check_sum(chunk, -_cpu.delta_sum(elements_of(chunk, parts), chunk.layout.itemsize))
    return None


def _copy(names: Mapping[str, str], tensors: Mapping[str, Tensor]) -> None:
    """Copy tensors whose owners are others in a version, but which are not tied to them here."""
    for copy, name in names.items():
        bits_of(tensors[copy]).copy_(bits_of(tensors[name]))


def _apart(tensors: Mapping[str, Tensor], ties: Mapping[str, str]) -> dict[str, str]:
    """Return the ties between tensors that are not tied here."""
    owner = owners(parts_of(tensors))
    known = {alias: name for alias, name in ties.items() if name in tensors}
    return {alias: name for alias, name in known.items() if owner.get(alias) != owner[name]}


def _names(chunks: Iterable[Chunk], code: str) -> set[str]:
    return {piece.name for chunk in chunks if chunk.code == code for piece in chunk.pieces}


def _added(found: Iterable[Found]) -> dict[str, Tensor]:
    """Put new tensors together from their changes."""
    tensors: dict[str, Tensor] = {}
    counts: dict[str, int] = {}
    for one in found:
        for change in one.changes():
            assert change.values is not None, "new tensors have values"
            tensor = tensors.setdefault(change.name, torch.empty(change.shape, dtype=change.dtype))
            if (tensor.dtype, tuple(tensor.shape)) != (change.dtype, change.shape):
                raise FormatError(f"the new tensor {change.name!r} has pieces of several shapes")
            bits_of(tensor).view(-1)[change.indices] = bits_of(change.values)
            counts[change.name] = counts.get(change.name, 0) + len(change.indices)
    for name, tensor in tensors.items():
        if counts[name] != tensor.numel():
            raise VersionError(f"the new tensor {name!r} is there in part only")
    return tensors
