"""Parsing and printing of rates."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparcel.tools.lab import Link, parse_link, parse_rate


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


def test_a_link_is_told_by_its_rates_its_delay_and_its_loss() -> None:
    link = parse_link("110mbit/500mbit", "50ms", "0.1%")
    assert link == Link(110 * 10**6, down_bits_per_s=500 * 10**6, delay_s=0.05, loss=0.001)
    text = "110 Mbit/s up and 500 Mbit/s down, with a delay of 50 ms, with a loss of 0.1 %"
    assert str(link) == text
    assert parse_link("1gbit") == Link()
    assert str(parse_link("1gbit/1gbit", loss="0.25")) == "1 Gbit/s, with a loss of 25 %"


@pytest.mark.parametrize(
    ("told", "message"),
    [
        (("1gbit/",), "such as 1gbit; got ''"),
        (("/1gbit",), "such as 1gbit; got ''"),
        (("1gbit/10mbit/1mbit",), "got '10mbit/1mbit'"),
        (("1gbit/33gbit",), "between 64kbit and 32gbit, got '33gbit'"),
        (("1gbit", "-5ms"), "such as 5s; got '-5ms'"),
        (("1gbit", "11s"), "a delay must be 0 to 10 s, got 11 s"),
        (("1gbit", "0s", "1%%"), "such as 0.1%; got '1%%'"),
        (("1gbit", "0s", "1"), "a loss must be at least 0 and below 100%, got 100%"),
    ],
)
def test_what_is_no_link_is_named(told: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_link(*told)


@pytest.mark.parametrize("settings", [{"delay_s": -0.1}, {"delay_s": float("nan")}, {"loss": -0.1}])
def test_a_link_has_no_negative_delay_or_loss(settings: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be"):
        Link(**settings)  # type: ignore[arg-type]
