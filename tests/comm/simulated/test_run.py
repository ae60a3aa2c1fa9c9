"""The simulated cluster: repeatable runs, deadlocks, clocks, counters, groups."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sparcel
from sparcel import simulate
from sparcel.core.comm import DIRECT_RANKS
from sparcel.errors import CommunicationError, InputError, MismatchError
from tests.strategies import SUM, case_of, dense_reference, full, worlds


def message(*numbers):
    return torch.tensor(numbers, dtype=torch.uint8)


def everybody(comm):
    """Return the other ranks."""
    return [rank for rank in range(comm.size) if rank != comm.rank]


@given(worlds)
def test_every_rank_gets_what_every_other_rank_sent_it(world):
    def on_rank(comm):
        sends = {peer: message(comm.rank, peer) for peer in everybody(comm)}
        received = comm.exchange(sends, dict.fromkeys(everybody(comm), 2))
        return {source: tuple(came.tolist()) for source, came in received.items()}

    for rank, received in enumerate(simulate(world, on_rank).results):
        assert received == {source: (source, rank) for source in range(world) if source != rank}


@given(worlds)
def test_a_message_to_all_is_taken_apart_and_put_together(world):
    def on_rank(comm):
        leaving = [(comm.rank + 2 * to) % 3 for to in range(world)]
        arriving = [(source + 2 * comm.rank) % 3 for source in range(world)]
        sent = torch.cat(
            [message(*[(10 * comm.rank + to) % 256] * n) for to, n in enumerate(leaving)]
        )
        return comm.all_to_all(sent, leaving, arriving).tolist()

    for rank, found in enumerate(simulate(world, on_rank).results):
        counts = [(source + 2 * rank) % 3 for source in range(world)]
        assert found == [(10 * s + rank) % 256 for s, n in enumerate(counts) for _ in range(n)]


def test_a_part_that_is_too_short_is_refused():
    def on_rank(comm):
        other = 1 - comm.rank
        sizes = [0, 0]
        sizes[other] = 2
        expected = [0, 0]
        expected[other] = 2 + comm.rank
        return comm.all_to_all(message(1, 2), sizes, expected)

    with pytest.raises(MismatchError, match="sent 2 bytes to rank 1, which expected 3"):
        simulate(2, on_rank)


def test_results_are_by_rank_and_the_function_runs_once_on_each():
    calls = []

    def on_rank(comm):
        calls.append(comm.rank)
        return comm.rank, comm.size

    assert simulate(5, on_rank).results == [(rank, 5) for rank in range(5)]
    assert sorted(calls) == list(range(5))


def test_messages_between_two_ranks_arrive_in_order():
    def on_rank(comm):
        if comm.rank == 0:
            for number in range(10):
                comm.exchange({1: message(number)}, {})
            return None
        return [int(comm.exchange({}, {0: 1})[0]) for _ in range(10)]

    assert simulate(2, on_rank).results[1] == list(range(10))


@given(st.integers(1, 9), st.integers(0, 50))
def test_a_run_repeats_exactly(world, seed):
    case = case_of("random", world, 40, seed=seed)

    def run():
        order = []

        def on_rank(comm):
            exchange = comm.exchange_parts

            def noting(sends, receives, control):
                order.append((comm.rank, len(sends), len(receives)))
                return exchange(sends, receives, control)

            comm.exchange_parts = noting
            return sparcel.all_reduce(case.streams[comm.rank], group=comm)

        report = simulate(world, on_rank, latency_s=1e-3, bandwidth=1e6)
        return order, report.traffic, report.seconds

    assert run() == run()


def test_a_deadlock_is_named_at_once():
    def on_rank(comm):
        comm.exchange({}, {(comm.rank + 1) % comm.size: 8})

    with pytest.raises(
        CommunicationError, match=r"deadlock.*0 waits for rank 1.*2 waits for rank 0"
    ):
        simulate(3, on_rank)


def test_a_rank_that_leaves_while_others_wait_is_a_deadlock():
    def on_rank(comm):
        if comm.rank:
            comm.exchange({}, {0: 8})

    with pytest.raises(CommunicationError, match=r"deadlock.*rank 1 waits for rank 0"):
        simulate(3, on_rank)


def test_the_first_ranks_exception_is_the_one_raised():
    def on_rank(comm):
        comm.exchange({peer: message(1) for peer in everybody(comm)}, {})
        if comm.rank == 2:
            raise KeyError("lost")
        comm.exchange({}, {2: 1})
        comm.exchange({}, {2: 1})

    with pytest.raises(KeyError, match="lost") as caught:
        simulate(4, on_rank)
    assert "simulated rank 2 of 4" in "".join(caught.value.__notes__)


def test_the_others_learn_which_rank_failed_and_why():
    def on_rank(comm):
        if comm.rank == 1:
            comm.run(lambda: 1 / 0)
        try:
            comm.exchange({}, {1: 1})
        except CommunicationError as error:
            return str(error)
        return None

    seen = []

    def noting(comm):
        seen.append(on_rank(comm))

    with pytest.raises(ZeroDivisionError):
        simulate(3, noting)
    assert seen == ["rank 1 failed: division by zero"] * 2


def test_a_failure_in_a_group_names_the_rank_of_the_world():
    def on_rank(comm):
        try:
            half = comm.split(comm.rank // 2)
            if comm.rank == 3:
                half.run(lambda: 1 / 0)
            comm.exchange({}, {3: 1})
        except (ZeroDivisionError, CommunicationError) as error:
            return str(error)
        return None

    assert simulate(4, on_rank).results[0] == "rank 3 failed: division by zero"


def test_a_message_above_its_bound_is_named_by_the_ranks_of_the_world():
    def on_rank(comm):
        half = comm.split(comm.rank // 2)
        if comm.rank >= 2:
            peer = 1 - half.rank
            half.exchange({peer: torch.zeros(9, dtype=torch.uint8)}, {peer: 8})

    with pytest.raises(MismatchError, match=r"rank [23] sent 9 bytes to rank [23], .* at most 8"):
        simulate(4, on_rank)


@given(worlds, st.integers(0, 20))
def test_traffic_counts_messages_and_bytes(world, nbytes):
    def on_rank(comm):
        after, before = (comm.rank + 1) % world, (comm.rank - 1) % world
        if world > 1:
            comm.exchange({after: torch.zeros(nbytes * comm.rank).byte()}, {before: 20 * world})

    for rank, traffic in enumerate(simulate(world, on_rank).traffic):
        assert traffic.messages_sent == traffic.messages_received == (world > 1)
        assert traffic.bytes_sent == nbytes * rank
        assert traffic.bytes_received == nbytes * ((rank - 1) % world) * (world > 1)
        assert traffic.volume == max(traffic.bytes_sent, traffic.bytes_received)


def seconds(world, on_rank, **link):
    return simulate(world, on_rank, **link).seconds


def test_the_clock_counts_latency_and_bytes():
    def on_rank(comm):
        if comm.rank == 0:
            comm.exchange({1: torch.zeros(1000, dtype=torch.uint8)}, {})
        else:
            comm.exchange({}, {0: 1000})

    assert seconds(2, on_rank, latency_s=3) == 3
    assert seconds(2, on_rank, latency_s=3, bandwidth=500) == 5
    assert seconds(2, on_rank) == 0


def test_a_port_sends_one_message_at_a_time_and_receives_one_at_a_time():
    def fan_out(comm):
        if comm.rank == 0:
            comm.exchange({peer: message(1) for peer in everybody(comm)}, {})
        else:
            comm.exchange({}, {0: 1})

    def fan_in(comm):
        if comm.rank == 0:
            comm.exchange({}, dict.fromkeys(everybody(comm), 1))
        else:
            comm.exchange({0: message(1)}, {})

    assert seconds(5, fan_out, latency_s=1) == 4
    assert seconds(5, fan_in, latency_s=1) == 4


def test_both_directions_and_different_pairs_go_at_once():
    def swap(comm):
        comm.exchange({comm.rank ^ 1: message(1)}, {comm.rank ^ 1: 1})

    assert seconds(8, swap, latency_s=1) == 1


def test_a_message_that_waits_costs_its_receiver_nothing_more():
    def chain(comm):
        if comm.rank:
            comm.exchange({}, {comm.rank - 1: 1})
        if comm.rank + 1 < comm.size:
            comm.exchange({comm.rank + 1: message(1)}, {})

    assert seconds(6, chain, latency_s=1) == 5


@given(worlds, st.integers(-(2**63), 2**63 - 1))
def test_gather_numbers(world, number):
    report = simulate(
        world, lambda comm: comm.gather_numbers(max(number - comm.rank, -(2**63))), latency_s=1
    )
    expected = [max(number - rank, -(2**63)) for rank in range(world)]
    assert report.results == [expected] * world
    # The simulated network takes messages to one rank one after the other.
    assert report.seconds == (world - 1 if world <= DIRECT_RANKS else (world - 1).bit_length())


@pytest.mark.parametrize("world", range(1, 9))
@given(data=st.data())
def test_split_makes_groups_that_work_apart_and_keep_their_order(world, data):
    colours = data.draw(st.lists(st.integers(-1, 2), min_size=world, max_size=world))
    case = case_of("random", world, 30)

    def on_rank(comm):
        group = comm.split(colours[comm.rank])
        total = sparcel.all_reduce(case.streams[comm.rank], group=group)
        return group.rank, group.size, full(total)

    for rank, (place, size, total) in enumerate(simulate(world, on_rank).results):
        members = [r for r in range(world) if colours[r] == colours[rank]]
        assert (place, size) == (members.index(rank), len(members))
        assert torch.equal(total, dense_reference([case.streams[r] for r in members], SUM))


def test_groups_count_in_the_ranks_own_traffic():
    def on_rank(comm):
        pair = comm.split(comm.rank // 2)
        before = comm.traffic.messages_sent
        pair.exchange({1 - pair.rank: message(1)}, {1 - pair.rank: 1})
        return comm.traffic.messages_sent - before

    assert simulate(4, on_rank).results == [1] * 4


@given(worlds, st.integers(0, 40), st.sampled_from([torch.float32, torch.int64, torch.float16]))
def test_the_engines_all_reduce_sums(world, size, dtype):
    def on_rank(comm):
        tensor = (torch.arange(size) % 5 + comm.rank % 3).to(dtype)
        comm.all_reduce(tensor)
        return tensor

    expected = sum((torch.arange(size) % 5 + rank % 3) for rank in range(world)).to(dtype)
    assert all(torch.equal(result, expected) for result in simulate(world, on_rank).results)


def test_jobs_run_at_once_in_the_order_of_submission():
    def on_rank(comm):
        done = []
        first = comm.submit(lambda: done.append(1) or comm.run(lambda: "inner"))
        second = comm.submit(lambda: done.append(2))
        return first.wait(), second.wait(), done

    assert simulate(2, on_rank).results == [("inner", None, [1, 2])] * 2


def test_waiting_for_a_job_raises_its_error():
    def on_rank(comm):
        handle = comm.submit(lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            handle.wait()
        return True

    assert simulate(1, on_rank).results == [True]


@pytest.mark.parametrize("world", [0, -1])
def test_a_world_without_ranks_is_an_input_error(world):
    with pytest.raises(InputError, match=f"world_size must be at least 1, got {world}"):
        simulate(world, lambda comm: None)


def test_a_run_ends_its_threads():
    before = torch.get_num_threads()
    with pytest.raises(ZeroDivisionError):
        simulate(2, lambda comm: 1 / 0)
    assert torch.get_num_threads() == before
