"""Auto: all ranks choose the same method, and nothing is lost when the choice changes."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sparcel
from sparcel import simulate
from sparcel.core.auto import fastest_format
from sparcel.core.schemes import Auto, Dense, Request
from sparcel.core.schemes.auto import CANDIDATES
from sparcel.errors import CommunicationError, InputError, MismatchError
from tests.schemes.steps import integers, normal, total
from tests.strategies import same_bits


def choosing(monkeypatch, ways):
    """Predict anew in each step, so that ``ways`` are chosen one after the other."""
    monkeypatch.setattr(
        Auto,
        "_predict",
        lambda self, *_: {way: float(way != ways[self.steps]) for way in CANDIDATES},
    )


def stepped(scheme, gradient, comm, **given):
    """Return the average of a step whose way is chosen anew unless it is that of the last."""
    if scheme.chosen != min(predicted := scheme._predict(), key=predicted.get):
        scheme._terms = ()
    return scheme.step(gradient, comm, **given)


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 8, 17])
@given(ways=st.lists(st.sampled_from(CANDIDATES), min_size=12, max_size=12))
@settings(max_examples=3)
def test_all_ranks_choose_the_same_method_and_lose_nothing(world, ways):
    def train(comm):
        scheme, updates, chosen = Auto(0.1), [], []
        for step in range(len(ways)):
            updates.append(stepped(scheme, normal(comm.rank, step, 60), comm))
            chosen.append(scheme.chosen)
        return chosen, updates, scheme.memory

    with pytest.MonkeyPatch.context() as patch:
        choosing(patch, ways)
        results = simulate(world, train).results
    assert all(chosen == ways for chosen, *_ in results)
    for updates in zip(*(updates for _, updates, _ in results), strict=True):
        assert all(same_bits(update, updates[0]) for update in updates)
    went_in = total(normal(rank, step, 60) for rank in range(world) for step in range(len(ways)))
    came_out = world * total(results[0][1])
    kept = total(owed for *_, owed in results)
    torch.testing.assert_close(came_out + kept, went_in, rtol=0, atol=1e-3)


@pytest.mark.parametrize(("world", "format"), [(1, "raw"), (2, "raw"), (4, "packed:4"), (8, "raw")])
def test_dense_steps_flush_the_memory_and_then_cost_what_dense_costs(monkeypatch, world, format):
    switch = 5
    choosing(monkeypatch, ["oktopk"] * switch + ["dense"] * 6)

    def on_rank(comm):
        scheme = Auto(0.1, format=format)
        plain, kept, costs = Dense(), [], []
        for step in range(switch + 5):
            gradient = integers(comm.rank, step, 128, torch.bfloat16)
            before = vars(comm.traffic).copy()
            update = stepped(scheme, gradient, comm)
            cost = {name: value - before[name] for name, value in vars(comm.traffic).items()}
            before = vars(comm.traffic).copy()
            begun = comm.run(lambda: plain.begin(gradient, comm))  # noqa: B023
            reference = begun.average.to_dense()
            plain.commit(begun)
            dense = {name: value - before[name] for name, value in vars(comm.traffic).items()}
            kept.append(None if scheme.memory is None else scheme.memory.clone())
            costs.append((same_bits(update, reference), cost == dense))
        return kept, costs

    for kept, costs in simulate(world, on_rank).results:
        assert not bool(kept[switch].any())  # this step sent everything kept back
        assert all(memory is None for memory in kept[switch + 1 :])
        assert all(same for same, _ in costs[switch + 1 :])
        assert all(cheap for _, cheap in costs[switch + 2 :])  # before, ranks tell what they keep


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


def test_withheld_coordinates_are_owed_until_they_may_be_sent(monkeypatch):
    """A dense step that withholds coordinates keeps them; the next one sends them."""
    choosing(monkeypatch, ["topk"] * 5 + ["dense"] * 8)

    def on_rank(comm):
        scheme, updates = Auto(0.1), []
        for step in range(12):
            gradient, request = integers(comm.rank, step, 64), Request()
            if comm.rank == 0 and step in range(5, 9):
                gradient[:8] = 0
                request = Request(withheld=[(0, 8)])
            updates.append(stepped(scheme, gradient, comm, request=request))
        return updates, scheme.chosen, scheme.memory

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
        scheme = Auto(0.01, warmup=[1, 0.05], warmup_steps=2)
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
        scheme = Auto(0.05)
        for step in range(2):
            scheme.step(normal(comm.rank, step, 200_000), comm)
        return scheme.chosen

    assert set(simulate(4, lambda comm: on_rank(comm, 1e11)).results) == {"dense"}
    assert "dense" not in simulate(4, lambda comm: on_rank(comm, 1e7)).results


def test_formats_are_chosen_by_the_rates_of_now():
    def on_rank(comm):
        scheme, chosen = sparcel.scheme("topk", density=0.01, format="auto"), []
        for bandwidth in (1e6, 1e11, 1e6):
            comm.rates = sparcel.cost.stated_rates(bandwidth=bandwidth, latency_s=1e-6, ranks=2)
            chosen.append(scheme.plan(torch.zeros(100_000), comm, Request()).format)
            assert chosen[-1] == fastest_format(100_000, 1000, comm.rates)
        assert chosen[0] != chosen[1]

    simulate(2, on_rank)


def test_rates_that_differ_are_an_error_on_all_ranks():
    def on_rank(comm):
        bandwidth = 1e9 if comm.rank == 2 else 1e8
        comm.rates = sparcel.cost.stated_rates(bandwidth=bandwidth, latency_s=1e-4, ranks=3)
        said = r"ranks \[.*\] predict other times than rank"
        with pytest.raises((MismatchError, CommunicationError), match=said):
            Auto().step(torch.ones(100), comm)

    simulate(3, on_rank)


def test_a_new_communicator_is_a_new_choice():
    schemes = [Auto(0.1) for _ in range(2)]
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
