"""With what status processes end: a failure's where MPI's communicator failed, whatever they do."""

from __future__ import annotations

import sys
import textwrap

import pytest

from sparcel.lab import Ended, Job, Line, Loopback

pytestmark = [pytest.mark.processes, pytest.mark.slow]

_PREAMBLE = """
import sys, threading, time
from mpi4py import MPI
from sparcel.comm.mpi import MpiCommunicator
from sparcel.errors import CommunicationError

comm = MpiCommunicator.of(MPI.COMM_WORLD, timeout=60.0)
comm.gather_numbers(comm.rank)
"""


def ends(ranks: int, script: str) -> tuple[list[int], str]:
    """Run a script as MPI ranks; return their exit statuses and what they wrote to stderr."""
    pytest.importorskip("mpi4py", reason="the extra mpi is not installed")
    argv = [sys.executable, "-c", _PREAMBLE + textwrap.dedent(script)]
    statuses, errors = {}, []
    with Loopback(ranks) as network, Job(network, argv, mpi=True) as job:
        for event in job.events():
            match event:
                case Ended(rank, status):
                    statuses[rank] = status
                case Line(_, text, is_error=True):
                    errors.append(text)
    return [statuses[rank] for rank in range(ranks)], "\n".join(errors)


def test_no_rank_of_a_group_that_failed_reports_success() -> None:
    script = """
        def job():
            if comm.rank == 0:
                raise ValueError("the user's own")
            comm.gather_numbers(0)

        def caught_exit():
            try:
                sys.exit(0)
            except SystemExit:
                pass

        if comm.rank == 0:
            comm.run(job)
        elif comm.rank < 4:
            try:
                comm.run(job)
            except CommunicationError:
                if comm.rank == 1:
                    raise SystemExit(3)
                if comm.rank == 2:
                    caught_exit()
                if comm.rank == 3:
                    sys.exit(0)
        # The last one never hears of it.
    """
    statuses, errors = ends(5, script)
    assert statuses == [1] * 5
    assert "ValueError: the user's own" in errors


def test_a_group_that_ends_well_keeps_what_its_ranks_say() -> None:
    """Also where they are done long before one another."""
    script = """
        if comm.rank == 1:
            time.sleep(4)
        if comm.rank == 0:
            raise SystemExit(3)
        if comm.rank == 1:
            sys.exit("what went wrong")
    """
    statuses, errors = ends(3, script)
    assert statuses == [3, 1, 0]
    assert errors == "what went wrong"


def test_jobs_that_fail_at_the_exit_fail_the_process() -> None:
    script = """
        def job():
            time.sleep(0.5)
            if comm.rank == 1:
                raise ValueError("too late to be seen")
            comm.gather_numbers(0)

        comm.submit(job)
    """
    assert ends(2, script)[0] == [1, 1]
