"""Files are opened only if they are files, locked by writers, and written whole or not at all.

Others may write to a folder, too, and put a link, a pipe or a device where a file is expected. What
a user names may be a link; inside of stores and caches none is followed (``links=False``).
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedRandom, BufferedReader
from pathlib import Path
from secrets import token_hex
from typing import IO

from sparcel.errors import FormatError, InputError, warn

PATIENCE_S = 60.0
"""How long to wait for a lock."""

_SILENCE_S = 5.0
"""How long to wait for a lock without a word."""

_MOST_LOCK = 1 << 20
"""Bytes of a lock file."""

_MEMORY = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
"""Bytes of this machine's memory, which a file that is read whole cannot exceed."""

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""What the kernel says of file systems without locks."""


def regular(path: Path, *, links: bool = True) -> os.stat_result | None:
    """Return what the system knows of a file, or None if there is nothing at the path.

    Parameters
    ----------
    path
        Where the file is.
    links
        Whether the path may be a link.

    Raises
    ------
    FormatError
        If something else is there.
    """
    try:
        found = path.stat(follow_symlinks=links)
    except FileNotFoundError:
        return None
    _check(path, found)
    return found


def open_regular(path: Path, *, links: bool = True, most: int | None = None) -> BufferedReader:
    """Open a file for reading, without waiting for whatever may be there instead.

    Parameters
    ----------
    path, links
        As for `regular`.
    most
        The bytes that it may have; None for any number.

    Raises
    ------
    FormatError
        If it is no file, or a larger one.
    """
    file = _opened(path, os.O_RDONLY, links, most)
    return open(path, "rb", opener=lambda *_: file)


def read_whole(path: Path, *, links: bool = True, most: int = _MEMORY) -> memoryview:
    """Return a file's bytes in memory of their own, whatever happens to the file.

    Raises
    ------
    FormatError
        If it is no file, or has more than ``most`` bytes, by default those of this machine's
        memory.
    """
    with open_regular(path, links=links, most=most) as file:
        data = bytearray(os.fstat(file.fileno()).st_size)
        length = file.readinto(data)
    return memoryview(data)[:length]


def mapped(path: Path, *, links: bool = True) -> memoryview:
    """Return a file's bytes where they are; the file must not change meanwhile.

    Raises
    ------
    FormatError
        If it is no file.
    """
    with open_regular(path, links=links) as file:
        return _map(file.fileno(), flags=mmap.MAP_PRIVATE)


def shared(path: Path, *, writes: bool) -> memoryview:
    """Return a file's bytes where they are, as all see them who map it so; no link is followed.

    Raises
    ------
    FormatError
        If it is no file.
    """
    file = _opened(path, os.O_RDWR if writes else os.O_RDONLY, False, None)
    try:
        return _map(file, access=mmap.ACCESS_WRITE if writes else mmap.ACCESS_READ)
    finally:
        os.close(file)


def _map(file: int, **how: int) -> memoryview:
    if not os.fstat(file).st_size:
        return memoryview(b"")  # which cannot be mapped
    return memoryview(mmap.mmap(file, 0, **how))


def create(path: Path, like: os.stat_result | None = None) -> BufferedRandom:
    """Make a file for reading and writing where there is none.

    Parameters
    ----------
    path
        Where to make it.
    like
        The file whose place it takes: it gets the same owner and group, as far as the system allows
        that, and the same mode. Without such a file the umask decides.
    """
    mode = 0o666 if like is None else 0o600
    made = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    if like is not None:
        _liken(made, like)
    return open(path, "w+b", opener=lambda *_: made)


@contextmanager
def replacing(path: Path, *, links: bool = True, lasting: bool = True) -> Iterator[IO[bytes]]:
    """Open a temporary file, which replaces ``path`` when the block ends without an error.

    Readers of ``path`` therefore find a whole file. Several processes may write it at the same
    time; the last one wins. The folder must exist. The new file has the mode and the group of the
    old one.

    Parameters
    ----------
    path
        Where the file is to be.
    links
        Whether a user has named the path. Then a link stays one, and a pipe or a device is written
        to directly. Else they are refused.
    lasting
        Whether the file outlives a crash of the machine: it is flushed to disk.

    Raises
    ------
    FormatError
        If a file is needed, and something else is there.
    """
    if links:
        path = real(path)
        if path.exists() and not path.is_file():
            with path.open("wb") as file:
                yield file
            return
    old = regular(path, links=False)
    part = path.with_name(f"{path.name}.{token_hex(8)}.part")
    try:
        with create(part, old) as file:
            yield file
            file.flush()
            if lasting:
                os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def real(path: Path) -> Path:
    """Return where a path leads that a user has named.

    Raises
    ------
    OSError
        If it is a link that leads back to itself.
    """
    path = Path(os.path.realpath(path))
    if path.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    return path


@contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold a lock alone, where the file system has locks.

    Raises
    ------
    FormatError, InputError
        As from `open_lock` and `lock`.
    BlockingIOError
        If somebody else holds it, and this is not to wait.
    """
    file = open_lock(path)
    try:
        try:
            lock(file, path, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        yield
    finally:
        # Closing is not enough if a process was forked meanwhile, which has the file too.
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_UN)
        os.close(file)


