"""Auto: all ranks choose the same method, and nothing is lost when the choice changes."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sparcel
from sparcel import simulate
from sparcel.errors import CommunicationError, InputError, MismatchError
from sparcel.schemes import Auto, Dense, Request
from sparcel.schemes import _contest as contest
from tests.schemes.steps import integers, normal, total
from tests.strategies import same_bits

WAYS = ("dense", "topk", "gtopk", "oktopk")
seconds = st.fixed_dictionaries(dict.fromkeys(WAYS, st.integers(1, 1000)))


class Watch:
    """A clock that advances by given times of steps, which are longer on some ranks."""

    def __init__(self, scheme, true, delay):
        self.scheme, self.true, self.delay = scheme, true, delay
        self.now, self.runs = 0.0, False

    def __call__(self):
        if self.runs:
            self.now += self.true[self.scheme.chosen] + self.delay
        self.runs = not self.runs
        return self.now


def timed(comm, true, **settings):
    """Return a scheme whose steps take the times in ``true``, and longer on higher ranks."""
    scheme = Auto(**{"density": 0.1, **settings})
    scheme._clock = Watch(scheme, true, delay=0.37 * comm.rank)
    return scheme


def shorten_windows(monkeypatch):
    """Shorten windows, so that a few dozen steps contain many agreements and all trials."""
    monkeypatch.setattr(contest, "STEADY_STEPS", 4)
    monkeypatch.setattr(contest, "TRIAL_STEPS", 2)
    monkeypatch.setattr(contest, "STALE_STEPS", 12)
    monkeypatch.setattr(contest, "LOST_SHARE", 0.9)


@pytest.fixture
def short_windows(monkeypatch):
    shorten_windows(monkeypatch)


def predicting(monkeypatch, predicted):
    monkeypatch.setattr(
        Auto, "_predict", lambda self, *_: {way: predicted[way] for way in self.candidates}
    )


def train(comm, true, steps, size, gradient=integers, **settings):
    """Return each step's choice and update, and what is owed at the end."""
    scheme, outcomes = timed(comm, true, **settings), []
    for step in range(steps):
        update = scheme.step(gradient(comm.rank, step, size), comm)
        outcomes.append((scheme.chosen, update))
    return outcomes, scheme.owed


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 8, 17])
@given(predicted=seconds, true=seconds)
@settings(max_examples=3)
def test_all_ranks_choose_the_same_method_and_lose_nothing(world, predicted, true):
    with pytest.MonkeyPatch.context() as patch:
        shorten_windows(patch)
        predicting(patch, predicted)
        results = simulate(world, lambda comm: train(comm, true, 40, 60, normal)).results
    chosen = [[way for way, _ in outcomes] for outcomes, _ in results]
    assert all(ways == chosen[0] for ways in chosen)
    for step in range(40):
        assert all(same_bits(o[step][1], results[0][0][step][1]) for o, _ in results)
    went_in = total(normal(rank, step, 60) for rank in range(world) for step in range(40))
    came_out = world * total(update for _, update in results[0][0])
    kept = total(owed for _, owed in results)
    torch.testing.assert_close(came_out + kept, went_in, rtol=0, atol=1e-3)


def misled(monkeypatch):
    """Return predictions in which the worst method looks the best."""
    shorten_windows(monkeypatch)
    predicting(monkeypatch, {"dense": 36, "topk": 30, "gtopk": 50, "oktopk": 40})


def corrected(comm):
    true = {"dense": 20, "topk": 90, "gtopk": 10, "oktopk": 70}
    return train(comm, true, 160, 100)


def corrected_in_a_process(comm):
    with pytest.MonkeyPatch.context() as patch:
        misled(patch)
        return corrected(comm)


def assert_corrected(results):
    ways = [way for way, _ in results[0][0]]
    assert set(ways) == set(WAYS)
    assert ways[:5] == ["topk"] * 5
    assert ways.count("gtopk") > 70
    assert all([way for way, _ in outcomes] == ways for outcomes, _ in results)
    went_in = total(integers(rank, step, 100) for rank in range(4) for step in range(160))
    came_out = 4 * total(update for _, update in results[0][0])
    assert torch.equal(came_out + total(owed for _, owed in results), went_in)


