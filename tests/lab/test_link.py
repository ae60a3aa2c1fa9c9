"""Parsing and printing of rates."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparcel.lab import Link, parse_rate


@given(st.integers(1, 32_000))
def test_units_of_rates_agree(mbit: int) -> None:
    assert parse_rate(f"{mbit}mbit") == mbit * 10**6
    assert parse_rate(f"{mbit * 1000} kbit") == parse_rate(f"{mbit}Mbit")
    assert parse_rate(f"{mbit / 1000:.3f}gbit") == parse_rate(f"{mbit}mbit")


@pytest.mark.parametrize(
    "text", ["", "1", "gbit", "-1gbit", "1gb", "1e9bit", "1gbit/s", "nangbit", "0gbit"]
)
def test_texts_that_are_no_rates_are_named(text: str) -> None:
    with pytest.raises(ValueError, match=r"such as 1gbit.*; got") as caught:
        parse_rate(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("text", ["63kbit", "33gbit"])
def test_rates_that_the_kernel_cannot_limit_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="between 64kbit and 32gbit"):
        parse_rate(text)


def test_a_link_prints_its_rate_with_a_unit() -> None:
    assert str(Link()) == "1 Gbit/s"
    assert str(Link(2_500_000_000)) == "2.5 Gbit/s"
    assert str(Link(100_000_000)) == "100 Mbit/s"
    assert str(Link(64_000)) == "64 kbit/s"