def open_lock(path: Path) -> int:
    """Open a lock file, which is made if it is not there, and return its descriptor.

    Whoever can open a file can lock it, and so hold up all others. So whoever may write to the
    folder can open it, and nobody else.

    Raises
    ------
    FormatError
        If something other than a small file is there.
    InputError
        If it is somebody else's.
    """
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT
    try:
        file = _opened(path, flags, False, _MOST_LOCK, 0o600)
    except PermissionError as error:
        if (there := regular(path, links=False)) is None:
            raise
        raise InputError(
            f"{path} can't be opened for writing, as a lock must be: let its owner (user"
            f" {there.st_uid}) use this folder once more, or let you write to it by chmod"
        ) from error
    _leave_to_writers(file, os.stat(path.parent))
    return file


def lock(file: int, path: Path, how: int) -> None:
    """Lock an open file as `fcntl.flock` does; after some seconds say whom this waits for.

    Raises
    ------
    InputError
        If the lock does not come within `PATIENCE_S`.
    OSError
        If the file system has no locks.
    """
    began, said, pause = time.monotonic(), False, 0.001
    while True:
        try:
            return fcntl.flock(file, how | fcntl.LOCK_NB)
        except BlockingIOError:
            if how & fcntl.LOCK_NB:
                raise
        waited = time.monotonic() - began
        if waited > PATIENCE_S:
            raise InputError(
                f"{path} was locked for {waited:.0f} s by {_holder(file)}: end what holds it, and"
                " try again"
            )
        if waited > _SILENCE_S and not said:
            warn(f"waiting for {path}, which {_holder(file)} has locked; up to {PATIENCE_S:.0f} s")
            said = True
        time.sleep(pause)
        pause = min(2 * pause, 0.1)


def _opened(path: Path, flags: int, links: bool, most: int | None, mode: int = 0) -> int:
    # O_NONBLOCK, because opening a pipe waits for its other end.
    flags |= os.O_CLOEXEC | os.O_NONBLOCK | (0 if links else os.O_NOFOLLOW)
    try:
        file = os.open(path, flags, mode)
    except OSError:
        regular(path, links=links)
        raise
    try:
        _check(path, os.fstat(file), most)
    except FormatError:
        os.close(file)
        raise
    return file


def _check(path: Path, found: os.stat_result, most: int | None = None) -> None:
    if stat.S_ISLNK(found.st_mode):
        raise FormatError(
            f"{path} is a link, which could lead out of its folder; put the file itself there, or"
            " let the folder be the link"
        )
    if not stat.S_ISREG(found.st_mode):
        kind = _KINDS.get(stat.S_IFMT(found.st_mode), "device")
        raise FormatError(f"{path} is a {kind}, where a file should be; remove it")
    if most is not None and found.st_size > most:
        raise FormatError(f"{path} has {found.st_size} bytes, and at most {most} can be read")


_KINDS = {stat.S_IFDIR: "folder", stat.S_IFIFO: "pipe", stat.S_IFSOCK: "socket"}


def _liken(file: int, old: os.stat_result) -> None:
    """Give a file the owner, group and mode of another one, as far as the system allows that."""
    mode = stat.S_IMODE(old.st_mode) & 0o777
    for owner in (old.st_uid, -1):
        with suppress(OSError):
            os.fchown(file, owner, old.st_gid)
            break
    if os.fstat(file).st_gid != old.st_gid:
        mode &= 0o707 | (mode & 0o007) << 3  # another group may do what everybody may
    with suppress(OSError):  # a file system without modes
        os.fchmod(file, mode)


def _leave_to_writers(file: int, folder: os.stat_result) -> None:
    """Let those open a lock file who may replace files in its folder, unless it is another's."""
    own = os.fstat(file)
    if os.geteuid() not in (0, own.st_uid) or own.st_nlink > 1:
        return
    shared = 0 if folder.st_mode & stat.S_ISVTX else folder.st_mode
    if shared & stat.S_IWGRP and own.st_gid != folder.st_gid:
        with suppress(OSError):
            os.fchown(file, -1, folder.st_gid)
    mode = 0o600 | (0o006 if shared & stat.S_IWOTH else 0)
    if shared & stat.S_IWGRP and os.fstat(file).st_gid == folder.st_gid:
        mode |= 0o060
    if stat.S_IMODE(own.st_mode) != mode:
        with suppress(OSError):
            os.fchmod(file, mode)


def _holder(file: int) -> str:
    """Name the process that holds a lock on a file, where Linux tells."""
    found = os.fstat(file)
    device = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    with suppress(OSError):
        for words in map(str.split, Path("/proc/locks").read_text().splitlines()):
            if words[1] == "FLOCK" and words[5] == device and int(words[4]) > 0:  # of our own
                return f"process {words[4]}"
    return "another process"
