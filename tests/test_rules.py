"""Fingerprints of rules tell schemes apart by what they apply, and not by how they sum it."""

import pytest

from benchmarks.record import rule_of


def test_how_streams_are_summed_is_no_part_of_a_rule():
    other = {"algorithm": "ring", "warmup": [1], "warmup_steps": 9}
    assert rule_of("topk", {"algorithm": "allgather"}) == rule_of("topk", other)


@pytest.mark.parametrize(
    ("scheme", "changed"),
    [
        ("oktopk", {"put_back": "own"}),
        ("scalecom", {"beta": 0.9}),
        ("bidirectional", {"returned": 0.031}),
    ],
)
def test_what_is_applied_is(scheme, changed):
    assert rule_of(scheme, {}) != rule_of(scheme, changed)
