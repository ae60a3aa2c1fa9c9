"""Schemes: one file a method, each short enough to read beside its paper."""

from __future__ import annotations

import inspect
from typing import Any

from sparcel.errors import known
from sparcel.schemes.base import Cost, Scheme
from sparcel.schemes.dense import Dense
from sparcel.schemes.gtopk import GTopK
from sparcel.schemes.sparcml import SparCML
from sparcel.schemes.topk import TopK

__all__ = ["SCHEMES", "Cost", "Dense", "GTopK", "Scheme", "SparCML", "TopK", "scheme"]

SCHEMES: dict[str, type[Scheme]] = {
    "dense": Dense,
    "topk": TopK,
    "sparcml": SparCML,
    "gtopk": GTopK,
}


def scheme(name: str, **settings: Any) -> Scheme:
    """Make the scheme of that name.

    Parameters
    ----------
    name
        ``"dense"``, ``"topk"``, ``"sparcml"`` or ``"gtopk"``.
    settings
        What the scheme's class takes: `Dense`, `TopK`, `SparCML`, `GTopK`.

    Raises
    ------
    InputError
        For a name or a setting that does not exist, or a value out of range.
    """
    kind = SCHEMES[known(name, SCHEMES, "scheme")]
    accepted = list(inspect.signature(kind).parameters)
    for setting in settings:
        known(setting, accepted, f"a setting of scheme {name!r}")
    return kind(**settings)
