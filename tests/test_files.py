"""Files are there completely, or as they were; nothing else is opened; writers alone can lock."""

import errno
import fcntl
import os
import socket
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparcel.core import _files
from sparcel.core._files import (
    create,
    lock,
    locked,
    mapped,
    open_lock,
    open_regular,
    read_whole,
    regular,
    replacing,
)
from sparcel.errors import FormatError, InputError, SparcelWarning
from sparcel.products.stores import Folder

OTHERS = 65534
"""A user and a group of no rights."""

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become somebody else")


# ---- written whole or not at all


def test_a_file_is_replaced_when_the_block_ends(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for content in (b"first", b"second"):
        before = path.read_bytes() if path.exists() else None
        with replacing(path) as file:
            file.write(content)
            assert (path.read_bytes() if path.exists() else None) == before
        assert path.read_bytes() == content
    assert os.listdir(tmp_path) == ["file"]


def test_what_fails_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"before")

    def fail() -> None:
        with replacing(path) as file:
            file.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert path.read_bytes() == b"before"
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("way", ["write", "create"])
@pytest.mark.parametrize("lasting", [True, False])
def test_a_file_is_on_disk_before_it_has_its_name_and_then_its_name_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, lasting: bool
) -> None:
    place, flushed = Folder(tmp_path / "folder"), []
    place.lasting = lasting

    def note(file: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{file}"))
        what = path if path.is_dir() else os.fstat(file).st_size
        flushed.append((what, "file" in place.names()))

    monkeypatch.setattr(os, "fsync", note)
    getattr(place, way)("file", [b"con", b"tent"])
    made = [(tmp_path, False)]
    assert flushed == made + ([(7, False), (place.path, True)] if lasting else [])


def test_links_stay_links_and_pipes_stay_pipes(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("file")
    with replacing(tmp_path / "link") as file:
        file.write(b"content")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_bytes() == b"content"
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    with replacing(tmp_path / "pipe") as file:
        file.write(b"content")
    assert os.read(reader, 10) == b"content"
    os.close(reader)
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_a_link_to_itself_can_not_be_written(tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    with pytest.raises(OSError, match="Too many levels of symbolic links"), replacing(loop):
        pass
    assert os.listdir(tmp_path) == ["loop"]


# ---- modes and groups


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


@settings(max_examples=30)
@given(mode=st.integers(0, 0o777), mask=st.integers(0, 0o777))
def test_files_keep_their_mode_and_new_ones_follow_the_umask(mode: int, mask: int) -> None:
    with tempfile.TemporaryDirectory() as folder, umask(mask):
        old, new = Path(folder, "old"), Path(folder, "new")
        create(old).close()
        old.chmod(mode)
        for path, expected in ((old, mode), (new, 0o666 & ~mask)):
            with replacing(path) as file:
                now = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            assert now == stat.S_IMODE(path.stat().st_mode) == expected


@as_root
def test_files_keep_their_owner_and_group(tmp_path: Path) -> None:
    path = tmp_path / "file"
    create(path).close()
    os.chown(path, OTHERS - 1, OTHERS)
    path.chmod(0o660)
    with replacing(path):
        pass
    found = path.stat()
    assert (found.st_uid, found.st_gid) == (OTHERS - 1, OTHERS)
    assert stat.S_IMODE(found.st_mode) == 0o660


@pytest.mark.parametrize(("mode", "expected"), [(0o660, 0o600), (0o664, 0o644), (0o646, 0o646)])
def test_a_group_that_cannot_be_kept_leaves_no_rights_to_another(
    mode: int, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: int) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "fchown", refused)
    create(tmp_path / "old").close()
    old = list((tmp_path / "old").stat())
    old[stat.ST_MODE], old[stat.ST_GID] = stat.S_IFREG | mode, old[stat.ST_GID] + 1
    with create(tmp_path / "new", os.stat_result(old)) as file:
        assert stat.S_IMODE(os.fstat(file.fileno()).st_mode) == expected


# ---- nothing but files


def plant(kind: str, path: Path) -> None:
    """Put something at a path that is no small file."""
    victim = path.with_name("victim")
    if kind == "link":
        victim.write_bytes(b"precious")
        path.symlink_to(victim)
    elif kind == "dangling link":
        path.symlink_to(victim)
    elif kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        with closing(socket.socket(socket.AF_UNIX)) as made, umask(0):
            made.bind(str(path))
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.touch()
        os.truncate(path, 1 << 40)


def replace(path: Path) -> None:
    with replacing(path, links=False):
        pass


LINKS = ["link", "dangling link"]
OTHER_KINDS = ["folder", "pipe", "socket", "device"]
OPENING: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "open": (lambda path: open_regular(path, links=False), [*LINKS, *OTHER_KINDS]),
    "map": (lambda path: mapped(path, links=False), [*LINKS, *OTHER_KINDS]),
    "look": (lambda path: regular(path, links=False), [*LINKS, *OTHER_KINDS]),
    "replace": (replace, [*LINKS, *OTHER_KINDS]),
    "read": (lambda path: read_whole(path, links=False), [*LINKS, *OTHER_KINDS, "sparse"]),
    "lock": (open_lock, [*LINKS, *OTHER_KINDS, "sparse"]),
    "open a user's": (open_regular, OTHER_KINDS),
    "read a user's": (read_whole, [*OTHER_KINDS, "sparse"]),
}


@pytest.mark.parametrize("way", OPENING)
def test_what_is_no_file_is_refused_and_stays(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_files, "_MEMORY", 1 << 30)  # also where a terabyte would fit
    opened, kinds = OPENING[way]
    for kind in kinds:
        folder = tmp_path / kind.replace(" ", "-")
        folder.mkdir()
        plant(kind, folder / "file")
        before = os.lstat(folder / "file"), sorted(os.listdir(folder))
        with pytest.raises(FormatError, match=r"file (is a|has \d+ bytes, .* can be read$)"):
            opened(folder / "file")
        after = os.lstat(folder / "file"), sorted(os.listdir(folder))
        assert after[1] == before[1], kind
        assert os.path.samestat(after[0], before[0]), kind
        assert after[0].st_mtime_ns == before[0].st_mtime_ns, kind
        if kind == "link":
            assert (folder / "victim").read_bytes() == b"precious"


def test_what_a_user_names_may_be_a_link(tmp_path: Path) -> None:
    plant("link", tmp_path / "file")
    assert read_whole(tmp_path / "file") == mapped(tmp_path / "file") == b"precious"
    assert regular(tmp_path / "nothing") is None
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "nothing")


