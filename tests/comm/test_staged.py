"""Tensors of a GPU over the host's communicators, with the card in the GPU's place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import sparcel
from sparcel import SparseStream, simulate
from sparcel.core import device
from sparcel.core.collectives import ALGORITHMS, broadcast
from sparcel.core.comm import ALL_CONTROL, Communicator, Traffic, carry, resolve
from sparcel.core.comm.staged import Staged
from sparcel.core.formats import Format, message_length
from sparcel.core.kernels import row_bytes
from sparcel.core.ops import SUM
from sparcel.core.rates import Rates
from sparcel.core.wire import Wire
from sparcel.errors import CommunicationError, FormatError, InputError, MismatchError
from tests.card import CARD, OnCard, moved, on_card, seen
from tests.strategies import case_of, full

pytest.importorskip("triton")

Runner = Callable[..., list[Any]]


@pytest.fixture(scope="module", autouse=True)
def card() -> Iterator[torch.device]:
    with on_card() as place:
        yield place


def numbers(rank: int, nbytes: int) -> Tensor:
    return (torch.arange(nbytes) * 7 + rank).to(torch.uint8)


def on_ranks(world: int, card: torch.device, job: Callable[[Communicator], Any]) -> list[Any]:
    """Return what ``job`` returns on each rank of a simulated cluster, and how often it read."""

    def on_rank(comm: Communicator) -> Any:
        before = device.reads()
        result = job(carry(comm, card))
        return result, device.reads() - before

    return simulate(world, on_rank).results


def others(comm: Communicator) -> list[int]:
    return others_of(comm.rank, comm.size)


def others_of(rank: int, world: int) -> list[int]:
    return [other for other in range(world) if other != rank]


@given(
    nbytes=st.lists(st.integers(0, 60), min_size=2, max_size=4),
    control=st.sampled_from([0, 8, 50, ALL_CONTROL]),
    cut=st.integers(0, 60),
    far_control=st.booleans(),
)
def test_messages_arrive_as_control_and_payload(
    nbytes: list[int], control: int, cut: int, far_control: bool
) -> None:
    place = torch.device("card", 0)

    def exchange(comm: Communicator) -> dict[int, list[Tensor]]:
        message = numbers(comm.rank, nbytes[comm.rank])
        parts = [message[:cut], moved(message[cut:])]
        if far_control:  # as a header is that holds a flag of the GPU
            parts[0] = moved(parts[0])
        sends = dict.fromkeys(others(comm), parts)
        return comm.exchange_parts(sends, dict.fromkeys(others(comm), 60), control)

    for arrived, reads in on_ranks(len(nbytes), place, exchange):
        assert reads == 1
        for rank, parts in arrived.items():
            message = numbers(rank, nbytes[rank])
            held = [] if control == 0 else [message[:control]]
            payload = [] if control == ALL_CONTROL else [message[control:]]
            assert [seen(part).tolist() for part in parts] == [
                part.tolist() for part in (*held, *payload)
            ]
            assert [isinstance(part, OnCard) for part in parts] == [False] * len(held) + [
                True
            ] * len(payload)


@pytest.mark.parametrize("world", [1, 3, 11])
def test_numbers_never_touch_the_card(world: int, card: torch.device) -> None:
    results = on_ranks(world, card, lambda comm: comm.gather_numbers(comm.rank * 3))
    assert results == [([rank * 3 for rank in range(world)], 0)] * world


def test_what_is_passed_on_is_not_read_again(card: torch.device) -> None:
    def around(comm: Communicator) -> Tensor:
        after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        message = [numbers(comm.rank, 4), moved(numbers(comm.rank, 20))]
        for _ in range(comm.size):
            message = comm.exchange_parts({after: message}, {before: 24}, 4)[before]
        return seen(message[1])

    for rank, (message, reads) in enumerate(on_ranks(4, card, around)):
        assert torch.equal(message, numbers(rank, 20))
        assert reads == 1


@pytest.mark.parametrize("world", [1, 3, 11])
def test_blocks_and_parts_are_exchanged_by_one_read(world: int, card: torch.device) -> None:
    def gathered(comm: Communicator) -> Tensor:
        block = moved(numbers(comm.rank, 5 + comm.rank))
        return seen(comm.gather_blocks(block, [5 + rank for rank in range(comm.size)]))

    def swapped(comm: Communicator) -> Tensor:
        parts = torch.cat([numbers(comm.rank + to, 3) for to in range(comm.size)])
        return seen(comm.all_to_all(moved(parts), [3] * comm.size, [3] * comm.size))

    blocks = torch.cat([numbers(rank, 5 + rank) for rank in range(world)])
    for result, reads in on_ranks(world, card, gathered):
        assert torch.equal(result, blocks)
        assert reads == 1
    for rank, (result, reads) in enumerate(on_ranks(world, card, swapped)):
        assert torch.equal(result, torch.cat([numbers(rank + to, 3) for to in range(world)]))
        assert reads == 1


LENGTH_AT = 1
"""Messages of `written` say their length there."""


def written(source: int, to: int) -> Tensor:
    """Return a message of 3 bytes or more: whose it is, and how long."""
    content = (source, 3 + (7 * source + 5 * to) % 30, *range(source, source + 50))
    return torch.tensor(content[: content[LENGTH_AT]], dtype=torch.uint8)


def length(row: Tensor) -> int:
    assert row.device.type == "cpu"
    return int(row[LENGTH_AT])


def in_rows(messages: list[Tensor], bounds: list[int]) -> Tensor:
    """Return messages as a GPU makes them, with anything beyond them."""
    rows = torch.full((len(messages), row_bytes(bounds)), 171, dtype=torch.uint8)
    for row, message in zip(rows, messages, strict=True):
        row[: message.numel()] = message
    return rows


@given(
    world=st.integers(1, 5),
    slack=st.integers(0, 40),
    places=st.lists(st.sampled_from(["host", "rows", "list"]), min_size=5, max_size=5),
)
def test_messages_are_swapped_and_spread_by_one_read(
    world: int, slack: int, places: list[str]
) -> None:
    """Ranks may have messages on the host, or on a GPU in rows or of exact lengths."""
    bounds = [32 + slack + rank for rank in range(world)]

    def exchanged(comm: Communicator) -> tuple[list[list[Tensor]], int, Traffic]:
        place, before = places[comm.rank], device.reads()
        leaving = [written(comm.rank, to) for to in range(world)]
        message = written(comm.rank, 9)
        if place == "host":
            rows = comm.swap(leaving, bounds, length), comm.spread(message, bounds, length)
            return [list(one) for one in rows], 2 * (world > 1), comm.traffic
        far = carry(comm, torch.device(CARD, 0))
        if place == "rows":
            swapped = far.swap(moved(in_rows(leaving, bounds)), bounds, length)
            spread = far.spread(moved(in_rows([message], bounds)[0]), bounds, length)
        else:
            swapped = far.swap(list(map(moved, leaving)), bounds, length)
            spread = far.spread(moved(message), bounds, length)
        for arrived in (swapped, spread) if world > 1 else (spread,):
            assert isinstance(arrived, OnCard)
            assert arrived.shape == (world, row_bytes(bounds))
        found = [[seen(row) for row in rows] for rows in (swapped, spread)]
        return found, device.reads() - before, comm.traffic

    for rank, (found, reads, traffic) in enumerate(simulate(world, exchanged).results):
        swapped, spread = found
        for source in range(world):
            message = written(source, 9)
            assert torch.equal(spread[source][: message.numel()], message)
        for source in others_of(rank, world):
            message = written(source, rank)
            assert torch.equal(swapped[source][: message.numel()], message)
        assert reads == 2 * (world > 1)
        sent = [written(rank, to) for to in others_of(rank, world)]
        sent += [written(rank, 9)] * (world - 1)
        assert (traffic.messages_sent, traffic.bytes_sent) == (
            len(sent),
            sum(map(Tensor.numel, sent)),
        )


@pytest.mark.parametrize("nbytes", [17, 19])
def test_a_message_of_another_length_than_it_says_never_fills_a_row(
    card: torch.device, nbytes: int
) -> None:
    message = torch.cat([written(0, 9), torch.zeros(1, dtype=torch.uint8)])

    def exchange(comm: Communicator) -> None:
        if comm.rank == 0:
            comm.spread(message[:nbytes], [40, 40], length)
        else:
            carry(comm, card).spread(moved(written(1, 9)), [40, 40], length)

    with pytest.raises(MismatchError, match=f"sent {nbytes} bytes to rank 1, which expected 18"):
        simulate(2, exchange)


def test_a_message_shorter_than_a_header_is_refused(card: torch.device) -> None:
    def exchange(comm: Communicator) -> None:
        message = torch.zeros(39 + comm.rank, dtype=torch.uint8)
        if comm.rank == 0:
            comm.swap([message] * 2, [40, 40], message_length)
        else:
            message[32] = 40  # the length that it says
            carry(comm, card).swap([moved(message)] * 2, [40, 40], message_length)

    with pytest.raises(FormatError, match=r"message of 39 bytes is shorter than a header \(40\)"):
        simulate(2, exchange)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_dense_tensors_are_reduced_where_they_are(card: torch.device, dtype: torch.dtype) -> None:
    def reduced(comm: Communicator) -> tuple[Tensor, Tensor]:
        far = moved((torch.arange(12, dtype=dtype) + comm.rank).view(3, 4))
        near = torch.full((2,), comm.rank)
        comm.all_reduce(far)
        comm.all_reduce(near)
        return seen(far), near

    for (far, near), reads in on_ranks(3, card, reduced):
        assert torch.equal(far, (3 * torch.arange(12) + 3).to(dtype).view(3, 4))
        assert near.tolist() == [3, 3]
        assert reads == 1


def test_a_message_that_was_found_bad_ends_the_exchange(card: torch.device) -> None:
    def exchange(comm: Communicator) -> None:
        fault = moved(torch.tensor(comm.rank == 1))
        device.later(fault, lambda: FormatError("an index is out of range"))
        comm.run(lambda: comm.gather(moved(numbers(comm.rank, 3)), 3))

    with pytest.raises(FormatError, match="out of range"):
        on_ranks(2, card, exchange)
    device.settle()  # nothing is left of it


def test_a_job_leaves_no_checks_to_the_next_one(card: torch.device) -> None:
    def exchange(comm: Communicator) -> None:
        def job() -> None:
            device.later(moved(torch.tensor(True)), lambda: FormatError("an index"))

        with pytest.raises(FormatError, match="an index"):
            comm.submit(job).wait()
        device.settle()

    simulate(1, lambda comm: exchange(carry(comm, card)))


def test_it_is_made_once_and_shares_what_the_communicator_has(card: torch.device) -> None:
    rates = sparcel.cost.default_rates()

    def compare(comm: Communicator) -> None:
        staged = carry(comm, card)
        assert isinstance(staged, Staged)
        assert staged is resolve(comm, card) is carry(staged, card)
        assert carry(comm, torch.device("cpu")) is carry(comm, None) is comm
        assert carry(comm, torch.device("meta")) is comm
        assert (staged.device, staged.carrier) == (card, "a simulated cluster by way of the host")
        assert staged.traffic is comm.traffic
        assert staged.nodes() == comm.nodes() == [0, 0, 1, 1]
        half = staged.split(comm.rank % 2)
        assert (half.size, half.device, half.label) == (2, card, half.inner.label)
        assert (staged.grid().node.size, staged.grid().across.device) == (2, card)
        assert staged.grid() is not comm.grid()
        staged.rates = rates
        assert isinstance(comm.rates, Rates)
        assert staged.rates is comm.rates

    simulate(4, compare, ranks_per_node=2)


def on_the_card(stream: SparseStream) -> SparseStream:
    indices = None if stream.indices is None else moved(stream.indices)
    return SparseStream.unchecked(indices, moved(stream.values), stream.size)


def from_the_card(stream: SparseStream) -> list[float]:
    indices = None if stream.indices is None else seen(stream.indices)
    return full(SparseStream.unchecked(indices, seen(stream.values), stream.size)).tolist()


def reduced(comm: Communicator, place: torch.device | None, format: str) -> list[Any]:
    """Return what the collectives make of a case, with streams on the card if it is given."""
    case = case_of("random", comm.size, 1500, count=100)
    stream = case.streams[comm.rank]
    if place is not None:
        stream, comm = on_the_card(stream), resolve(comm, place)
    results = [
        algorithm(stream, Wire(comm, Format(format)), SUM, case.max_nnz)
        for algorithm in ALGORITHMS.values()
    ]
    results.append(broadcast(stream, Wire(comm), comm.size - 1))
    job = sparcel.all_reduce(stream, group=comm, async_op=True)
    results += [sparcel.all_reduce(stream, group=comm), job.wait()]
    return [from_the_card(result) for result in results]


@pytest.mark.parametrize(("world", "format"), [(2, "packed"), (3, "raw")])
def test_collectives_have_the_results_of_the_host(
    world: int, format: str, card: torch.device
) -> None:
    expected = simulate(world, lambda comm: reduced(comm, None, format)).results
    assert simulate(world, lambda comm: reduced(comm, card, format)).results == expected


def test_ranks_with_and_without_a_gpu_form_a_group(card: torch.device) -> None:
    expected = simulate(3, lambda comm: reduced(comm, None, "raw")).results
    mixed = simulate(3, lambda comm: reduced(comm, card if comm.rank == 1 else None, "raw"))
    assert mixed.results == expected


def in_process(comm: Communicator, format: str) -> list[Any]:
    with on_card() as place:
        return reduced(comm, place, format)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("run_on", "format"), [("gloo", "packed"), ("mpi", "raw")], indirect=["run_on"]
)
def test_collectives_run_over_processes(run_on: Runner, format: str) -> None:
    expected = simulate(2, lambda comm: reduced(comm, None, format)).results
    assert run_on(2, in_process, format) == expected


def fail_beside(comm: Communicator) -> str:
    with on_card() as place:
        staged = resolve(comm, place)

        def job() -> None:
            if comm.rank == 1:
                raise ZeroDivisionError("no reason")
            staged.gather(moved(numbers(comm.rank, 9)), 9)

        with pytest.raises((CommunicationError, ZeroDivisionError)) as caught:
            staged.submit(job).wait()
        return str(caught.value)


@pytest.mark.processes
def test_all_ranks_hear_of_a_failure(run_on_gloo: Runner) -> None:
    first, second = run_on_gloo(2, fail_beside)
    assert "rank 1 failed: ZeroDivisionError: no reason" in first
    assert second == "no reason"


def test_streams_of_other_devices_are_refused(card: torch.device) -> None:
    stream = SparseStream.unchecked(None, torch.ones(4, device="meta"), 4)

    def refused(comm: Communicator) -> None:
        with pytest.raises(InputError, match="the stream is on meta, the group communicates from"):
            sparcel.all_reduce(stream, group=comm)
        with pytest.raises(InputError, match="the stream is on cpu, the group communicates from"):
            sparcel.all_reduce(SparseStream(None, torch.ones(4), 4), group=carry(comm, card))

    simulate(1, refused)
