"""Parsing of counts, times and rates with units."""

from fractions import Fraction
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparcel.core import units
from sparcel.errors import InputError


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("16777216", 1 << 24),
        ("16Mi", 1 << 24),
        ("64 ki", 1 << 16),
        ("2Gi", 1 << 31),
        ("16M", 16_000_000),
        ("1k", 1000),
        (" 25.6M ", 25_600_000),
        ("7B", 7 * 10**9),
        ("7G", 7 * 10**9),
        ("0.5Ki", 512),
    ],
)
def test_counts(text: str, number: int) -> None:
    assert units.whole(text) == number


@given(st.integers(1, 10**9))
def test_decimals_count_exactly(thousandths: int) -> None:
    text = f"{thousandths // 1000}.{thousandths % 1000:03d}G"
    assert units.whole(text) == thousandths * 10**6


@pytest.mark.parametrize("text", ["", "0", "-1", "M", "4X", "1e6", "1,000", "nan", "5Ti", "0.0M"])
def test_count_refuses_other_text(text: str) -> None:
    with pytest.raises(InputError, match="optional unit: K, M") as caught:
        units.whole(text)
    assert repr(text) in str(caught.value)


def test_whole_refuses_fractions() -> None:
    with pytest.raises(InputError, match=r"must be a whole number, got '1\.5'"):
        units.whole("1.5")


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096),
        ("4 GiB", 1 << 32),
        ("500 MB", 500_000_000),
        ("1.5kb", 1500),
        ("1TiB", 1 << 40),
    ],
)
def test_bytes(text: str, size: int) -> None:
    assert units.nbytes(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1", "4 Gi", "4 PB"])
def test_bytes_refuse_other_text(text: str) -> None:
    with pytest.raises(InputError, match="a size is a number of bytes with a unit, such as 4 GiB"):
        units.nbytes(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("5s", 5.0), ("500ms", 0.5), (" 1.5 S", 1.5), ("100us", 1e-4), ("0s", 0.0)],
)
def test_times(text: str, seconds: float) -> None:
    assert units.seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "5", "-1s", "5m", "1e3s", "nans"])
def test_seconds_refuses_other_text(text: str) -> None:
    with pytest.raises(InputError, match="such as 5s; got") as caught:
        units.seconds(text)
    assert repr(text) in str(caught.value)


@given(st.integers(0, 10_000))
def test_a_share_is_a_number_or_a_percentage(number: int) -> None:
    assert units.share(f"{number / 100:.2f}%") == units.share(f"{number / 10_000:.4f}")


@pytest.mark.parametrize("text", ["", "%", "-1%", "1%%", "half", "1 percent"])
def test_texts_that_are_no_shares_are_named(text: str) -> None:
    with pytest.raises(InputError, match=r"such as 0\.1%; got") as caught:
        units.share(text)
    assert repr(text) in str(caught.value)


def test_rates_may_be_more_than_the_lab_can_emulate() -> None:
    assert units.bits_per_s("100gbit") == 10**11
    assert units.bits_per_s("2.5 Gbit") == 2_500_000_000


@given(st.integers(1, 10**9), st.integers(0, 10**6))
def test_a_share_of_a_count_is_rounded_up_as_the_decimal_that_was_typed(
    size: int, millionths: int
) -> None:
    assert units.share_of(millionths / 10**6, size) == ceil(Fraction(millionths, 10**6) * size)


@given(st.integers(1, 10**9), st.data())
def test_a_count_has_its_own_share(size: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(0, size))
    assert units.share_of(count / size, size) == count
