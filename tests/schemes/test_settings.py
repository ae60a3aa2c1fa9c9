"""The typed settings of schemes, and the warning about a density of 1."""

from __future__ import annotations

import warnings
from inspect import signature

import pytest

import sparcel
from sparcel.errors import SparcelWarning
from sparcel.schemes import SCHEMES, Settings

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


def test_other_densities_give_no_warning() -> None:
    with warnings.catch_warnings(action="error"):
        sparcel.scheme("topk", density=0.99, warmup=[1], warmup_steps=3).fresh()
