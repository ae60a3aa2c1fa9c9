"""Whole models: read from files, and written to weights that are there already."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

from sparcel.delta.applying import apply_
from sparcel.delta.bits import bits_of
from sparcel.delta.chunk import Version
from sparcel.delta.files import File
from sparcel.delta.parts import Weights, memory_of, owners, parts_of, tensors_of, untied
from sparcel.delta.prepared import Target
from sparcel.delta.slices import Sliced
from sparcel.delta.writable import check_writable
from sparcel.errors import FormatError, VersionError, few, shown

_PARAMETRISED = ".parametrizations."
"""How torch names what a parametrisation keeps in the place of a tensor."""


class Whole:
    """A whole model that is read and checked, and waits to be written."""

    def __init__(
        self,
        version: Version,
        tensors: Mapping[str, Tensor],
        target: Target,
        given: Mapping[str, Tensor],
        strict: bool,
        newest: Version,
    ) -> None:
        check_writable(parts_of(target), target)
        self.waits = True
        self._tensors, self._target, self._there = tensors, target, _memory(target)
        self._places = check_places(version, tensors, target, given, strict, newest)
        parts = untied(parts_of(self._places)).items()
        self._written = {n: part for n, part in parts if self._places[n] is not tensors[n]}

    def apply(self) -> None:
        """Write it into the target's tensors; a mapping also gets the tensors that it lacks."""
        if _memory(self._target) != self._there:
            raise VersionError("tensors were replaced since this was prepared; prepare again")
        self.waits = False
        for name, part in self._written.items():
            part.bits.copy_(bits_of(self._tensors[name]).view(part.bits.shape))
        if not isinstance(self._target, nn.Module):
            for name in self._there.keys() - self._places.keys():
                del self._target[name]
            self._target.update(self._places)
        if isinstance(self._target, Sliced) and isinstance(self._tensors, Sliced):
            self._target.pieces = self._tensors.pieces


def _memory(target: Target) -> dict[str, object]:
    return {name: memory_of(tensor) for name, tensor in tensors_of(target).items()}


def check_places(
    version: Version,
    theirs: Mapping[str, Tensor],
    target: Weights,
    given: Mapping[str, Tensor],
    strict: bool,
    newest: Version,
) -> dict[str, Tensor]:
    """Return for each tensor of a version the target's tensor that takes its values.

    It is the version's own tensor where the target has none. Tied ones are one tensor. Errors also
    name the version ``newest``, to which the other one is a step.

    Raises
    ------
    VersionError
        If a tensor of a module, or one that was given, would have to be another one. If they are
        ``strict``, also if the version or the target has a tensor that the other one lacks under
        all its names.
    """
    ours = tensors_of(target)
    there, here = owners(parts_of(theirs)), owners(parts_of(ours))
    kept = {name for name, one in given.items() if ours.get(name) is one}
    first: dict[str, str] = {}
    taken: set[str] = set()
    for name in sorted(theirs.keys() & ours.keys()):
        free = there[name] not in first and here[name] not in taken
        if free and _kind(theirs[name]) == _kind(ours[name]):
            first[there[name]] = name
            taken.add(here[name])
    places = {}
    for name, tensor in theirs.items():
        at = first.get(there[name])
        if at is None:
            places[name] = tensor
        else:  # its own tensor object, where that has the same memory
            places[name] = ours[name if here.get(name) == here[at] else at]
    is_module = isinstance(target, nn.Module)
    must = theirs.keys() | ours.keys() if is_module else kept & theirs.keys()
    wrong = {name for name in must if places.get(name) is not ours.get(name)}
    if strict:
        wrong |= {name for name in theirs if there[name] not in first}
        wrong |= {name for name in ours if here[name] not in taken}
    if wrong:
        on_the_way = "" if newest == version else f", on the way to version {newest},"
        partly = "" if is_module else ", or with partial=True, if one side may have fewer tensors"
        raise VersionError(
            f"version {version}{on_the_way} has other tensors than the weights given, or ties"
            f" others: {_difference(sorted(wrong, key=_plainly), theirs, ours)}; begin with weights"
            f" that have its tensors and ties, or without any{partly}"
        )
    return places


def _plainly(name: str) -> tuple[bool, str]:
    """Order names by how much they tell of what is wrong."""
    return _PARAMETRISED not in name, name


def _kind(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def _difference(
    wrong: Sequence[str], theirs: Mapping[str, Tensor], ours: Mapping[str, Tensor]
) -> str:
    """Say which tensors one side lacks, or else how the first one differs."""
    extra = [name for name in wrong if name not in theirs]
    lacking = [name for name in wrong if name not in ours]
    if extra or lacking:
        told = [f"have {_first_of(extra)} that the version lacks"] if extra else []
        told += [f"lack {_first_of(lacking)}"] if lacking else []
        why = ""
        if _PARAMETRISED in (name := wrong[0]):
            there = "version" if name in theirs else "weights"
            why = (
                f", because a parametrisation in the {there} computes a tensor from"
                f" '{shown(name)}'; do remove_parametrizations() there, or register the same ones"
                " on both sides"
            )
        return f"the weights {', and '.join(told)}{why}"
    name = wrong[0]
    if _kind(theirs[name]) != _kind(ours[name]):
        return f"'{shown(name)}' is {_kind(theirs[name])} there, and {_kind(ours[name])} here"
    tied, here = (_tied_to(name, those) or "none" for those in (theirs, ours))
    return f"'{shown(name)}' is tied to {tied} there, and to {here} here"


def _first_of(names: Sequence[str]) -> str:
    others = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"'{shown(names[0])}'{others}"


def _tied_to(name: str, tensors: Mapping[str, Tensor]) -> list[str]:
    owner = owners(parts_of(tensors))
    return few(other for other in owner if owner[other] == owner[name] and other != name)


def whole_of(files: list[File]) -> dict[str, Tensor]:
    """Return the tensors of a whole model: stored as such, or by several processes as chunks."""
    if files[0].whole:
        return {name: tensor for file in files for name, tensor in file.tensors().items()}
    whole: dict[str, Tensor] = {}
    with failing_as_file([file.name for file in files]):
        apply_(whole, [chunk for file in files for chunk in file.chunks()])
    return whole


@contextmanager
def failing_as_file(names: Sequence[str]) -> Iterator[None]:
    """Turn VersionError about what files hold into FormatError, so that others are looked for."""
    try:
        yield
    except VersionError as error:
        raise FormatError(f"{', '.join(names[:3])}: {error}") from error
