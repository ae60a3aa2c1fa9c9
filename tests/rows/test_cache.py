"""A cache holds the rows that were written, or says that it does not."""

import dataclasses
import itertools
import json
import os
import threading
import zlib
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparcel.errors import InputError
from sparcel.products.rows import (
    CacheWriter,
    Rows,
    cache,
    concatenate,
    fingerprint,
    load,
    save,
    shard,
)
from sparcel.products.rows.cache import ALIGNMENT, MAGIC, START, VERSION
from tests.rows.made import NUMBERS, TEXTS, folder, made, same

ANY = made(NUMBERS) | made(TEXTS)


def loaded(path: Path) -> Rows:
    rows = load(path)
    assert rows is not None
    return rows


@given(ANY, st.data())
def test_a_cache_holds_what_was_written_at_once_or_in_pieces(
    rows: Rows, data: st.DataObject
) -> None:
    with folder() as where:
        save(where / "whole", rows, "made of this")
        cuts = data.draw(st.lists(st.integers(0, len(rows)), max_size=3))
        with CacheWriter(where / "pieces", "made of this") as writer:
            for start, stop in itertools.pairwise([0, *sorted(cuts), len(rows)]):
                writer.append(rows.slice(start, stop))
        for name in ("whole", "pieces"):
            assert same(loaded(where / name), rows)
        assert sorted(os.listdir(where)) == ["pieces", "whole"]


@pytest.mark.parametrize(
    ("values", "columns", "labels"),
    [
        (np.float32, np.int32, None),
        (np.float64, np.int32, np.int8),
        (np.float32, np.int64, np.float32),
        (np.float64, np.int64, np.bool_),
    ],
)
def test_dtypes_stay(values: type, columns: type, labels: type | None, tmp_path: Path) -> None:
    found = None if labels is None else np.array([1, 0], labels)
    rows = Rows(np.array([0, 1, 1]), np.array([4], columns), np.array([0.1], values), 9, found)
    save(tmp_path / "cache", rows, "")
    cached = loaded(tmp_path / "cache")
    assert (cached.columns.dtype, cached.values.dtype) == (columns, values)
    assert (cached.labels is None) == (labels is None)
    assert cached.labels is None or cached.labels.dtype == labels
    for name in ("columns", "values", "offsets"):
        assert getattr(cached, name).ctypes.data % ALIGNMENT == 0
    with pytest.raises(ValueError, match="read-only"):
        cached.values[0] = 1


def test_a_cache_without_rows(tmp_path: Path) -> None:
    CacheWriter(tmp_path / "cache", "nothing").close()
    assert (len(loaded(tmp_path / "cache")), loaded(tmp_path / "cache").nnz) == (0, 0)


def test_the_most_dimensions_count(tmp_path: Path) -> None:
    with CacheWriter(tmp_path / "cache", "") as writer:
        for dimensions in (3, 8, 5):
            writer.append(dataclasses.replace(plain(2), dimensions=dimensions))
    assert loaded(tmp_path / "cache").dimensions == 8


def plain(count: int, fill: float = 1) -> Rows:
    """Make rows of one entry each, all with this value and label."""
    filled = np.full(count, fill, np.float32)
    columns = np.arange(count, dtype=np.int32)
    return Rows(np.arange(count + 1), columns, filled, count, filled.astype(np.float64))


def test_rows_that_are_not_alike_are_refused_and_change_nothing(tmp_path: Path) -> None:
    rows = plain(2)
    assert rows.labels is not None
    others = [
        dataclasses.replace(rows, values=rows.values.astype(np.float64)),
        dataclasses.replace(rows, columns=rows.columns.astype(np.int64)),
        dataclasses.replace(rows, labels=None),
        dataclasses.replace(rows, labels=rows.labels.astype(np.str_)),
        dataclasses.replace(rows, labels=rows.labels.astype(np.int32)),
    ]
    with CacheWriter(tmp_path / "cache", "") as writer:
        writer.append(rows)
        for other in others:
            with pytest.raises(InputError, match="all rows of a cache are alike, but columns of"):
                writer.append(other)
        with pytest.raises(InputError, match="labels must be numbers or strings, got object"):
            writer.append(dataclasses.replace(rows, labels=np.array([{}, {}])))
    assert same(loaded(tmp_path / "cache"), rows)


