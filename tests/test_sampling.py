"""Sampled pairs leave out no value."""

from hypothesis import given
from hypothesis import strategies as st

from tests.sampling import meeting

few = st.integers(1, 15)


@given(few, few, few)
def test_every_value_meets_as_many_as_asked_for_and_is_met(one: int, other: int, each: int) -> None:
    pairs = meeting(range(one), range(other), each)
    assert len(pairs) == len(set(pairs))
    for value in range(one):
        assert sum(first == value for first, _ in pairs) >= min(each, other)
    met = [sum(second == value for _, second in pairs) for value in range(other)]
    assert min(met) >= 1
    assert each > other or one < other or max(met) - min(met) <= each
