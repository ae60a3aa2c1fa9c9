"""Run a command that ends with the process that started it, on any POSIX system.

``python guard.py COMMAND ...``, started in a session of its own, runs the command and kills the
session's process group, itself included, when standard input is closed, as it is when the starter
dies, be it by SIGKILL. It is what keeps loopback workers from outliving a run; inside an emulated
network, the PID namespace does that.

It runs as a file, with nothing of sparcel imported, since that would load torch.
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