def test_an_exception_leaves_the_folder_as_it_was(tmp_path: Path) -> None:
    save(tmp_path / "cache", plain(3), "")
    before = (tmp_path / "cache").read_bytes()
    with pytest.raises(InputError, match="labels must be numbers"):
        save(tmp_path / "cache", dataclasses.replace(plain(4), labels=np.array([{}])), "")
    assert os.listdir(tmp_path) == ["cache"]
    assert (tmp_path / "cache").read_bytes() == before


@pytest.mark.parametrize("at", [0, 50_000, 99_999])
def test_files_of_one_name_size_and_time_are_told_apart_by_their_bytes(
    at: int, tmp_path: Path
) -> None:
    content, made_of = bytearray(100_000), []
    for where in ("a", "b"):
        path = tmp_path / where / "rows"
        path.parent.mkdir()
        path.write_bytes(content)
        os.utime(path, ns=(10**18, 10**18))
        made_of.append(fingerprint(path))
        content[at] = 1
    assert made_of[0] != made_of[1]
    path.rename(tmp_path / "rows")
    assert fingerprint(tmp_path / "rows") == made_of[1]


def test_what_is_made_of_something_else_is_not_loaded(tmp_path: Path) -> None:
    source, cache = tmp_path / "rows.svm", tmp_path / "cache"
    source.write_text("1 1:1\n")
    made_of = fingerprint(source, index_from=1)
    assert load(cache, made_of) is None
    save(cache, plain(1), made_of)
    assert load(cache, made_of) is not None and load(cache) is not None
    assert load(cache, fingerprint(source, index_from=0)) is None
    assert load(cache, fingerprint([source, source], index_from=1)) is None
    os.utime(source, ns=(0, 1))
    assert load(cache, fingerprint(source, index_from=1)) is None
    with pytest.raises(InputError, match="at least one file"):
        fingerprint([])


@pytest.mark.parametrize("change", ["version", "byte order"])
def test_what_another_version_or_machine_wrote_is_not_loaded(change: str, tmp_path: Path) -> None:
    path = tmp_path / "cache"
    save(path, plain(3), "")
    content = bytearray(path.read_bytes())
    if change == "version":
        content[len(MAGIC)] += 1
    else:
        place = START.unpack_from(content)[3]
        header = json.loads(content[place:])
        header["byteorder"] = {"little": "big", "big": "little"}[header["byteorder"]]
        text = json.dumps(header).encode()
        content[place:] = text
        START.pack_into(content, 0, MAGIC, VERSION, zlib.crc32(text), place, len(text))
    path.write_bytes(content)
    assert load(path) is None


@given(ANY, st.data())
def test_a_changed_byte_is_noticed(rows: Rows, data: st.DataObject) -> None:
    with folder() as where:
        path = where / "cache"
        save(path, rows, "made of this")
        content = bytearray(path.read_bytes())
        at = data.draw(st.integers(0, len(content) - 1))
        content[at] ^= data.draw(st.integers(1, 255))
        path.write_bytes(content)
        said = ""
        try:
            found = load(path, "made of this")
        except InputError as error:
            said = str(error)
        if said:
            told = ("cache is broken: ", "is no cache of rows")
            assert any(words in said for words in told)
        elif found is None:
            assert len(MAGIC) <= at < len(MAGIC) + 4  # taken for another version, and made anew
        else:
            # The byte lies between arrays, where nothing is.
            assert same(found, rows)


