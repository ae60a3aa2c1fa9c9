"""How a process ends whose MPI does not work any more.

MPI_Finalize waits for all processes, and where one is dead it hangs, or ends the process with a
status of its own. One cannot leave it out alone, so all ranks of a group that failed do.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from typing import NoReturn

from sparcel.comm.fate import Fate

_LINGER_SECONDS = 1.0
"""How long the other ranks may still ask for the cause, which one of the processes keeps."""

_fates: list[Fate] = []
"""Of the families that have connected; those that failed are gone once another has connected."""

_status: list[object] = []
"""What ``sys.exit`` was called with."""

_exit = sys.exit


def remember(fate: Fate) -> None:
    """Look at this end when the interpreter exits."""
    _fates[:] = [known for known in _fates if known.cause is None] + [fate]


def _noting_exit(status: object = None, /) -> NoReturn:
    _status.append(status)
    _exit(status)  # type: ignore[arg-type]  # as sys.exit takes it


# No other way leads to the status that the interpreter will exit with.
sys.exit = _noting_exit


@atexit.register
def _leave() -> None:
    """End the process here, with the status that it would have had."""
    if all(fate.cause is None for fate in _fates):
        return
    status = _status[-1] if _status else int(hasattr(sys, "last_value"))
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    time.sleep(_LINGER_SECONDS)
    os._exit(status if isinstance(status, int) else int(status is not None))
