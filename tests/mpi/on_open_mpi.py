"""A rank of `tests.mpi.test_open_mpi`: what depends on the MPI library, on all kinds of groups."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import reduce

import numpy as np
import torch
from mpi4py import MPI

import sparcel
from sparcel.core import ops
from sparcel.core.comm import resolve
from sparcel.core.comm.mpi import exit_after_failure
from tests.collectives.test_processes import all_cases, reduce_cases
from tests.comm.mpi.test_communicator import on_subgroups, too_long
from tests.comm.torch.test_communicator import REDUCED, all_reduced, arrived_whole, ones_and_twos
from tests.strategies import CIRCLE, case_of, dense_reference, full

WORLD = MPI.COMM_WORLD


def groups() -> Iterator[tuple[str, MPI.Intracomm]]:
    yield "the world", WORLD
    yield "Dup", WORLD.Dup()
    yield "Split", WORLD.Split(WORLD.rank % 2)
    yield "Create_group", WORLD.Create_group(WORLD.group.Excl([]))
    yield "Create", WORLD.Create(WORLD.group.Incl([*range(WORLD.size)][::-1]))


def check_sums(group: MPI.Intracomm) -> None:
    comm = resolve(group)
    for name in ("dense", "auto"):
        cases = [case for case in all_cases(comm.size, name) for _ in range(2)]
        for case, result in zip(cases, reduce_cases(comm, name), strict=True):
            assert torch.equal(full(result, case.op), dense_reference(case.streams, case.op))


def check_messages() -> None:
    comm = resolve(WORLD)
    assert arrived_whole(comm, [0, 1, 4096, 100_000, 3 << 20])
    for (op, dtype), (total, _) in all_reduced(comm, REDUCED).items():
        inputs = [ones_and_twos(rank, dtype) for rank in range(comm.size)]
        assert torch.equal(total, reduce(ops.resolve(op).function, inputs)), (op, dtype)


def check_arrays() -> None:
    """What MPI programs have is arrays."""
    own = np.arange(5, dtype=np.float64) + WORLD.rank
    expected = np.empty_like(own)
    WORLD.Allreduce(own, expected)
    stream = sparcel.SparseStream(np.array([2, 7, 11, 12, 50]), own, 60)
    assert np.array_equal(np.asarray(sparcel.all_reduce(stream, group=WORLD).values), expected)
    resolve(WORLD).all_reduce(own)
    assert np.array_equal(own, expected)


def check_failure() -> None:
    error = too_long(resolve(WORLD.Dup()), 1 << 20)
    assert "rank 1 sent more bytes to rank 2" in str(error), error


def main() -> int:
    for name, group in groups():
        check_sums(group)
        print("sums over", name)
    check_messages()
    check_arrays()
    half, *_ = on_subgroups(resolve(WORLD))
    streams = case_of("random", WORLD.size, 60).streams[WORLD.rank % 2 :: 2]
    assert torch.equal(full(half, CIRCLE), dense_reference(streams, CIRCLE))
    check_failure()
    print("all is well on", MPI.Get_library_version().split(",")[0])
    return 7


if __name__ == "__main__":
    with exit_after_failure():
        sys.exit(main())
