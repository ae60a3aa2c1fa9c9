"""The communicator over Gloo, on real processes."""

from __future__ import annotations

import gc
import os
import sys
import threading
from contextlib import suppress
from functools import reduce
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from sparcel.core import ops
from sparcel.core.comm import (
    Communicator,
    SimulatedCommunicator,
    TorchCommunicator,
    resolve,
    simulate,
)
from sparcel.core.ops import SUM, Op
from sparcel.errors import CommunicationError, InputError

pytestmark = pytest.mark.processes

MIB = 1 << 20

WORLD_SIZES = (2, 3, 8)
world_sizes = pytest.mark.parametrize("world_size", WORLD_SIZES)


def message(source: int, destination: int, nbytes: int) -> torch.Tensor:
    """Return bytes that repeat after a prime number, so that a misplaced piece is detected."""
    pattern = (torch.arange(251) * (7 + source) + 31 * destination).to(torch.uint8)
    return pattern.repeat(nbytes // 251 + 1)[:nbytes]


def in_pieces(comm: TorchCommunicator, sizes: list[int]) -> list[tuple[bool, int]]:
    return [in_one_piece(comm, nbytes) for nbytes in sizes]


def in_one_piece(comm: TorchCommunicator, nbytes: int) -> tuple[bool, int]:
    """Send ``nbytes`` + destination bytes to each rank from one tensor; count those sent."""
    before = comm.traffic.bytes_sent
    parts = [message(comm.rank, rank, nbytes + rank) for rank in range(comm.size)]
    arrived = comm.all_to_all(
        torch.cat(parts), [len(part) for part in parts], [nbytes + comm.rank] * comm.size
    )
    expected = [message(rank, comm.rank, nbytes + comm.rank) for rank in range(comm.size)]
    return torch.equal(arrived, torch.cat(expected)), comm.traffic.bytes_sent - before


@world_sizes
def test_parts_of_one_piece_arrive_by_rank(run_on, world_size):
    sizes, ranks = [0, 1001, MIB], range(world_size)
    for rank, came in enumerate(run_on(world_size, in_pieces, sizes)):
        others = [to for to in ranks if to != rank]
        assert came == [(True, sum(nbytes + to for to in others)) for nbytes in sizes]


def arrived_whole(comm: TorchCommunicator, sizes: list[int]) -> bool:
    return all(all(all_to_all(comm, nbytes)) for nbytes in sizes)


def all_to_all(comm: TorchCommunicator, nbytes: int) -> list[bool]:
    """Send ``nbytes`` + destination bytes to each other rank."""
    others = [(comm.rank + step) % comm.size for step in range(1, comm.size)]
    received = comm.exchange(
        {rank: message(comm.rank, rank, nbytes + rank) for rank in others},
        dict.fromkeys(others, nbytes + comm.size),
    )
    assert all(arrived.data_ptr() % 8 == 0 for arrived in received.values())
    return [
        torch.equal(received[rank], message(rank, comm.rank, nbytes + comm.rank)) for rank in others
    ]


@world_sizes
def test_messages_arrive_whole(run_on, world_size: int) -> None:
    sizes = [0, 1, 1000, 16376, 16384, 65536, MIB, 3 * MIB + 5]
    assert run_on(world_size, arrived_whole, sizes) == [True] * world_size


def by_default_elsewhere(comm: Communicator) -> tuple[list[int], list[int], list[float]]:
    """Exchange and reduce while torch's default device is another one."""
    with torch.device("meta"):
        numbers = comm.gather_numbers(comm.rank)
        sent = torch.tensor([7, comm.rank], dtype=torch.uint8, device="cpu")
        gathered = [arrived.tolist()[1] for arrived in comm.gather(sent, 100)]
        total = torch.ones(3, device="cpu")
        comm.all_reduce(total)
    return numbers, gathered, total.tolist()


@pytest.mark.parametrize("engine", ["gloo", "mpi"])
def test_the_default_device_does_not_matter(request, engine: str) -> None:
    run_on = request.getfixturevalue(f"run_on_{engine}")
    assert run_on(3, by_default_elsewhere) == [([0, 1, 2], [0, 1, 2], [3.0] * 3)] * 3


def many_one_way(comm: TorchCommunicator, sizes: list[int]) -> bool:
    """Send many messages from rank 0 to rank 1, and then one back."""
    if comm.rank == 0:
        for nbytes in sizes:
            comm.exchange({1: message(0, 1, nbytes)}, {})
        comm.exchange({}, {1: 0})
        return True
    arrived = [comm.exchange({}, {0: max(sizes)})[0] for _ in sizes]
    comm.exchange({0: message(1, 0, 0)}, {})
    return all(
        torch.equal(came, message(0, 1, nbytes))
        for came, nbytes in zip(arrived, sizes, strict=True)
    )


def test_messages_of_all_sizes_arrive_in_order(run_on) -> None:
    sizes = [(37 * i) % 11 * MIB // 5 + i for i in range(40)]
    assert run_on(2, many_one_way, sizes) == [True, True]


def crossing(comm: TorchCommunicator) -> list[int]:
    """Send on both ranks before they receive, one after the other."""
    other = 1 - comm.rank
    comm.exchange({other: message(comm.rank, other, 100 + comm.rank)}, {})
    return [comm.exchange({}, {other: 200})[other].numel()]


def test_short_messages_wait_for_their_receiver(run_on) -> None:
    assert run_on(2, crossing) == [[101], [100]]


def ones_and_twos(rank: int, dtype: torch.dtype) -> torch.Tensor:
    """Return values whose sums and products are exact in any order."""
    return (1 + (torch.arange(240) // (rank + 1)) % 2).to(dtype)


Reduced = tuple[str, torch.dtype]


def all_reduced(
    comm: TorchCommunicator, cases: list[Reduced]
) -> dict[Reduced, tuple[torch.Tensor, int]]:
    return {case: reduced(comm, *case) for case in cases}


def reduced(comm: TorchCommunicator, op: str, dtype: torch.dtype) -> tuple[torch.Tensor, int]:
    tensor = ones_and_twos(comm.rank, dtype)
    before = comm.traffic.bytes_sent
    comm.all_reduce(tensor, ops.resolve(op))
    return tensor, comm.traffic.bytes_sent - before


FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
REDUCED = [
    (op, dtype)
    for op in ("sum", "product", "min", "max")
    for dtype in (*FLOATS, torch.int32, torch.int64)
]


@pytest.mark.parametrize("engine", ["gloo", "mpi"])
@world_sizes
def test_all_reduce(request, engine: str, world_size: int) -> None:
    by_rank = request.getfixturevalue(f"run_on_{engine}")(world_size, all_reduced, REDUCED)
    for op, dtype in REDUCED:
        inputs = [ones_and_twos(rank, dtype) for rank in range(world_size)]
        expected = reduce(ops.resolve(op).function, inputs)
        for results in by_rank:
            tensor, nbytes = results[op, dtype]
            assert torch.equal(tensor, expected), (op, dtype)
            assert nbytes == 2 * (world_size - 1) * expected.nbytes // world_size


def refused(comm: TorchCommunicator) -> list[str]:
    texts = []
    for tensor, op in [
        (torch.zeros(4, dtype=torch.int16), SUM),
        (torch.zeros(4, 4).T[:, :2], SUM),
        (torch.zeros(4), Op(torch.hypot, 0)),
    ]:
        with pytest.raises(InputError) as caught:
            comm.all_reduce(tensor, op)
        texts.append(str(caught.value))
    return [*texts, str(comm.size)]


def test_tensors_that_the_engine_cannot_reduce_are_refused_before_sending(run_on) -> None:
    for dtype, strides, operation, size in run_on(3, refused):
        assert "got torch.int16" in dtype
        assert "strides (1, 4)" in strides
        assert "algorithm='recursive_doubling'" in operation
        assert size == "3"


def split_up(comm: TorchCommunicator, colours: list[int]) -> tuple[int, int, list[int], list[int]]:
    child = comm.split(colours[comm.rank])
    total = torch.tensor([comm.rank])
    child.all_reduce(total)
    grandchild = child.split(0)
    everyone = comm.gather_numbers(10 * comm.rank)
    return child.rank, child.size, [int(total)], [*grandchild.gather_numbers(comm.rank), *everyone]


@world_sizes
def test_split(run_on, world_size: int) -> None:
    colours = [rank % 3 for rank in range(world_size)]
    ends = run_on(world_size, split_up, colours)
    for rank, (child_rank, child_size, total, numbers) in enumerate(ends):
        members = [other for other in range(world_size) if colours[other] == colours[rank]]
        assert (child_rank, child_size) == (members.index(rank), len(members))
        assert total == [sum(members)]
        assert numbers == members + [10 * other for other in range(world_size)]


def listening(comm: TorchCommunicator) -> tuple[set[str], set[str]]:
    """Return where this process listens before and after it made a communicator and used it."""
    before = listeners()
    child = comm.split(0)
    child.all_reduce(torch.ones(3))
    return before, listeners()


def listeners() -> set[str]:
    own = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # that of the iteration
            own.add(os.readlink(descriptor))
    tables = {"tcp": (3, "0A", 9), "tcp6": (3, "0A", 9), "unix": (3, "00010000", 6)}
    found = set()
    for table, (state, listens, inode) in tables.items():
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[state] == listens and f"socket:[{words[inode]}]" in own:
                found.add(f"{table} {words[inode]}")
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ranks_listen_nowhere_once_they_are_connected(run_on) -> None:
    for before, after in run_on(3, listening):
        assert after <= before


def queued(comm: TorchCommunicator) -> list[int]:
    """Run jobs of a communicator and of its child; some are not waited for."""
    child = comm.split(0)

    def ring(which: TorchCommunicator, number: int) -> int:
        after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        sent = torch.tensor([number]).view(torch.uint8)
        return int(which.exchange({after: sent}, {before: 8})[before].view(torch.int64))

    handles = [
        which.submit(lambda which=which, i=i: ring(which, 100 * i + comm.rank))
        for i in range(10)
        for which in (comm, child)
    ]
    blocking = comm.run(lambda: child.run(lambda: ring(child, comm.rank)))
    return [handle.wait() for handle in handles] + [blocking]


@world_sizes
def test_jobs_of_split_communicators_run_in_one_order(run_on, world_size: int) -> None:
    for rank, numbers in enumerate(run_on(world_size, queued)):
        before = (rank - 1) % world_size
        assert numbers == [100 * i + before for i in range(10) for _ in range(2)] + [before]


def counted(comm: TorchCommunicator) -> tuple[int, int, int, int]:
    before = vars(comm.traffic).copy()
    all_to_all(comm, 1000)
    return tuple(value - before[name] for name, value in vars(comm.traffic).items())


@world_sizes
def test_traffic_is_that_of_the_simulated_cluster(run_on, world_size: int) -> None:
    assert run_on(world_size, counted) == simulate(world_size, counted).results


def groups(comm: TorchCommunicator) -> tuple[bool, bool, bool, str]:
    """Use groups that not all ranks have: ranks 0 and 1 have one more than the others."""
    pair = dist.new_group([0, 1])
    rest = dist.new_group([comm.size - 1, 0])
    ends = []
    if comm.rank < 2:
        ends.append(resolve(pair).gather_numbers(comm.rank) == [0, 1])
    if comm.rank in (0, comm.size - 1):
        ends.append(resolve(rest).gather_numbers(comm.rank) == [0, comm.size - 1])
        assert resolve(rest) is resolve(rest)
    if comm.rank == 1:
        with pytest.raises(InputError, match="not in the group"):
            resolve(rest)
    again = TorchCommunicator.of(dist.group.WORLD)
    ends.append(again.gather_numbers(comm.rank) == list(range(comm.size)))
    again.close()
    with pytest.raises(CommunicationError, match="closed"):
        again.gather_numbers(0)
    return all(ends), resolve() is comm, resolve(comm) is comm


def test_communicators_of_several_groups(run_on) -> None:
    assert run_on(4, groups) == [(True, True, True)] * 4


def test_resolve_takes_simulated_ranks() -> None:
    def same(comm: SimulatedCommunicator) -> bool:
        return resolve(comm) is comm

    assert simulate(2, same).results == [True, True]


@pytest.mark.parametrize("group", ["gloo", 3, object()])
def test_resolve_names_the_groups_that_it_accepts(group: object) -> None:
    with pytest.raises(InputError, match=r"process group.*MPI communicator.*got "):
        resolve(group)


def test_resolve_wants_a_default_group() -> None:
    with pytest.raises(InputError, match="init_process_group"):
        resolve()


def alone(comm: TorchCommunicator) -> list[object]:
    tensor = torch.ones(3)
    comm.all_reduce(tensor)
    return [comm.exchange({}, {}), comm.gather_numbers(4), comm.split(1).size, tensor.tolist()]


def test_one_rank(run_on) -> None:
    assert run_on(1, alone) == [[{}, [4], 1, [1.0, 1.0, 1.0]]]


def timeout_of(comm: TorchCommunicator) -> tuple[float, float, str]:
    return comm.timeout, comm.split(0).timeout, str(comm.device)


def test_timeout_is_that_of_the_process_group(run_on) -> None:
    assert run_on(2, timeout_of) == [(60.0, 60.0, "cpu")] * 2


def forgotten(comm: TorchCommunicator) -> tuple[bool, list[int], list[str]]:
    threads = set(threading.enumerate())
    other = TorchCommunicator.of(dist.group.WORLD)
    child = other.split(0)
    new = [thread for thread in threading.enumerate() if thread not in threads]
    del other
    gc.collect()
    numbers = child.gather_numbers(comm.rank)  # a child keeps its parent alive
    del child
    gc.collect()
    new[0].join(60)
    return new[0].is_alive(), numbers, [thread.name for thread in new]


def test_forgotten_communicators_close_themselves(run_on) -> None:
    assert run_on(3, forgotten) == [(False, [0, 1, 2], ["sparcel"])] * 3


def closed_child(comm: TorchCommunicator) -> list[int]:
    child = comm.split(comm.rank % 2)
    pending = child.submit(lambda: child.gather_numbers(comm.rank))
    child.close()
    with pytest.raises(CommunicationError, match="closed"):
        child.gather_numbers(0)
    return pending.wait() + comm.gather_numbers(comm.rank)


def test_a_child_closes_alone(run_on) -> None:
    assert run_on(4, closed_child) == [[rank % 2, rank % 2 + 2, 0, 1, 2, 3] for rank in range(4)]
