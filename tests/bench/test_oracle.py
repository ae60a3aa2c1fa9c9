"""The oracle agrees with the library, and counts wrong coordinates."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from sparcel import SparseStream, simulate
from sparcel.core.collectives import gathered_topk, gtopk
from sparcel.core.stream import reduce
from sparcel.core.wire import Wire
from sparcel.tools.bench import inputs
from sparcel.tools.bench.inputs import Case

CASES = st.builds(
    Case,
    st.integers(1, 300),
    st.floats(0.01, 1),
    st.sampled_from(["uniform", "clustered", "identical"]),
    st.integers(1, 6),
)


@given(CASES)
def test_right_results_have_nothing_wrong(case: Case) -> None:
    total = reduce(case.streams)
    assert inputs.count_wrong(total, case.total) == 0
    assert inputs.count_wrong(total.to_dense(), case.total) == 0
    largest = case.total.largest(case.k)
    gather = lambda c: gathered_topk(case.streams[c.rank], Wire(c), case.k).total  # noqa: E731
    exact = simulate(case.ranks, gather)
    for result in exact.results:
        assert inputs.count_wrong(result, largest) == 0
    tree = inputs.tree_largest(case.streams, case.k)
    by_tree = simulate(case.ranks, lambda c: gtopk(case.streams[c.rank], Wire(c), case.k).total)
    for result in by_tree.results:
        assert inputs.count_wrong(result, tree) == 0


@given(CASES, st.data())
def test_wrong_coordinates_are_counted(case: Case, data: st.DataObject) -> None:
    right = reduce(case.streams).to_dense()
    where = data.draw(st.sets(st.integers(0, case.size - 1)))
    right[list(where)] += 1
    assert inputs.count_wrong(right, case.total) == len(where)
    assert inputs.count_wrong(SparseStream.from_dense(right), case.total) == len(where)


def test_a_result_that_is_not_finite_has_only_wrong_coordinates() -> None:
    case = Case(100, 0.1, "uniform", 2)
    void = case.streams[0].empty_like()
    void.finite = False
    assert inputs.count_wrong(void, case.total) == 100
    assert inputs.count_wrong(torch.full((100,), torch.nan), case.total) == 100
