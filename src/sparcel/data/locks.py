"""A lock between processes, which the system gives back for a process that was killed."""

from __future__ import annotations

import fcntl
import os
from threading import Lock
from typing import Self


class ProcessLock:
    """Excludes other processes by a lock on an open file, and other threads by one of their own.

    While it holds the lock, the process must not close another descriptor of the same file: that
    would free the lock.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._threads, self._pid = Lock(), os.getpid()

    def __enter__(self) -> Self:
        if self._pid != os.getpid():  # a thread of the parent may have held it in the fork
            self._threads, self._pid = Lock(), os.getpid()
        self._threads.acquire()
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX)
        except BaseException:
            self._threads.release()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        fcntl.lockf(self._descriptor, fcntl.LOCK_UN)
        self._threads.release()
