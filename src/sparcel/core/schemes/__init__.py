"""Schemes: turn each rank's gradient into one update, the same on all ranks; made by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TypedDict, Unpack

from sparcel.core._checks import check_type
from sparcel.core.formats import FewBits, Format
from sparcel.core.memory import Memory
from sparcel.core.schemes.auto import Auto
from sparcel.core.schemes.base import Scheme
from sparcel.core.schemes.dense import Dense
from sparcel.core.schemes.density import checked_density, front_loaded, front_loaded_shares
from sparcel.core.schemes.from_papers import (
    ScaleCom,
    SparCML,
    dgc,
    hitopk,
    mstopk,
    torus2d,
)
from sparcel.core.schemes.hierarchical import Hierarchical
from sparcel.core.schemes.selecting import GTopK, OkTopK, Selecting, TopK
from sparcel.core.schemes.sparsifier import Bidirectional, Sparsifier
from sparcel.core.schemes.step import Costs, Layer, Outcome, Request, named
from sparcel.core.selectors import Selector
from sparcel.errors import InputError, checked_name, warn_on_rank_0

__all__ = [
    "DEFAULT",
    "ON_NODES",
    "RECOMMENDED",
    "SCHEMES",
    "SEND_ALL",
    "SPARSER",
    "UNDER_MUON",
    "Auto",
    "Bidirectional",
    "Costs",
    "Dense",
    "GTopK",
    "Hierarchical",
    "Layer",
    "Memory",
    "OkTopK",
    "Outcome",
    "Request",
    "ScaleCom",
    "Scheme",
    "Selecting",
    "Settings",
    "SparCML",
    "Sparsifier",
    "TopK",
    "checked_density",
    "chosen_scheme",
    "dgc",
    "front_loaded",
    "front_loaded_shares",
    "hitopk",
    "mstopk",
    "named",
    "scheme",
    "suits_muon",
    "torus2d",
]


class Settings(TypedDict, total=False):
    """What `sparcel.scheme` and `sparcel.attach` take by name; each scheme takes some of them.

    The schemes' own classes and functions describe them and hold their defaults.
    """

    algorithm: str
    answer: str | Format | None
    beta: float
    beta_steps: int | None
    beta_switch: str | None
    bits: int | None
    boundary_steps: int | None
    candidates: Sequence[str]
    clip: float | None
    density: float
    format: str | Format
    momentum: float
    put_back: str
    ranks_per_node: int | None
    returned: float | None
    seed: int | None
    selector: str | Selector
    threshold: str
    threshold_steps: int | None
    warmup: Sequence[float]
    warmup_steps: int | None
    wire: str | None


SCHEMES: dict[str, Callable[..., Scheme]] = {
    "bidirectional": Bidirectional,
    "dense": Dense,
    "topk": TopK,
    "auto": Auto,
    "gtopk": GTopK,
    "oktopk": OkTopK,
    "scalecom": ScaleCom,
    "hitopk": hitopk,
    "torus2d": torus2d,
    "sparcml": SparCML,
    "mstopk": mstopk,
    "dgc": dgc,
}
"""All schemes, by name; those that most people need come first."""

ON_NODES = ("hitopk", "torus2d")
"""Those that take ``ranks_per_node``, and have no use where every rank is a node."""

SEND_ALL = ("dense", "torus2d")
"""Those that select nothing, and so take no density."""

DEFAULT = "bidirectional"
"""The scheme where none is named."""

RECOMMENDED: Settings = {"density": 1.0, "format": "packed:5"}
"""What `DEFAULT` is set to where no scheme is named."""

_MUON_BITS = 8

SPARSER: Settings = {"density": 0.1, "format": "packed:4"}
"""The same for slow links: half the bytes or less, but coordinates wait."""

UNDER_MUON: Settings = {"density": 1.0, "format": f"packed:{_MUON_BITS}"}
"""The same where Muon trains, which makes small directions of a matrix as long as large ones."""


def scheme(name: str | None = None, **settings: Unpack[Settings]) -> Scheme:
    """Make the scheme of that name, or the one that is recommended.

    Parameters
    ----------
    name
        ``"dense"``, ``"bidirectional"``, ``"topk"``, ``"sparcml"``, ``"gtopk"``, ``"oktopk"``,
        ``"scalecom"``, ``"hitopk"`` or ``"torus2d"``; ``"mstopk"`` or ``"dgc"`` for top-k with
        MSTopK's selector or DGC's rules; ``"auto"`` for the method that is the fastest here. A
        scheme that is named has a density of 1 % (``"dgc"`` 0.1 %) and sends ``"raw"`` streams.
        None for ``"bidirectional"`` with ``density=1, format="packed:5"``, where ``settings`` do
        not differ: every coordinate, and every sum, in 5 bits.
    settings
        The scheme's parameters, some of `Settings`: see `Dense`, `Bidirectional`, `TopK`,
        `SparCML`, `GTopK`, `OkTopK`, `ScaleCom`, `Auto`, `hitopk`, `torus2d`, `mstopk` and `dgc`.
        `Hierarchical` runs any of them on two levels.

    Raises
    ------
    InputError
        For a name or a setting that does not exist, or a value out of range.

    Warns
    -----
    SparcelWarning
        For ``density=1`` in a format that rounds nothing: it may be meant as 1 %.
    """
    if name is None:
        name, settings = DEFAULT, RECOMMENDED | settings
    kind = SCHEMES[checked_name(name, SCHEMES, "the name of a scheme")]
    accepted = list(inspect.signature(kind).parameters)
    for setting in settings:
        checked_name(setting, accepted, f"a setting of scheme {name!r}")
    made = kind(**settings)
    inner = made.inner if isinstance(made, Hierarchical) else made
    formats = (getattr(inner, name, None) for name in ("format", "answer"))
    rounds = any(isinstance(one, Format) and one.loses for one in formats)
    rounds = rounds and not isinstance(made, Auto)
    if settings.get("density") == 1 and not rounds:
        warn_on_rank_0(
            "density=1 sends the whole gradient; for 1 % pass density=0.01, and for the whole"
            ' gradient the scheme "dense"'
        )
    return made


def suits_muon(one: Scheme) -> bool:
    """Tell whether a scheme sends all, in as many bits as are recommended under Muon."""
    one = one.inner if isinstance(one, Hierarchical) else one
    if not isinstance(one, Sparsifier) or one.density < 1:
        return isinstance(one, Dense)
    formats = (one.format, getattr(one, "answer", None))
    codes = [code.value_code for code in formats if isinstance(code, Format)]
    return all(code.bits >= _MUON_BITS for code in codes if isinstance(code, FewBits))


def chosen_scheme(
    scheme_or_name: Scheme | str | None, settings: Settings, muon: bool = False
) -> Scheme:
    """Return a scheme that is given, or the one that `scheme` makes.

    ``muon`` tells whether Muon trains with it.

    Raises
    ------
    InputError
        When settings are given beside a scheme, which has its own, and as `scheme` raises.
    """
    if scheme_or_name is None and muon:
        scheme_or_name, settings = DEFAULT, UNDER_MUON | settings
    if scheme_or_name is None or isinstance(scheme_or_name, str):
        return scheme(scheme_or_name, **settings)
    check_type(scheme_or_name, Scheme, "scheme", "sparcel.scheme('topk') makes one")
    if settings:
        raise InputError(
            f"settings go with a scheme's name; this scheme has its own, got {settings}"
        )
    return scheme_or_name
