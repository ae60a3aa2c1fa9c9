"""Chunks in, weights out, all or nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

from torch import Tensor, nn

from sparcel.delta.bits import bits_of
from sparcel.delta.checks import check_copies, check_names, check_together, check_writable
from sparcel.delta.chunk import Chunk, Version, read_chunk
from sparcel.delta.decoding import Change, Found, found_in, new_tensors
from sparcel.delta.encoding import in_threads
from sparcel.delta.parts import Part, Weights, owners, parts_of, tensors_of
from sparcel.delta.step import Step, Target
from sparcel.errors import InputError, VersionError

Chunks: TypeAlias = Iterable[bytes | memoryview | Chunk]


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
    _step: Step = field(repr=False)

    @property
    def waits(self) -> bool:
        """Whether it can be undone."""
        return self._step.state == "written"

    def changes(self) -> Iterator[Change]:
        """Yield what has changed in each tensor, with the new values; of tied ones, in each."""
        return self._step.changes() if self.waits else iter(())

    def undo(self) -> None:
        """Make the weights what they were, bit for bit; this can be done once."""
        self._step.swap("written", "undone", self._step.added, self._step.gone)


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
    """

    base: Version
    version: Version
    tensors: Mapping[str, Tensor] = field(repr=False)
    _changed: int = field(repr=False)
    _step: Step = field(repr=False)

    @property
    def waits(self) -> bool:
        """Whether it can be written."""
        return self._step.state == "prepared"

    def apply(self) -> Inverse:
        """Write it, once; the weights must be what and where they were when it was prepared."""
        self._step.swap("prepared", "written", self._step.gone, self._step.added)
        return Inverse(self.base, self.version, self._changed, self._step)


def prepare(target: Target, chunks: Chunks, since: Version | None = None) -> Prepared:
    """Decode and check all chunks of a version, and write nothing yet.

    The weights may go on serving meanwhile. What `Prepared.apply` has left to do is to write what
    changes. Parameters and errors are those of `apply_`.
    """
    tensors, module = tensors_of(target), isinstance(target, nn.Module)
    parts = parts_of(tensors)
    check_writable(parts, target)
    seen, found = found_in_parts(parts, chunks, since)
    check_together(seen)
    base = seen[0].base
    version = base.after(seen[0].target, sum(chunk.sum for chunk in seen))
    new = new_tensors(one for one in found if one.chunk.new)
    leaving = {name for chunk in seen for name in chunk.leaving}
    check_names(module, version, tensors.keys(), new.keys(), leaving)
    after = {name: tensor for name, tensor in tensors.items() if name not in leaving} | new
    ties = {a: name for chunk in seen for a, name in chunk.ties.items() if name in after}
    owner = owners(parts_of(after)) if ties else {}
    apart = {alias: name for alias, name in ties.items() if owner.get(alias) != owner[name]}
    if not module:
        after |= {alias: after[name] for alias, name in apart.items()}
    copies = {alias: name for alias, name in apart.items() if module and alias in after}
    check_copies(version, copies, parts)
    step = Step(
        target,
        parts,
        [one for one in found if one.chunk.code != "removed" and not one.chunk.new],
        gone={name: one for name, one in tensors.items() if after.get(name) is not one},
        added={name: one for name, one in after.items() if tensors.get(name) is not one},
        ties={alias: name for alias, name in ties.items() if alias in after},
        copies=copies,
    )
    return Prepared(base, version, after, sum(chunk.changed for chunk in seen), step)


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


def assign_(target: Weights, changes: Iterable[Change]) -> None:
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
        If a tensor has another dtype or shape, or lacks elements that change; what was written
        before stays. If the target has tensors that `apply_` refuses.
    """
    parts = parts_of(target)
    check_writable(parts, target)
    for change in changes:
        part = parts.get(change.name)
        if part is None or change.values is None:
            continue
        _check_change(part, change.values, change)
        here, places = part.here(change.indices)
        part.put(places, bits_of(change.values)[here])


def _check_change(part: Part, values: Tensor, change: Change) -> None:
    """Raise InputError unless a change is one of a part's tensor."""
    piece, indices = part.piece, change.indices
    kind = piece.dtype, piece.shape
    if kind != (change.dtype, change.shape) or kind != (values.dtype, change.shape):
        raise InputError(
            f"{change.name} is {piece.dtype} {list(piece.shape)}, and changes as {change.dtype}"
            f" {list(change.shape)} to values of {values.dtype}"
        )
    if indices.shape != values.shape or bool(((indices < 0) | (indices >= piece.size)).any()):
        raise InputError(
            f"{change.name} changes at {list(indices.shape)} indices to {list(values.shape)}"
            f" values; they must be as many, and below {piece.size}"
        )


def found_in_parts(
    parts: Mapping[str, Part], chunks: Chunks, since: Version | None
) -> tuple[list[Chunk], list[Found]]:
    """Decode chunks and check them by what parts are; return them, and what they change."""
    if isinstance(chunks, bytes | bytearray | memoryview):
        raise InputError("a version may have several chunks: pass a list of chunks")
    seen: list[Chunk] = []
    found = list(in_threads(_jobs(parts, chunks, since, seen)))
    return seen, found


def _jobs(
    parts: Mapping[str, Part], chunks: Chunks, since: Version | None, seen: list[Chunk]
) -> Iterator[partial[Found]]:
    for data in chunks:
        chunk = data if isinstance(data, Chunk) else read_chunk(data)
        if since is not None and chunk.base != since:
            raise VersionError(
                f"this delta makes version {chunk.target} of version {chunk.base}, but the weights"
                f" are version {since}; fetch what follows that one, or a full version"
            )
        seen.append(chunk)
        yield partial(found_in, chunk, parts)