@given(ANY, st.data(), st.integers(1, 4))
def test_a_changed_bit_is_noticed_by_a_rank_that_maps_it(
    rows: Rows, data: st.DataObject, ranks: int
) -> None:
    few = mock.patch.object(cache, "CHECKED_BYTES", 16)
    with folder() as where, few:
        path = where / "cache"
        with CacheWriter(path, "") as writer:
            cut = data.draw(st.integers(0, len(rows)))
            for part in (rows.slice(0, cut), rows.slice(cut, len(rows))):
                writer.append(part)
        parts = [load(path, None, rank, ranks) for rank in range(ranks)]
        assert same(concatenate([part for part in parts if part is not None]), rows)
        content = bytearray(path.read_bytes())
        header = json.loads(content[START.unpack_from(content)[3] :])
        kept = [entry for entry in header["arrays"].values() if entry["length"]]
        entry = data.draw(st.sampled_from(kept))
        bits = 8 * entry["length"] * np.dtype(entry["dtype"]).itemsize
        bit = data.draw(st.integers(0, bits - 1))
        content[entry["place"] + bit // 8] ^= 1 << bit % 8
        path.write_bytes(content)
        said = []
        for rank in range(ranks):
            try:
                load(path, None, rank, ranks)
            except InputError as error:
                said.append(str(error))
        assert said and all("is broken: the checksum of its" in words for words in said)


def test_a_rank_checks_its_own_share_and_the_offsets_alone(tmp_path: Path) -> None:
    path, rows = tmp_path / "cache", plain(1_000_000)
    save(path, rows, "")
    content = bytearray(path.read_bytes())
    entry = json.loads(content[START.unpack_from(content)[3] :])["arrays"]["values"]
    content[entry["place"]] ^= 1
    path.write_bytes(content)
    with pytest.raises(InputError, match="the checksum of its values is wrong; remove it"):
        load(path, None, 0, 4)
    last = load(path, None, 3, 4)
    assert last is not None and same(last, shard(rows, 3, 4))


@given(ANY, st.data())
def test_a_truncated_or_longer_file_is_broken(rows: Rows, data: st.DataObject) -> None:
    with folder() as where:
        path = where / "cache"
        save(path, rows, "")
        content = path.read_bytes()
        length = data.draw(st.integers(0, len(content) - 1))
        for changed in (content[:length], content + b"x"):
            path.write_bytes(changed)
            with pytest.raises(InputError, match=r"(is broken: .*; remove it|is no cache of rows)"):
                load(path)


def test_a_folder_or_a_pipe_is_no_cache(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, kind in ((tmp_path, "folder"), (tmp_path / "pipe", "pipe")):
        with pytest.raises(InputError, match=f"can't be read: .* is a {kind}"):
            load(path)


def test_writers_of_one_cache_do_not_hurt_one_another(tmp_path: Path) -> None:
    path, written = tmp_path / "cache", threading.Event()

    def write(fill: int) -> None:
        for _ in range(5):
            with CacheWriter(path, "") as writer:
                for _ in range(4):
                    writer.append(plain(1000, fill))
            written.set()

    writers = [threading.Thread(target=write, args=(fill,)) for fill in range(4)]
    for writer in writers:
        writer.start()
    written.wait()
    while any(writer.is_alive() for writer in writers):
        rows = loaded(path)
        assert rows.labels is not None and len(rows) == 4000
        assert set(rows.values.tolist()) == set(rows.labels.tolist()) and len(set(rows.values)) == 1
    assert os.listdir(tmp_path) == ["cache"]


@given(ANY, st.integers(1, 9))
def test_shards_are_consecutive_and_balanced(rows: Rows, ranks: int) -> None:
    with folder() as where:
        save(where / "cache", rows, "")
        whole = loaded(where / "cache")
        shards = [shard(whole, rank, ranks) for rank in range(ranks)]
        for name in ("columns", "values", "labels"):
            joined = np.concatenate([getattr(part, name) for part in shards])
            assert joined.tolist() == getattr(rows, name).tolist()
        weights = [part.nnz + len(part) for part in shards]
        longest = 1 + int(np.diff(rows.offsets).max(initial=0))
        assert max(weights) < sum(weights) / ranks + longest
        assert all(np.shares_memory(part.columns, whole.columns) for part in shards if part.nnz)


def test_a_shard_is_that_of_a_rank() -> None:
    with pytest.raises(InputError, match="rank must lie in"):
        shard(plain(3), 2, 2)
