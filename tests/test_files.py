"""Files are there completely, or as they were."""

import os
import stat
from pathlib import Path

import pytest

from sparcel._files import replacing


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
