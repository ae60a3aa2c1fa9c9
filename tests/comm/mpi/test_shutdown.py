"""The status with which processes exit after a failure, with and without `exit_after_failure`."""

from __future__ import annotations

import sys
import textwrap

import pytest

from sparcel.tools.lab import Ended, Line, Loopback, Workers

pytestmark = [pytest.mark.processes, pytest.mark.slow]

_IMPORTS = """
import sys, threading, time
from contextlib import nullcontext
from mpi4py import MPI
from sparcel.core.comm.mpi import MpiCommunicator, exit_after_failure
from sparcel.errors import CommunicationError
"""

_CONNECT = """
comm = MpiCommunicator.of(MPI.COMM_WORLD, timeout=60.0)
comm.gather_numbers(comm.rank)
"""


def ends(ranks: int, script: str, opt_in: bool = True, first: str = "") -> tuple[list[int], str]:
    """Run a script as MPI ranks; return their exit statuses and what they wrote to stderr.

    With ``opt_in`` it runs in `exit_after_failure`; ``first`` runs before sparcel is imported.
    """
    pytest.importorskip("mpi4py", reason="the extra mpi is not installed")
    context = "exit_after_failure()" if opt_in else "nullcontext()"
    body = textwrap.indent(_CONNECT + textwrap.dedent(script), "    ")
    program = f"{first}{_IMPORTS}\nwith {context}:{body}"
    argv = [sys.executable, "-c", program]
    statuses, errors = {}, []
    with Loopback(ranks) as network, Workers(network, argv, mpi=True) as workers:
        for event in workers.events():
            match event:
                case Ended(rank, status):
                    statuses[rank] = status
                case Line(_, text, is_error=True):
                    errors.append(text)
    return [statuses[rank] for rank in range(ranks)], "\n".join(errors)


def test_every_rank_of_a_failed_group_keeps_the_status_of_its_program() -> None:
    script = """
        def job():
            if comm.rank == 0:
                raise ValueError("the user's own")
            comm.gather_numbers(0)

        def caught_exit():
            try:
                sys.exit(7)
            except SystemExit:
                pass

        MPI.COMM_WORLD.Barrier()  # all have gathered the numbers
        if comm.rank in (0, 1):
            comm.run(job)
        elif comm.rank < 5:
            try:
                comm.run(job)
            except CommunicationError:
                if comm.rank == 2:
                    raise SystemExit(3)
                if comm.rank == 3:
                    caught_exit()
                if comm.rank == 4:
                    sys.exit("what went wrong")
        # The last rank does not learn of the failure.
    """
    statuses, errors = ends(6, script)
    assert statuses == [1, 1, 3, 0, 1, 0]
    assert "ValueError: the user's own" in errors


def test_only_the_opt_in_ends_the_process_after_a_failure() -> None:
    """Handlers registered before the import of sparcel run after those of sparcel."""
    handler = "import atexit, os; atexit.register(lambda: os._exit(7))"
    script = """
        def job():
            if comm.rank == 0:
                raise ValueError("the user's own")
            comm.gather_numbers(0)

        comm.run(job)
    """
    assert ends(2, script, opt_in=False, first=handler)[0] == [7] * 2
    assert ends(2, script, opt_in=True, first=handler)[0] == [1] * 2


def test_a_group_that_ends_well_keeps_the_statuses_of_its_ranks() -> None:
    """The ranks end at very different times."""
    script = """
        if comm.rank == 1:
            time.sleep(2)
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
