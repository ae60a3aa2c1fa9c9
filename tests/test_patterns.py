"""Each pattern: every rank gets everything, no rank sends to itself, and the rounds are right."""

from collections.abc import Callable
from itertools import pairwise
from math import ceil, log2

import pytest

from sparcel.core import patterns

WORLDS = [*range(1, 66), 100, 127, 128, 129, 255, 256, 257, 300]
SOME = [*range(1, 18), 31, 32, 33, 64, 100, 129]
"""For patterns of P−1 rounds, whose check takes P² steps."""
POWERS = [1 << level for level in range(9)]


def by_round(pattern: Callable[[int, int], list], ranks: int) -> list[list]:
    """Return each round's entries, by rank; all ranks must have equally many rounds."""
    own = [pattern(rank, ranks) for rank in range(ranks)]
    return [list(one) for one in zip(*own, strict=True)]


def check_ends(one_round: list, ranks: int) -> None:
    """Check that the receiver of each message expects it, at the stated distance."""
    for rank, (to, source, distance, _) in enumerate(one_round):
        for other in (to, source):
            assert other is None or (0 <= other < ranks and other != rank)
        if to is not None:
            assert one_round[to].source == rank
            assert distance in ((to - rank) % ranks, (rank - to) % ranks)
        if source is not None:
            assert one_round[source].to == rank


def test_bruck_brings_every_block_to_every_rank() -> None:
    for ranks in WORLDS:
        held = [[rank] for rank in range(ranks)]
        rounds = by_round(patterns.bruck, ranks)
        assert len(rounds) == ceil(log2(ranks))
        for one in rounds:
            check_ends(one, ranks)
            leaving = [held[rank][: one[rank].blocks] for rank in range(ranks)]
            for rank in range(ranks):
                held[rank] = held[rank] + leaving[one[rank].source]
        for rank in range(ranks):
            assert held[rank] == [(rank + place) % ranks for place in range(ranks)]


def test_a_binomial_tree_reaches_every_rank_once_with_its_subtree() -> None:
    for ranks in WORLDS:
        for root in {0, ranks // 3, ranks - 1}:
            held = {root: {(root + place) % ranks for place in range(ranks)}}
            levels = by_round(lambda rank, ranks: patterns.binomial_tree(rank, ranks, root), ranks)  # noqa: B023
            assert len(levels) == ceil(log2(ranks))
            for level in levels:
                check_ends(level, ranks)
                arriving = {}
                for rank, (to, source, _, blocks) in enumerate(level):
                    assert to is None or source is None
                    if to is not None:
                        passed = {(to + place) % ranks for place in range(blocks)}
                        assert passed < held[rank]
                        held[rank] -= passed
                        arriving[to] = passed
                        assert level[to].blocks == blocks
                    elif source is None:
                        assert blocks == 0
                assert not arriving.keys() & held.keys()
                held |= arriving
            assert held == {rank: {rank} for rank in range(ranks)}


def test_a_binomial_reduction_brings_everything_to_rank_0() -> None:
    for ranks in WORLDS:
        held = [{rank} for rank in range(ranks)]
        levels = by_round(patterns.binomial_reduction, ranks)
        assert len(levels) == ceil(log2(ranks))
        for level in levels:
            check_ends(level, ranks)
            for rank, (to, _, _, _) in enumerate(level):
                if to is not None:
                    assert not held[to] & held[rank]
                    held[to] |= held[rank]
                    held[rank] = set()
        assert held[0] == set(range(ranks))


def test_folding_leaves_a_power_of_two_of_ranks_that_covers_all() -> None:
    for ranks in WORLDS:
        folds = [patterns.fold(rank, ranks) for rank in range(ranks)]
        powers = folds[0].powers
        assert powers <= ranks < 2 * powers and powers & (powers - 1) == 0
        assert {fold.powers for fold in folds} == {powers}
        for rank, fold in enumerate(folds):
            if fold.partner is not None:
                assert folds[fold.partner].partner == rank != fold.partner
            assert (rank >= powers) <= (fold.partner is not None)
        assert sum(fold.partner is not None for fold in folds) == 2 * (ranks - powers)


@pytest.mark.parametrize("pattern", [patterns.doubling, patterns.halving])
@pytest.mark.parametrize("ranks", POWERS)
def test_partners_exchange_everything(pattern: Callable, ranks: int) -> None:
    held = [{rank} for rank in range(ranks)]
    rounds = by_round(pattern, ranks)
    assert len(rounds) == log2(ranks)
    for one in rounds:
        check_ends(one, ranks)
        assert all(entry.to == entry.source for entry in one)
        assert not any(held[rank] & held[entry.to] for rank, entry in enumerate(one))
        held = [held[rank] | held[entry.to] for rank, entry in enumerate(one)]
    assert held == [set(range(ranks))] * ranks


def test_a_ring_takes_every_block_past_every_rank() -> None:
    for ranks in SOME:
        passing, seen = list(range(ranks)), [{rank} for rank in range(ranks)]
        rounds = by_round(patterns.ring, ranks)
        assert len(rounds) == ranks - 1
        for one in rounds:
            check_ends(one, ranks)
            passing = [passing[entry.source] for entry in one]
            for rank, block in enumerate(passing):
                seen[rank].add(block)
        assert seen == [set(range(ranks))] * ranks


def test_rotation_has_one_sender_for_each_receiver_in_each_round() -> None:
    for ranks in SOME:
        seen: list[set[int]] = [{rank} for rank in range(ranks)]
        rounds = by_round(patterns.rotation, ranks)
        assert len(rounds) == ranks - 1
        for one in rounds:
            check_ends(one, ranks)
            assert len({entry.to for entry in one}) == ranks
            for rank, entry in enumerate(one):
                seen[entry.to].add(rank)
        assert seen == [set(range(ranks))] * ranks


@pytest.mark.parametrize("size", [0, 1, 7, 300, 2**40 + 1])
def test_regions_cover_the_vector_evenly(size: int) -> None:
    for ranks in range(1, 301):
        cuts = patterns.cuts(size, ranks)
        lengths = [stop - start for start, stop in pairwise(cuts)]
        assert (cuts[0], cuts[-1], len(lengths)) == (0, size, ranks)
        assert max(lengths) - min(lengths) <= 1
