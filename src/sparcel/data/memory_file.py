"""A file in memory that processes share: locking, writing and freeing parts of it."""

from __future__ import annotations

import ctypes
import fcntl
import os
from threading import Lock
from weakref import finalize

_PUNCH_HOLE = 3
"""FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE of linux/falloc.h."""
_NOWHERE = 1 << 62
"""An offset that no file reaches."""
_libc = ctypes.CDLL(None, use_errno=True)
if hasattr(_libc, "fallocate"):
    _libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


class _ProcessLock:
    """Excludes other processes and threads; the system frees the lock of a killed process.

    While it holds the lock, the process must not close another descriptor of the same file: that
    would free the lock.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._threads, self._pid = Lock(), os.getpid()

    def __enter__(self) -> None:
        if self._pid != os.getpid():  # a thread of the parent may have held it in the fork
            self._threads, self._pid = Lock(), os.getpid()
        self._threads.acquire()
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX)
        except BaseException:
            self._threads.release()
            raise

    def __exit__(self, *error: object) -> None:
        fcntl.lockf(self._descriptor, fcntl.LOCK_UN)
        self._threads.release()


class MemoryFile:
    """An open file and its lock; it is closed when this object goes."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor, self.lock = descriptor, _ProcessLock(descriptor)
        finalize(self, os.close, descriptor)

    def write(self, content: bytes, offset: int) -> None:
        """Write all of the content, which one call of the system may not do."""
        left = memoryview(content)
        while left:
            count = os.pwrite(self.descriptor, left, offset)
            left, offset = left[count:], offset + count

    def free(self, start: int, end: int) -> None:
        """Give a range back to the system; it reads as zeros from then on."""
        if end > start and _libc.fallocate(self.descriptor, _PUNCH_HOLE, start, end - start):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    def can_free(self) -> bool:
        """Tell whether the system can give back a range of the file; some sandboxes cannot."""
        try:
            # Not at the file's end, where another process may be writing.
            self.free(_NOWHERE, _NOWHERE + 1)
        except (OSError, AttributeError):
            return False
        return True
