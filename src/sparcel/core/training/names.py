"""Names of tensors as the user's model has them, without what wrappers put into them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Set

from sparcel.errors import InputError, shown

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
"""What `torch.compile`, torch's wrapper for activation checkpoints and its first FSDP put into
names."""

_PREFIX = "module."
"""What DDP and DataParallel begin all names with."""


def model_name(name: str) -> str:
    """Return the name that a parameter has in the model before parts of it are wrapped."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def model_names(names: Iterable[str], known: Set[str] | None = frozenset()) -> dict[str, str]:
    """Return for each name of a model's tensors the one before the model or parts are wrapped.

    ``module.`` is taken off where all names begin with it. So the names of a model that has one
    child of this name lose it, too, which hurts nobody who takes wrappers off on both sides.

    Parameters
    ----------
    names
        Of the model's tensors.
    known
        The other side's names, which may be of more tensors: ``module.`` stays if it is in a name
        that both sides have. None if it stays anyway.

    Raises
    ------
    InputError
        If several names become one.
    """
    plain = {name: model_name(name) for name in names}
    while (
        plain
        and known is not None
        and known.isdisjoint(plain.values())
        and all(name.startswith(_PREFIX) for name in plain.values())
    ):
        plain = {name: found.removeprefix(_PREFIX) for name, found in plain.items()}
    own: dict[str, str] = {}
    for name, found in plain.items():
        if (other := own.setdefault(found, name)) != name:
            raise InputError(
                f"'{shown(other)}' and '{shown(name)}' are both '{shown(found)}' without what"
                " wrappers put into names; leave one of them out"
            )
    return plain


def model_patterns(densities: Mapping[str, float], names: Collection[str]) -> dict[str, float]:
    """Return densities by patterns of the names in the model.

    Patterns may also be of the names in the wrapped model, which DDP begins with ``module.``.
    """
    prefix = "" if any(name.startswith(_PREFIX) for name in names) else _PREFIX
    return {
        model_name(pattern).removeprefix(prefix): density for pattern, density in densities.items()
    }
