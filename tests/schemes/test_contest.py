"""The contest: predictions decide first, then measurements, and trials lose little time."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from sparcel.schemes._contest import LOST_SHARE, STALE_STEPS, STEADY_STEPS, TRIAL_STEPS, Contest

WAYS = ("dense", "topk", "gtopk", "oktopk")
seconds = st.floats(1e-4, 10)
times = st.fixed_dictionaries(dict.fromkeys(WAYS, seconds))


def run(contest, true, steps):
    """Run steps that take the times in ``true``; return the choice of each step."""
    chosen = []
    for _ in range(steps):
        if contest.left == 0:
            contest.decide(contest.report())
        chosen.append(contest.chosen)
        contest.record(true[contest.chosen])
    return chosen


@given(predicted=times, true=times)
def test_best_predicted_way_runs_first_for_a_whole_window(predicted, true):
    chosen = run(Contest(predicted), true, 1 + STEADY_STEPS)
    assert set(chosen) == {min(predicted, key=predicted.get)}


@given(times)
def test_correct_prediction_is_kept(true):
    contest = Contest(true)
    best = min(true.values())
    for way in run(contest, true, 3000):
        assert true[way] == best or way != contest.chosen or contest.left <= TRIAL_STEPS


@given(predicted=times, true=times)
def test_trials_lose_no_more_than_their_share_of_the_time(predicted, true):
    """The first trial of each way is exempt, because only its prediction was known."""
    contest, spent, lost = Contest(predicted), 0.0, 0.0
    for _ in range(4000):
        (way,) = run(contest, true, 1)
        best = contest.best
        spent += true[way]
        lost += max(0.0, true[way] - true[best])
    assert lost <= LOST_SHARE * spent + (TRIAL_STEPS + 1) * sum(true.values())


def test_a_wrong_prediction_is_corrected():
    predicted = {"dense": 1.0, "topk": 0.1, "oktopk": 0.11}
    true = {"dense": 0.05, "topk": 0.3, "oktopk": 0.2}
    chosen = run(Contest(predicted), true, 4000)
    assert chosen[:65] == ["topk"] * 65
    assert chosen[65:69] == ["oktopk"] * 4
    assert chosen[-1] == "dense"
    assert chosen.count("dense") > 2500


def test_hopeless_ways_are_rarely_tried():
    predicted = {"dense": 100.0, "topk": 0.1}
    chosen = run(Contest(predicted), predicted, 5000)
    assert chosen.count("dense") == 0
    chosen = run(Contest({"dense": 10.0, "topk": 0.1}), predicted | {"dense": 10.0}, 10_000)
    assert 1 + TRIAL_STEPS <= chosen.count("dense") <= 2 * (1 + TRIAL_STEPS)


def test_a_network_that_changes_is_noticed():
    predicted = {"dense": 1.0, "topk": 0.1, "oktopk": 0.2}
    contest = Contest(predicted)
    assert run(contest, predicted, 500)[-1] == "topk"
    assert run(contest, predicted | {"topk": 0.5}, 500)[-1] == "oktopk"
    assert run(contest, predicted, STALE_STEPS + 500)[-1] == "topk"


def test_neighbours_do_not_alternate():
    true = {"topk": 0.1, "gtopk": 0.099, "oktopk": 0.102}
    chosen = run(Contest({"topk": 0.1, "gtopk": 0.11, "oktopk": 0.11}), true, 1000)
    switches = sum(a != b for a, b in pairwise(chosen))
    assert chosen[-1] == "topk"
    assert switches <= 4


def test_void_steps_count_for_the_schedule_and_not_for_the_time():
    contest = Contest({"topk": 0.1, "dense": 10.0})
    contest.record(5.0)
    contest.decide(contest.report())
    for _ in range(STEADY_STEPS):
        contest.record(1e-6, counts=False)
    assert contest.left == 0
    contest.decide(contest.report())
    assert contest.measured == {}
    assert contest.chosen == "topk"


@given(predicted=times, agreed=st.lists(st.floats(0, 10), max_size=30))
def test_ranks_with_equal_decisions_choose_the_same_way(predicted, agreed):
    one, other = Contest(predicted), Contest(predicted)
    for seconds in agreed:
        for contest, own in ((one, 1.0), (other, 77.0)):
            while contest.left:
                contest.record(own)
            contest.decide(seconds)
        assert (one.chosen, one.left, one.measured) == (other.chosen, other.left, other.measured)
