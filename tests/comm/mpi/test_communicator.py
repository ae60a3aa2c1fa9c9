"""The communicator over MPI: behaviour of all communicators, and that of MPI alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import sparcel
from sparcel import SparseStream
from sparcel.core.comm import Communicator, resolve
from sparcel.core.comm.failure import Cause
from sparcel.errors import CommunicationError, InputError, MismatchError
from tests.comm import test_lifecycle as lifecycle
from tests.comm.torch import test_communicator as shared
from tests.strategies import CIRCLE, SUM, case_of, dense_reference, full

pytestmark = pytest.mark.processes
world_sizes = shared.world_sizes

Runner = Callable[..., list[Any]]


@world_sizes
def test_messages_of_any_size_arrive(run_on_mpi: Runner, world_size: int) -> None:
    sizes = [0, 1, 4096, 100_000, 3 << 20]
    assert run_on_mpi(world_size, shared.arrived_whole, sizes) == [True] * world_size


def short_of_its_bound(comm: Communicator) -> int:
    """Return the number of bytes received of a message far below its bound."""
    peer = comm.size - 1 - comm.rank
    message = torch.arange(10, dtype=torch.uint8)
    came = comm.exchange({peer: message}, {peer: 1 << 28})[peer]
    assert torch.equal(came, message)
    return came.numel()


def test_a_bound_takes_no_memory(run_on_mpi: Runner) -> None:
    assert run_on_mpi(2, short_of_its_bound) == [10, 10]


def on_subgroups(comm: Communicator) -> list[SparseStream]:
    """Sum over odd and even ranks, over those from 1 up, and over one alone; async too."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD.Create_group(MPI.COMM_WORLD.group.Incl(list(range(comm.size))))
    halves = world.Split(comm.rank % 2, comm.rank)
    upper = world.Create_group(world.group.Incl(list(range(1, comm.size))))
    alone = world.Split(comm.rank)
    stream = case_of("random", comm.size, 60).streams[comm.rank]
    handle = sparcel.all_reduce(stream, CIRCLE, "ring", group=halves, async_op=True)
    results = [handle.wait()]
    if upper != MPI.COMM_NULL:
        results += sparcel.all_gather(stream, group=upper)
        results.append(sparcel.broadcast(stream if upper.rank == 1 else None, 1, upper))
    results.append(sparcel.reduce_scatter(stream, group=alone))
    results += sparcel.all_reduce_topk(stream, 3, group=world)
    for group in (halves, upper, alone):
        if group != MPI.COMM_NULL:
            assert resolve(group) is resolve(group)
            resolve(group).close()
            group.Free()
    world.Free()
    return results


def test_any_subgroup_of_the_world_is_a_group(run_on_mpi: Runner) -> None:
    world = 5
    streams = case_of("random", world, 60).streams
    results, kept = run_on_mpi(world, on_subgroups), torch.zeros(60)
    for rank, (half, *upper, alone, total, lost) in enumerate(results):
        expected = dense_reference(streams[rank % 2 :: 2], CIRCLE)
        assert torch.equal(full(half, CIRCLE), expected)
        sources = [*streams[1:], streams[2]] if rank else []
        for came, sent in zip(upper, sources, strict=True):
            assert torch.equal(full(came), full(sent))
        assert torch.equal(full(alone), full(streams[rank]))
        assert total.nnz == 3
        kept += full(lost)
    assert torch.equal(full(total) + kept, dense_reference(streams, SUM))


def refusals(comm: Communicator) -> list[str]:
    from mpi4py import MPI

    from sparcel.core.comm.mpi import MpiCommunicator

    texts = []
    for attempt in (
        lambda: resolve(MPI.COMM_NULL),
        lambda: MpiCommunicator.of(MPI.COMM_SELF, timeout=0),
        lambda: resolve(MPI.INT),  # type: ignore[arg-type]
        lambda: comm.all_reduce(torch.ones(3), CIRCLE),
    ):
        with pytest.raises(InputError) as caught:
            attempt()
        texts.append(str(caught.value))
    return texts


def test_other_objects_are_refused_as_groups(run_on_mpi: Runner) -> None:
    null, timeout, other, op = run_on_mpi(2, refusals)[0]
    assert "not in the MPI communicator" in null
    assert "timeout must be more than 0 seconds, got 0" in timeout
    assert "an MPI communicator of mpi4py's" in other
    assert "algorithm='recursive_doubling' takes any operation" in op


def too_long(comm: Communicator, nbytes: int) -> Exception | None:
    """Return each rank's error after rank 1 sent a byte too many."""
    peer = (comm.rank + 1) % comm.size
    before = (comm.rank - 1) % comm.size
    message = torch.zeros(nbytes + (comm.rank == 1), dtype=torch.uint8)
    try:
        for _ in range(4):
            comm.exchange({peer: message}, {before: nbytes})
    except (MismatchError, CommunicationError) as error:
        return error
    return None


