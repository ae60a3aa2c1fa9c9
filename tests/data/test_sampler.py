"""In each epoch the ranks read the set once, each node its part."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from sparcel import simulate
from sparcel.errors import InputError, MismatchError
from sparcel.products.data import Cached, PartSampler
from tests.data.sources import Files

GRIDS = [(1, 1), (2, 1), (3, 2), (1, 3), (5, 1)]
"""Nodes, and ranks of each."""


@st.composite
def settings(draw):
    nodes, sharing = draw(st.sampled_from(GRIDS))
    length = draw(st.integers(nodes * sharing, 60))
    shuffle = draw(st.booleans())
    exchange = draw(st.none() | st.integers(1, 3)) if shuffle else None
    named = {"shuffle": shuffle, "exchange_every": exchange, "seed": draw(st.integers(0, 3))}
    return nodes, sharing, length, {**named, "drop_last": draw(st.booleans())}


def epochs(nodes, sharing, length, named, numbers):
    """Return by epoch and rank what is read, and the parts of the ranks' nodes."""

    def on_rank(comm):
        sampler = PartSampler(length, comm, **named)
        read = []
        for number in numbers:
            sampler.set_epoch(number)
            read.append((list(sampler), set(sampler.part().tolist())))
            assert len(sampler) == len(read[-1][0])
        return read

    results = simulate(nodes * sharing, on_rank, ranks_per_node=sharing).results
    return list(zip(*results, strict=True))


@given(settings())
def test_each_epoch_covers_the_set_once(case):
    nodes, sharing, length, named = case
    ranks = nodes * sharing
    for epoch in epochs(*case, range(4)):
        read = [place for places, _ in epoch for place in places]
        assert len({len(places) for places, _ in epoch}) == 1
        parts = [epoch[node * sharing][1] for node in range(nodes)]
        assert sorted(place for part in parts for place in part) == [*range(length)]
        assert all(set(places) <= part for places, part in epoch)
        assert max(map(len, parts)) - min(map(len, parts)) <= sharing
        if named["drop_last"]:
            assert len(set(read)) == len(read) == length - length % ranks
        else:
            assert set(read) == {*range(length)}
            assert len(read) == length + -length % ranks


@given(settings())
def test_parts_move_when_they_are_due_and_epochs_can_be_resumed(case):
    named = case[3]
    run = epochs(*case, range(6))
    assert epochs(*case, [4, 5]) == run[4:]
    every = named["exchange_every"] or 6
    for number in range(1, 6):
        before, after = ([part for _, part in run[at]] for at in (number - 1, number))
        assert before == after or number % every == 0
    if not named["shuffle"]:
        assert run[0] == run[5]


def test_parts_and_orders_are_drawn_at_random():
    first, second, third = epochs(2, 2, 1000, {"exchange_every": 2, "seed": 5}, [0, 1, 2])
    assert [places for places, _ in first] != [places for places, _ in second]
    part, later = first[0][1], third[0][1]
    assert first[0][1] == second[0][1]
    assert 150 < len(part & later) < 350
    assert 150 < len(part & {*range(500)}) < 350


def test_samplers_move_a_cache_to_the_new_part():
    def on_rank(comm):
        cached = Cached(Files(40), None, memory="1 MB", group=comm)
        sampler = PartSampler(cached, comm, exchange_every=2)
        loader = DataLoader(cached, batch_size=3, sampler=sampler, collate_fn=list)
        reads, expected, had, total = [], [], set(), 0
        for epoch in range(6):
            comm.gather_numbers(0)
            sampler.set_epoch(epoch)
            part = {*sampler.part().tolist()}
            total, had = total + len(part - had), part
            expected.append(total)
            for batch in loader:
                assert all(Files(40)[place] == (content, place) for content, place in batch)
            comm.gather_numbers(0)
            reads.append(cached.stats().from_source)
            assert cached.stats().in_memory == 20
        return reads, expected

    for reads, expected in simulate(4, on_rank, ranks_per_node=2).results:
        assert reads == expected  # what is in both parts is read once
        assert reads[2] < 40


def test_one_process_alone_needs_no_group():
    sampler = PartSampler(9)
    assert sorted(sampler) == [*range(9)]
    assert sampler.part().shape == (9,)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dataset": 0}, "dataset must be at least 1, got 0; it is a set, which has a length, or"),
        ({"dataset": "3", "seed": -1}, "seed must be at least 0, got -1"),
        ({"dataset": torch.nn.ReLU()}, "dataset must be a whole number, got ReLU; it is a set"),
        ({"exchange_every": 0}, "exchange_every must be at least 1, got 0"),
        ({"exchange_every": 2, "shuffle": False}, "which shuffle=False excludes"),
        ({"shuffle": 1}, "shuffle must be True or False, got 1"),
        ({"drop_last": None}, "drop_last must be True or False, got None"),
        ({"group": 4}, "group must be a torch.distributed process group"),
    ],
)
def test_bad_arguments_are_answered_in_words(arguments, message):
    with pytest.raises(InputError, match=message):
        PartSampler(**{"dataset": 10, **arguments})
    with pytest.raises(InputError, match=r"epoch must be at least 0, got -1"):
        PartSampler(3).set_epoch(-1)


def test_ranks_must_agree_and_be_no_more_than_samples():
    with pytest.raises(MismatchError, match="seed=1"):
        simulate(2, lambda comm: PartSampler(10, comm, seed=comm.rank))
    with pytest.raises(InputError, match="3 ranks cannot share a set of 2 samples"):
        simulate(3, lambda comm: PartSampler(2, comm))
    assert np.array_equal(PartSampler(4, shuffle=False).part(), range(4))


def test_ranks_that_were_launched_together_need_a_group(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, value)
    for make in (lambda: PartSampler(9), lambda: Cached(Files(9), None, memory=0)):
        with pytest.raises(InputError, match="init_process_group first, or give group="):
            make()


def test_a_limit_that_is_too_small_leaves_the_group_whole():
    def on_rank(comm):
        with pytest.raises(InputError, match="memory must hold at least the index"):
            Cached(Files(9), None, memory="1 KiB", group=comm)
        return Cached(Files(9), None, memory="1 MB", group=comm).stats().in_memory

    assert simulate(2, on_rank, ranks_per_node=2).results == [0, 0]