def test_a_wrong_prediction_is_corrected_in_the_same_step_everywhere(monkeypatch):
    misled(monkeypatch)
    assert_corrected(simulate(4, corrected).results)


@pytest.mark.processes
def test_processes_correct_a_wrong_prediction_in_the_same_step(run_on):
    assert_corrected(run_on(4, corrected_in_a_process))


@pytest.mark.usefixtures("short_windows")
def test_without_correction_the_prediction_decides(monkeypatch):
    predicting(monkeypatch, {"dense": 6, "topk": 3, "gtopk": 5, "oktopk": 4})
    true = {"dense": 2, "topk": 9, "gtopk": 1, "oktopk": 7}
    results = simulate(3, lambda comm: train(comm, true, 60, 50, corrected=False)).results
    assert {way for outcomes, _ in results for way, _ in outcomes} == {"topk"}


@pytest.mark.usefixtures("short_windows")
@pytest.mark.parametrize(("world", "format"), [(1, "raw"), (2, "raw"), (4, "packed:4"), (8, "raw")])
def test_dense_steps_flush_the_memory_and_then_cost_what_dense_costs(monkeypatch, world, format):
    predicting(monkeypatch, {"dense": 5, "oktopk": 2})

    def on_rank(comm):
        candidates = ["oktopk", "dense"]
        scheme = timed(comm, {"dense": 1, "oktopk": 10}, candidates=candidates, format=format)
        plain, kept, costs = Dense(), [], []
        for step in range(24):
            gradient = integers(comm.rank, step, 128, torch.bfloat16)
            before = vars(comm.traffic).copy()
            update = scheme.step(gradient, comm)
            cost = {name: value - before[name] for name, value in vars(comm.traffic).items()}
            before = vars(comm.traffic).copy()
            begun = comm.run(lambda: plain.begin(gradient, comm))  # noqa: B023
            reference = begun.average.to_dense()
            plain.commit(begun)
            dense = {name: value - before[name] for name, value in vars(comm.traffic).items()}
            kept.append(None if scheme.memory is None else scheme.memory.clone())
            same = same_bits(update, reference)
            costs.append((scheme.chosen, same, cost == dense))
        return kept, costs

    for kept, costs in simulate(world, on_rank).results:
        ways = [way for way, *_ in costs]
        switch = ways.index("dense")
        assert ways[:switch] == ["oktopk"] * switch
        assert set(ways[switch:]) == {"dense"}
        assert not bool(kept[switch].any())  # this step sent everything kept back
        # From the agreement after that step on, memory is gone; agreements cost extra messages.
        assert all(memory is None for memory in kept[switch + 1 :])
        assert all(same for _, same, _ in costs[switch + 1 :])
        cheap = [is_cheap for *_, is_cheap in costs[switch + 1 :]]
        assert world == 1 or sum(cheap) >= 0.7 * len(cheap)


def test_loaded_memory_of_any_rank_is_sent():
    """One rank of three loaded a memory; the other ranks must take part in sending it."""

    def on_rank(comm):
        scheme = Auto(candidates=["dense"])
        owed = torch.ones(20) if comm.rank == 1 else None
        scheme.load_state_dict({"steps": 7, "memory": owed})
        updates = [scheme.step(torch.zeros(20), comm) for _ in range(3)]
        return updates, scheme.steps, scheme.memory

    for updates, steps, memory in simulate(3, on_rank).results:
        torch.testing.assert_close(3 * updates[0], torch.ones(20))
        assert not any(bool(update.any()) for update in updates[1:])
        assert (steps, memory) == (10, None)


