"""Behaviour of sparcel after a machine dies or its link is cut, on real connections."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from sparcel.tools.lab import EmulatedNetwork, Ended, Line, Link, Workers
from tests.lab.programs import TIMEOUT_S

pytestmark = [
    pytest.mark.network,
    pytest.mark.processes,
    pytest.mark.slow,
    pytest.mark.usefixtures("emulation"),
]

NODES, CULPRIT = 3, 1

_SLACK_S = 10.0
"""Allowance for shared cores, and for the ranks' agreement on the cause after the timeout."""


@pytest.mark.parametrize(("engine", "fault"), [("gloo", "cut_link"), ("mpi", "kill_node")])
def test_survivors_raise_one_clear_error_and_keep_their_memory(
    engine: str, fault: str, programs: str
) -> None:
    if engine == "mpi":
        pytest.importorskip("mpi4py")
    network = EmulatedNetwork(NODES, Link())
    argv = [sys.executable, programs, "steps", engine]
    with network, Workers(network, argv, mpi=engine == "mpi") as workers:
        reports = _reports(workers)
        assert {next(reports)[0] for _ in range(NODES)} == set(range(NODES))
        getattr(network, fault)(CULPRIT)
        ends = dict(reports)
    ends.pop(CULPRIT, None)  # behind a cut link the culprit is alive and raises too
    assert len(ends) == NODES - 1
    (cause,) = {end["error"] for end in ends.values()}
    if fault == "kill_node":
        assert f"lost its connection to rank {CULPRIT}" in cause
    else:  # who waits longest waits for the culprit, or for one that does, or for all at once
        assert re.fullmatch(rf"rank \d waited {TIMEOUT_S:g} s for (rank \d|the others)", cause)
    for end in ends.values():
        assert end["unchanged"]
        assert end["seconds"] < TIMEOUT_S + _SLACK_S


def _reports(workers: Workers) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the ranks' lines, as `Workers.lines` does, but allow killed ranks to end."""
    errors = []
    for event in workers.events():
        match event:
            case Line(rank, text, is_error=False) if text.startswith("{"):
                yield rank, json.loads(text)
            case Line(rank, text):
                errors.append(f"[{rank}] {text}")
            case Ended(rank, status):
                assert status == 0 or rank == CULPRIT, "\n".join(errors)