# ---- locks


@pytest.mark.parametrize(
    ("folder", "expected"),
    [
        (0o755, 0o600),
        (0o700, 0o600),
        (0o775, 0o660),
        (0o2770, 0o660),
        (0o777, 0o666),
        (0o1777, 0o600),  # there nobody but its owner can replace a file
    ],
)
def test_whoever_may_write_to_a_folder_can_open_its_lock(
    folder: int, expected: int, tmp_path: Path
) -> None:
    (tmp_path / "old.lock").touch(0o644)  # as sparcel made them before
    tmp_path.chmod(folder)
    for path in (tmp_path / "old.lock", tmp_path / "new.lock"):
        os.close(open_lock(path))
        assert stat.S_IMODE(path.stat().st_mode) == expected


def test_a_file_that_was_linked_into_the_place_of_a_lock_keeps_its_mode(tmp_path: Path) -> None:
    (tmp_path / "private").touch(0o600)
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "open" / "lock").hardlink_to(tmp_path / "private")
    os.close(open_lock(tmp_path / "open" / "lock"))
    assert stat.S_IMODE((tmp_path / "private").stat().st_mode) == 0o600


@as_root
def test_who_may_only_read_cannot_lock() -> None:
    with tempfile.TemporaryDirectory() as name:  # pytest's own folders let nobody else in
        Path(name).chmod(0o755)
        path = Path(name, "lock")

        def lock_as_others() -> int:
            command = ["flock", "--exclusive", "--nonblock", str(path), "true"]
            done = subprocess.run(
                command, user=OTHERS, group=OTHERS, extra_groups=[], capture_output=True, timeout=60
            )
            return done.returncode

        path.touch(0o644)
        assert lock_as_others() == 0
        with locked(path):
            pass
        assert lock_as_others() != 0


def test_a_lock_of_somebody_else_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    (tmp_path / "lock").touch()
    monkeypatch.setattr(os, "open", refused)
    with pytest.raises(InputError, match=f"let its owner .user {os.geteuid()}. use this folder"):
        open_lock(tmp_path / "lock")
    with pytest.raises(PermissionError):
        open_lock(tmp_path / "new")


def test_a_lock_is_waited_for_with_a_message_and_an_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lock"
    monkeypatch.setattr(_files, "_SILENCE_S", 0.01)
    monkeypatch.setattr(_files, "PATIENCE_S", 0.1)
    file = open_lock(path)
    for how in (fcntl.LOCK_SH, fcntl.LOCK_EX):
        with locked(path):
            with (
                pytest.warns(SparcelWarning, match=f"{path}, which process {os.getpid()} has"),
                pytest.raises(InputError, match=f"locked for 0 s by process {os.getpid()}"),
            ):
                lock(file, path, how)
            with pytest.raises(BlockingIOError):
                lock(file, path, how | fcntl.LOCK_NB)
        lock(file, path, how)
        lock(file, path, fcntl.LOCK_UN)
    os.close(file)
