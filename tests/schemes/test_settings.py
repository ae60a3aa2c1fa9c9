"""The typed settings of schemes, those that are refused, and the warning about a density of 1."""

from __future__ import annotations

import re
import warnings
from inspect import signature
from typing import Any

import pytest

import sparcel
from sparcel.core.schemes import (
    SCHEMES,
    SPARSER,
    Hierarchical,
    Scheme,
    Settings,
    chosen_scheme,
    scheme,
)
from sparcel.errors import InputError, SparcelWarning

WITH_DENSITY = [name for name in SCHEMES if "density" in signature(SCHEMES[name]).parameters]


def test_typed_settings_are_those_of_all_schemes() -> None:
    typed = {name: hint.__forward_arg__ for name, hint in Settings.__annotations__.items()}
    accepted = {
        (name, parameter.annotation)
        for kind in SCHEMES.values()
        for name, parameter in signature(kind).parameters.items()
    }
    assert accepted == set(typed.items())


@pytest.mark.parametrize("density", [1, 1.0])
@pytest.mark.parametrize("name", WITH_DENSITY)
def test_a_density_of_1_gets_the_hint_of_percentages(name: str, density: float) -> None:
    with pytest.warns(SparcelWarning, match="for 1 % pass density=0.01") as given:
        sparcel.scheme(name, density=density)
    assert [one.filename for one in given] == [__file__]


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("oktopk", {"threshold_steps": 32}, 'threshold_steps=32 needs threshold="reuse"'),
        ("oktopk", {"boundary_steps": 8}, 'boundary_steps=8 needs threshold="reuse"'),
        ("oktopk", {"threshold": "exact", "boundary_steps": 8}, "leave out boundary_steps"),
        ("scalecom", {"beta_steps": 9}, "beta_steps=9 ends the filter, but beta=1 filters nothing"),
        ("scalecom", {"beta": 0.1, "beta_steps": 0}, "beta_steps must be at least 1, got 0"),
        ("scalecom", {"beta": 0.1, "beta_switch": "memory"}, "and needs beta_steps"),
        ("scalecom", {"beta_switch": "owed"}, "beta_switch='owed' says what stays the same"),
        ("sparcml", {"seed": 0}, "seed=0 decides the rounding to few bits, and needs bits"),
    ],
)
def test_a_setting_that_changes_nothing_is_refused(
    name: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        sparcel.scheme(name, **settings)


@pytest.mark.parametrize(
    ("name", "settings", "explicit"),
    [
        ("oktopk", {"threshold": "reuse"}, {"threshold_steps": 32, "boundary_steps": 64}),
        ("scalecom", {"beta": 0.1, "beta_steps": 9}, {"beta_switch": "owed"}),
        ("sparcml", {"bits": 4}, {"seed": 0}),
    ],
)
def test_a_default_given_by_hand_is_the_same_scheme(
    name: str, settings: dict[str, Any], explicit: dict[str, Any]
) -> None:
    made = sparcel.scheme(name, **settings)
    assert repr(made) == repr(sparcel.scheme(name, **settings, **explicit)) == repr(made.fresh())


def test_other_densities_give_no_warning() -> None:
    with warnings.catch_warnings(action="error"):
        sparcel.scheme("topk", density=0.99, warmup=[1], warmup_steps=3).fresh()


def test_without_a_name_the_recommended_settings_hold_where_none_differ():
    def made(muon: bool = False, **settings: Any) -> str:
        return str(chosen_scheme(None, settings, muon))

    assert made() == str(scheme("bidirectional", density=1, format="packed:5"))
    assert made(density=0.05) == str(scheme("bidirectional", density=0.05, format="packed:5"))
    assert made(**SPARSER) == str(scheme("bidirectional", **SPARSER))
    assert made(muon=True) == str(scheme("bidirectional", density=1, format="packed:8"))
    with pytest.raises(InputError, match="a setting of scheme 'bidirectional'"):
        chosen_scheme(None, {"bits": 4})


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (scheme(), "Bidirectional(density=1.0, format='packed:5')"),
        (scheme("topk", selector="exact", clip=None), "TopK(density=0.01)"),
        (scheme("dense"), "Dense()"),
        (
            Hierarchical(scheme("scalecom", beta=0.1), ranks_per_node=4),
            "Hierarchical(ScaleCom(density=0.01, beta=0.1), ranks_per_node=4)",
        ),
    ],
)
def test_schemes_say_what_is_not_a_default(made: Scheme, said: str) -> None:
    assert str(made) == said
