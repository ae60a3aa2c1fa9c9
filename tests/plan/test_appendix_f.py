"""ScaleCom's appendix F, as `benchmarks/appendix_f.py` computes it."""

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def appendix_f(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("appendix_f")


def test_numbers_near_those_of_the_paper(appendix_f):
    for _, paper, ours in appendix_f.claims():
        number = float(re.search(r"[\d.]+", paper)[0])
        assert ours < number if "<" in paper else ours == pytest.approx(number, rel=0.18)