@pytest.mark.usefixtures("short_windows")
def test_withheld_coordinates_are_owed_until_they_may_be_sent(monkeypatch):
    """A dense step that withholds coordinates keeps them; the next one sends them."""
    predicting(monkeypatch, {"dense": 5, "topk": 2})

    def on_rank(comm):
        scheme = timed(comm, {"dense": 1, "topk": 10}, candidates=["topk", "dense"])
        updates = []
        for step in range(12):
            gradient, request = integers(comm.rank, step, 64), Request()
            if comm.rank == 0 and step in range(5, 9):
                gradient[:8] = 0
                request = Request(withheld=[(0, 8)])
            updates.append(scheme.step(gradient, comm, request=request))
        return updates, scheme.chosen, scheme.owed

    results = simulate(4, on_rank).results
    went_in = total(integers(rank, step, 64) for rank in range(4) for step in range(12))
    for step in range(5, 9):
        went_in[:8] -= integers(0, step, 8)
    came_out = 4 * total(results[0][0])
    assert torch.equal(came_out + total(owed for *_, owed in results), went_in)
    assert results[0][1] == "dense"
    assert all(owed is None for *_, owed in results)


def test_dense_step_with_an_infinite_gradient_does_not_count():
    def on_rank(comm):
        scheme = Auto(candidates=["dense"])
        for step in range(3):
            gradient = integers(comm.rank, step, 50)
            if step == 1 and comm.rank == 1:
                gradient[3] = float("inf")
            update = scheme.step(gradient, comm)
            assert bool(update.isnan().all()) == (step == 1)
        return scheme.steps

    assert simulate(3, on_rank).results == [2, 2, 2]


def test_the_choice_follows_the_density_of_the_warm_up():
    def on_rank(comm):
        scheme = Auto(0.01, warmup=[1, 0.05], warmup_steps=2, corrected=False)
        chosen, predictions = [], []
        for step in range(6):
            scheme.step(normal(comm.rank, step, 5000), comm)
            chosen.append(scheme.chosen)
            predictions.append(scheme.predicted)
        return chosen, predictions

    for chosen, predictions in simulate(4, on_rank).results:
        assert chosen[:2] == ["dense", "dense"]
        assert "dense" not in chosen[2:]
        changes = [a != b for a, b in pairwise(predictions)]
        assert changes == [False, True, False, True, False]


def test_rates_decide_what_is_predicted():
    def on_rank(comm, bandwidth):
        comm.rates = sparcel.cost.stated_rates(bandwidth=bandwidth, latency_s=1e-6, ranks=4)
        scheme = Auto(0.05, corrected=False)
        for step in range(2):
            scheme.step(normal(comm.rank, step, 200_000), comm)
        return scheme.chosen

    assert set(simulate(4, lambda comm: on_rank(comm, 1e11)).results) == {"dense"}
    assert "dense" not in simulate(4, lambda comm: on_rank(comm, 1e7)).results


def test_rates_that_differ_are_an_error_on_all_ranks():
    def on_rank(comm):
        bandwidth = 1e9 if comm.rank == 2 else 1e8
        comm.rates = sparcel.cost.stated_rates(bandwidth=bandwidth, latency_s=1e-4, ranks=3)
        said = r"ranks \[.*\] predict other times than rank"
        with pytest.raises((MismatchError, CommunicationError), match=said):
            Auto().step(torch.ones(100), comm)

    simulate(3, on_rank)


def test_a_new_communicator_is_a_new_contest():
    schemes = [Auto(0.1, corrected=False) for _ in range(2)]
    for steps in (3, 1):
        simulate(
            2,
            lambda comm: [
                schemes[comm.rank].step(normal(comm.rank, step, 40), comm)
                for step in range(steps)  # noqa: B023
            ],
        )
    assert [scheme.steps for scheme in schemes] == [4, 4]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"candidates": []}, "some of"),
        ({"candidates": "topk"}, "got 'topk'"),
        ({"candidates": ["topk", "okktopk"]}, "did you mean 'oktopk'"),
        ({"density": 3}, "density=0.03"),
    ],
)
def test_settings_out_of_range(settings, said):
    with pytest.raises(InputError, match=said):
        sparcel.scheme("auto", **settings)


@pytest.mark.parametrize("gradient", [torch.ones(7), torch.ones(6, dtype=torch.float64)])
def test_another_vector_is_refused(gradient):
    def on_rank(comm):
        scheme = Auto(candidates=["dense"])
        scheme.step(torch.ones(6), comm)
        with pytest.raises(InputError, match="make one scheme for each vector"):
            scheme.step(gradient, comm)

    simulate(1, on_rank)
