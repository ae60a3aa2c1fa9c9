"""The reference has every public name."""

import re
from pathlib import Path

import pytest

import sparcel
from sparcel import training

REFERENCE = Path(__file__).parents[1] / "docs" / "reference" / "api"


@pytest.mark.parametrize(
    ("page", "public"),
    [
        ("sparcel", {*sparcel.__all__} - {"__version__"}),
        ("training", {*training.__all__} - {*sparcel.__all__}),
    ],
)
def test_public_names_are_in_the_reference(page: str, public: set[str]) -> None:
    text = (REFERENCE / f"{page}.md").read_text()
    assert set(re.findall(r"^\.\. (?:auto\w+|py:data):: (\w+)$", text, re.MULTILINE)) == public
