"""The command ``sparcel``, also ``python -m sparcel``, from its first moment on."""

from __future__ import annotations

import os
import signal
import sys

_RANKS = ("RANK", "PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")
"""Variables in which launchers give a process its rank."""


def main() -> None:
    """Run the command line; Ctrl-C and SIGTERM end it in one line at any time."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _end)
    from sparcel.tools.cli import run  # takes a while, which a signal may interrupt

    run(speaks=_is_first())


def _end(number: int, _: object) -> None:
    """End with the status that a shell gives to the signal; a second signal waits for the end."""
    for other in (signal.SIGINT, signal.SIGTERM):
        signal.signal(other, signal.SIG_IGN)
    if _is_first():
        how = "interrupted" if number == signal.SIGINT else "terminated"
        sys.stderr.write(f"sparcel: {how}\n")
    raise SystemExit(128 + number)


def _is_first() -> bool:
    """Return whether this process speaks for all: no launcher started it, or it is rank 0."""
    return all(os.environ.get(name, "0") == "0" for name in _RANKS)


if __name__ == "__main__":
    main()