@pytest.mark.parametrize("nbytes", [100, 1 << 20])
def test_a_message_beyond_its_bound_is_an_error_on_all_ranks(
    run_on_mpi: Runner, nbytes: int
) -> None:
    errors = run_on_mpi(3, too_long, nbytes)
    assert isinstance(errors[2], MismatchError)
    assert all("rank 1 sent more bytes to rank 2" in str(error) for error in errors)


def silent(comm: Communicator) -> tuple[str, bool]:
    """Return each rank's error if rank 1 takes no part, and whether it came in time."""
    from mpi4py import MPI

    from sparcel.core.comm.mpi import MpiCommunicator

    world = MPI.COMM_WORLD.Create_group(MPI.COMM_WORLD.group.Incl(list(range(comm.size))))
    own = MpiCommunicator.of(world, timeout=60.0)
    own.engine.timeout = 0.5  # now that all have connected, which may take longer
    start, text = time.monotonic(), ""
    try:
        if comm.rank == 1:
            time.sleep(1)
        own.exchange({}, {1 - comm.rank if comm.rank < 2 else 1: 100})
    except CommunicationError as error:
        text = str(error)
    seconds = time.monotonic() - start
    own.close()
    again = MpiCommunicator.of(world, timeout=60.0)
    assert again.gather_numbers(comm.rank) == list(range(comm.size))
    again.close()
    return text, seconds < 60


def test_a_rank_that_takes_no_part_is_named_and_all_can_connect_anew(run_on_mpi: Runner) -> None:
    for text, in_time in run_on_mpi(3, silent):
        assert "waited 0.5 s for rank 1" in text
        assert in_time


def without_a_network(comm: Communicator, same_host: bool) -> str | list[int]:
    """Connect while rank 0 finds only loopback; return the error, or the gathered numbers."""
    from mpi4py import MPI

    from sparcel.core.comm.mpi import MpiCommunicator

    world = MPI.COMM_WORLD.Create_group(MPI.COMM_WORLD.group.Incl(list(range(comm.size))))
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("GLOO_SOCKET_IFNAME")
        patch.setattr("sparcel.core.comm.mpi._ELSEWHERE", ["127.0.0.1"])
        patch.setattr("socket.gethostname", lambda: f"host{0 if same_host else comm.rank}")
        try:
            own = MpiCommunicator.of(world, timeout=60.0)
        except CommunicationError as error:
            return str(error)
    numbers = own.gather_numbers(comm.rank)
    own.close()
    return numbers


def test_loopback_is_refused_between_machines_by_all_ranks_at_once(run_on_mpi: Runner) -> None:
    assert run_on_mpi(2, without_a_network, True) == [[0, 1]] * 2
    for rank, text in enumerate(run_on_mpi(2, without_a_network, False)):
        assert text.startswith(f"rank {rank} could not connect to ranks [{1 - rank}],")
        assert text.endswith("name the interface to use in GLOO_SOCKET_IFNAME")


def aborted_meanwhile(comm: Communicator) -> str:
    """Return the error of a job that exchanges after another thread has aborted."""
    from mpi4py import MPI

    from sparcel.core.comm.mpi import MpiCommunicator

    world = MPI.COMM_WORLD.Create_group(MPI.COMM_WORLD.group.Incl(list(range(comm.size))))
    own = MpiCommunicator.of(world, timeout=60.0)

    def job() -> None:
        other = threading.Thread(target=lambda: own._executor.abort(Cause("as asked")))
        other.start()
        other.join()
        own.gather_numbers(0)

    with pytest.raises(CommunicationError) as caught:
        own.run(job)
    own.close()
    comm.gather_numbers(0)
    world.Free()
    return str(caught.value)


def test_a_job_that_exchanges_after_an_abort_raises(run_on_mpi: Runner) -> None:
    assert run_on_mpi(2, aborted_meanwhile) == ["as asked"] * 2


@world_sizes
def test_splits_and_counters_are_as_on_other_engines(run_on_mpi: Runner, world_size: int) -> None:
    colours = [rank % 2 for rank in range(world_size)]
    simulated = sparcel.simulate(world_size, lambda comm: shared.split_up(comm, colours)).results
    assert run_on_mpi(world_size, shared.split_up, colours) == simulated
    counted = sparcel.simulate(world_size, shared.counted).results
    assert run_on_mpi(world_size, shared.counted) == counted


@world_sizes
def test_jobs_of_split_communicators_run_in_one_order(run_on_mpi: Runner, world_size: int) -> None:
    for rank, numbers in enumerate(run_on_mpi(world_size, shared.queued)):
        before = (rank - 1) % world_size
        assert numbers == [100 * i + before for i in range(10) for _ in range(2)] + [before]


@pytest.mark.slow
def test_what_nobody_closed_leaks_nothing(run_on_mpi: Runner) -> None:
    grown = run_on_mpi(2, lifecycle.grown_after_ten, lifecycle.split_and_drop)
    assert grown == [{}, {}]
    assert run_on_mpi(3, lifecycle.drop_before_the_others) == [[0, 1, 2]] * 3
