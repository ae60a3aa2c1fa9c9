"""Stores that were written before chunks had their present layout are read, and go on."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from sparcel.delta import Publisher, Subscriber, apply_, version_of
from sparcel.delta.base import copied as base_copy
from sparcel.delta.chunk import read_chunk
from sparcel.delta.files import File
from sparcel.delta.parts import parts_of
from sparcel.errors import FormatError
from sparcel.stores import Folder
from tests.delta.pairs import copied, same

STORE = Path(__file__).parent / "first_layout.zip"
"""Versions 0 to 4 of six tensors, in floats and integers, of which two are tied at first, one comes
and one goes; sparcel 0.1 of November 2026 published them, with an anchor each 3."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with zipfile.ZipFile(STORE) as store:
        store.extractall(tmp_path)
    return tmp_path


def files(folder: Path) -> list[File]:
    return [File(path.read_bytes(), path.name) for path in sorted(folder.glob("delta-*"))]


def test_each_delta_makes_its_version(folder: Path) -> None:
    subscriber = Subscriber(folder)
    subscriber.update()
    assert subscriber.version == version_of(subscriber.tensors, 4)
    anchor = min(folder.glob("anchor-*"))
    weights = base_copy(parts_of(File(anchor.read_bytes(), anchor.name).tensors()))
    version = version_of(weights, 0)
    codes = set()
    for file in files(folder):
        if file.version("base") == version:
            chunks = file.chunks()
            assert all(bytes(chunk[:4]) == b"SPD1" for chunk in chunks)
            codes |= {read_chunk(chunk).code for chunk in chunks}
            version = apply_(weights, chunks, since=version).version
            assert version == file.version() == version_of(weights, version.number)
    assert codes == {"steps", "dense", "removed"}
    assert same(weights, subscriber.tensors)


def test_a_publisher_goes_on(folder: Path) -> None:
    behind = Subscriber(folder)
    behind.update()
    publisher = Publisher(Folder(folder))
    weights = copied(behind.tensors)
    weights["q"] += 1
    assert publisher.publish(weights).number == 5
    assert bytes(files(folder)[-1].chunks()[0][:4]) == b"SPD2"
    behind.update()
    assert same(behind.tensors, weights)


def test_damage(folder: Path) -> None:
    for file in files(folder):
        for chunk in file.chunks():
            for place in range(0, len(chunk), 7):
                damaged = bytearray(chunk)
                damaged[place] ^= 1
                if not 12 <= place < 16:  # which nobody reads
                    with pytest.raises(FormatError, match=r"checksum|begins with|header is wrong"):
                        read_chunk(bytes(damaged))
