"""A growing array holds what was appended, wherever its segments end."""

from unittest import mock

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sparcel.rows._growing import Growing


@given(st.lists(st.integers(0, 20)), st.integers(1, 20))
def test_it_holds_what_was_appended(lengths: list[int], segment: int) -> None:
    numbers = np.arange(sum(lengths), dtype=np.int32)
    growing = Growing(np.int32)
    with mock.patch("sparcel.rows._growing.SEGMENT", segment):
        for part in np.split(numbers, np.cumsum(lengths)[:-1]) if lengths else ():
            growing.extend(part)
        assert growing.length == len(numbers)
        whole = growing.take()
    assert whole.dtype == np.int32 and whole.tolist() == numbers.tolist()
