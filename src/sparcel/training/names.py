"""Names of parameters as the user's model has them, without what wrappers put into them."""

from __future__ import annotations

from collections.abc import Collection, Mapping

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
"""What `torch.compile` and torch's wrapper for activation checkpoints put into names."""


def model_name(name: str) -> str:
    """Return the name that a parameter has in the model before parts of it are wrapped."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def model_patterns(densities: Mapping[str, float], names: Collection[str]) -> dict[str, float]:
    """Return densities by patterns of the names in the model.

    Patterns may also be of the names in the wrapped model, which DDP begins with ``module.``.
    """
    prefix = "" if any(name.startswith("module.") for name in names) else "module."
    return {
        model_name(pattern).removeprefix(prefix): density for pattern, density in densities.items()
    }
