"""The same schemes on real processes over Gloo give the simulated cluster's bits."""

import pytest
import torch

from sparcel import simulate
from sparcel.errors import CommunicationError, MismatchError
from tests.schemes.steps import EXACT, SCHEMES, copy_of, integers, normal, total
from tests.strategies import same_bits
from tests.workers import WORLD_SIZES

pytestmark = pytest.mark.processes
schemes = pytest.mark.parametrize("name", SCHEMES)


def several_steps(comm, name, gradient):
    """Do three steps, the second of them poisoned; return the updates and the memories."""
    scheme, outcomes = SCHEMES[name](), []
    for step in range(3):
        vector = gradient(comm.rank, step, 700)
        if step == 1 and comm.rank == comm.size - 1:
            vector[99] = float("nan")
        outcomes += [scheme.step(vector, comm), copy_of(scheme.memory)]
    return outcomes


@schemes
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_steps_give_what_the_simulated_cluster_gives(run_on, world_size, name):
    for gradient in (integers, normal):
        by_rank = run_on(world_size, several_steps, name, gradient)
        simulated = simulate(world_size, lambda comm: several_steps(comm, name, gradient)).results  # noqa: B023
        for outcomes, references in zip(by_rank, simulated, strict=True):
            assert all(map(same_bits, outcomes[::2], by_rank[0][::2]))
            if name == "dense":  # whose order of summation is the engine's
                torch.testing.assert_close(outcomes, references, equal_nan=True)
            else:
                assert all(map(same_bits, outcomes, references))
        if gradient is integers and name in EXACT and world_size != 3:
            came_out = world_size * total([by_rank[0][0], by_rank[0][4]])
            kept = total(outcomes[5] for outcomes in by_rank)
            went_in = total(integers(r, s, 700) for r in range(world_size) for s in (0, 2))
            assert torch.equal(came_out + kept, went_in)


@pytest.fixture
def new_world_after(run_on):
    """Let the ranks of the next test meet anew, since the world of this one will be dead."""
    yield
    run_on(2, nothing)


def nothing(comm):
    """Do nothing."""


def mismatched(comm, name):
    """Return what each rank met when one had another size, and the memory it was left with."""
    scheme = SCHEMES[name]()
    try:
        scheme.step(integers(comm.rank, 0, 300 + (comm.rank == 1)), comm)
    except (MismatchError, CommunicationError) as error:
        return error, scheme.memory
    return None


@pytest.mark.usefixtures("new_world_after")
@schemes
def test_gradients_that_differ_in_size_are_named_on_every_rank(run_on, name):
    for error, memory in run_on(3, mismatched, name):
        assert "sent rank" in str(error) or "bytes" in str(error)
        assert memory is None


def fails_in_its_second_step(comm, name):
    """Return each rank's error, and whether its memory is that of the last step that counted."""
    scheme = SCHEMES[name]()
    exchange, before = comm.exchange, None

    def failing(sends, receives):
        if scheme.steps == 1 and comm.rank == 1:
            raise OSError("the disk is full")
        return exchange(sends, receives)

    comm.exchange = failing
    try:
        for step in range(2):
            before = copy_of(scheme.memory)
            scheme.step(integers(comm.rank, step, 300), comm)
    except (OSError, CommunicationError) as error:
        return error, same_bits(scheme.memory, before)
    finally:
        comm.exchange = exchange
    return None


@pytest.mark.usefixtures("new_world_after")
@pytest.mark.parametrize("name", [name for name in SCHEMES if name != "dense"])
def test_a_rank_that_fails_in_a_step_fails_it_everywhere_with_memory_as_before(run_on, name):
    """(dense needs no exchange but the engine's after its first step.)"""
    for error, memory_stayed in run_on(4, fails_in_its_second_step, name):
        assert "rank 1 failed" in str(error) or isinstance(error, OSError)
        assert memory_stayed
