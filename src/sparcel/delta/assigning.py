"""Changes that were decoded elsewhere, written to weights of any kind."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from sparcel.delta.bits import bits_of
from sparcel.delta.change import Change
from sparcel.delta.parts import Part, Weights, parts_of, tensors_of
from sparcel.delta.writable import check_writable
from sparcel.errors import InputError, few, shown
from sparcel.training.names import model_names


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
