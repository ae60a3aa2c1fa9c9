"""Run a command that ends with the process that started it, on any POSIX system.

``python guard.py COMMAND ...``, started in a session of its own, runs the command. When its
standard input is closed, it kills the session's process group, itself included. The kernel closes
the input when the starter dies, even by SIGKILL. So no loopback worker outlives a run; on an
emulated network the PID namespace ensures that.

This file runs as a script and imports nothing of sparcel, because that would load torch.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading


def _kill_when_orphaned() -> None:
    while os.read(0, 1024):
        pass
    os.killpg(0, signal.SIGKILL)


def main() -> int:
    """Run the command in the arguments and return its exit status as a shell would."""
    worker = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, close_fds=False)
    threading.Thread(target=_kill_when_orphaned, daemon=True).start()
    status = worker.wait()
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    if os.getpgrp() != os.getpid():
        sys.exit("guard.py kills its process group: start it in a session of its own")
    # Not sys.exit: the watching thread holds standard input in a blocking read.
    os._exit(main())
