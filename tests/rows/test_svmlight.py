"""Rows are read as they were written, in any layout, by any number of ranks and threads."""

import bz2
import gzip
import io
import lzma
import sys
from contextlib import nullcontext, suppress
from fractions import Fraction
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from sklearn.datasets import load_svmlight_file

from sparcel.errors import InputError, MissingDependencyError
from sparcel.products.rows import (
    Rows,
    SvmLight,
    concatenate,
    files,
    read_svmlight,
)
from sparcel.products.rows.files import FilePiece
from tests.rows.made import NUMBERS, TEXTS, folder, made, same, texts_of

PACKED = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.ZstdCompressor(write_checksum=True).compress,
}
LAYOUTS = st.fixed_dictionaries({"index_from": st.integers(0, 1), "threads": st.integers(1, 3)})


def written(path: Path, text: bytes) -> Path:
    path.write_bytes(PACKED[path.suffix](text))
    return path


def blocks_of(size: int) -> "mock._patch[int]":
    return mock.patch.object(files, "BLOCK_BYTES", size)


@given(st.data(), LAYOUTS, st.sampled_from([NUMBERS, TEXTS]), st.sampled_from(list(PACKED)))
def test_one_rank_reads_what_was_written(
    data: st.DataObject, layout: dict[str, int], labels: st.SearchStrategy[object], suffix: str
) -> None:
    rows = data.draw(made(labels).filter(len))
    text = data.draw(texts_of(rows, layout["index_from"]))
    with folder() as where, blocks_of(data.draw(st.integers(1, 99))):
        path = written(where / f"rows{suffix}", text)
        assert same(read_svmlight(path, rows.dimensions, **layout), rows)
        assert read_svmlight(path, **layout).dimensions == 1 + rows.columns.max(initial=-1)


@given(st.data(), LAYOUTS, st.integers(1, 9), st.integers(1, 99))
def test_ranks_in_turn_read_all_rows_once(
    data: st.DataObject, layout: dict[str, int], ranks: int, block: int
) -> None:
    dimensions, sources, read = 30, [], []
    with folder() as where, blocks_of(block):
        for part in range(data.draw(st.integers(1, 3))):
            rows = data.draw(made(NUMBERS))
            path = where / str(part)
            path.write_bytes(data.draw(texts_of(rows, layout["index_from"])))
            sources.append((path, Rows(*arrays_of(rows), dimensions, rows.labels)))
        paths = [path for path, _ in sources]
        for rank in range(ranks):
            read.append(read_svmlight(paths, dimensions, rank=rank, ranks=ranks, **layout))
    assert same(concatenate(read), concatenate([rows for _, rows in sources]))


def arrays_of(rows: Rows) -> tuple[np.ndarray, ...]:
    return rows.offsets, rows.columns, rows.values


@given(st.data(), st.lists(st.sampled_from(list(PACKED)), min_size=1, max_size=5))
def test_ranks_share_plain_and_compressed_files(data: st.DataObject, suffixes: list[str]) -> None:
    lines = [f"{line} {line + 1}:1" for line in range(40)]
    found: list[float] = []
    with folder() as where:
        paths = [
            written(where / f"{place}{suffix}", "\n".join(lines[place :: len(suffixes)]).encode())
            for place, suffix in enumerate(suffixes)
        ]
        ranks = data.draw(st.integers(1, 6))
        for rank in range(ranks):
            rows = read_svmlight(paths, 40, rank=rank, ranks=ranks)
            assert rows.labels is not None and rows.labels.tolist() == rows.columns.tolist()
            found += rows.labels.tolist()
    assert sorted(found) == list(range(40))


@given(st.data(), st.integers(0, 1))
def test_rows_are_those_of_scikit_learn(data: st.DataObject, index_from: int) -> None:
    rows = data.draw(made(NUMBERS).filter(len))
    text = data.draw(texts_of(rows, index_from))
    matrix, labels = load_svmlight_file(
        io.BytesIO(text), n_features=rows.dimensions, zero_based=index_from == 0, dtype=np.float64
    )
    with folder() as where:
        read = read_svmlight(written(where / "rows", text), rows.dimensions, index_from)
    assert read.labels is not None and read.labels.tolist() == labels.tolist()
    assert read.offsets.tolist() == matrix.indptr.tolist()
    assert read.columns.tolist() == matrix.indices.tolist()
    assert read.values.tolist() == matrix.data.astype(np.float32).tolist()


@given(st.floats(width=32, allow_nan=False, allow_infinity=False), st.integers(0, 40), st.data())
def test_values_are_rounded_once(start: float, digits: int, data: st.DataObject) -> None:
    # Near the middle between two floats a second rounding would show.
    value = np.float64(start)
    if abs(start) < 1e38 and data.draw(st.booleans()):
        value = (value + np.nextafter(np.float32(start), np.float32(np.inf))) / 2
    text = data.draw(st.sampled_from([f"{value:.{digits}f}", f"{value:.{digits}e}"]))
    with folder() as where:
        read = read_svmlight(written(where / "rows", f"{text} 1:{text}".encode()))
    assert read.labels is not None and read.labels[0] == float(text)
    assert read.values[0] == float32(text)


def float32(text: str) -> np.float32:
    """Round a decimal to float32, correctly, among the neighbours of what two roundings give."""
    near = np.float32(float(text))
    around = [np.nextafter(near, np.float32(-np.inf)), near, np.nextafter(near, np.float32(np.inf))]
    exact = Fraction(text)
    distances = [
        (abs(Fraction(float(one)) - exact), int(one.view(np.int32)) & 1)
        for one in around
        if np.isfinite(one)
    ]
    finite = [one for one in around if np.isfinite(one)]
    return finite[distances.index(min(distances))]


WRONG = {
    "x": "expected index:value, got 'x'",
    "-3:1": "expected index:value, got '-3:1'",
    ":1": "expected index:value, got ':1'",
    "7": "expected index:value, got '7'",
    "\v": r"expected index:value, got '\x0b'",
    "é:1": r"expected index:value, got '\xc3\xa9:1'",
    "x" * 50: f"expected index:value, got '{'x' * 40}...'",
    "3:": "the value in '3:' is no finite number in float32",
    "3:+-1": "the value in '3:+-1' is no finite number in float32",
    "3:1.5.2": "the value in '3:1.5.2' is no finite number in float32",
    "3:nan": "the value in '3:nan' is no finite number in float32",
    "3:-inf": "the value in '3:-inf' is no finite number in float32",
    "3:1e400": "the value in '3:1e400' is no finite number in float32",
    "3:1e39": "the value in '3:1e39' is no finite number in float32",
    "3:0x10": "the value in '3:0x10' is no finite number in float32",
    "0:1": "indices begin with 1, got '0:1': read_svmlight takes index_from=0, sparcel"
    " linear fit --index-from 0",
    "2:1": "indices must increase within a line, got '2:1' after index 2",
    "1:1": "indices must increase within a line, got '1:1' after index 2",
    "31:1": "'31:1' needs dimensions=31 or more, not 30",
    "5000000000:1": "'5000000000:1' needs dimensions=5000000000 or more, not 30",
    "1234567890123456789:1": "the index is too long in '1234567890123456789:1'",
    "9223372036854775808:1": "the index is too long in '9223372036854775808:1'",
    "18446744073709551619:1": "the index is too long in '18446744073709551619:1'",
    "qid:3": "'qid:3' names a query, but rows are fitted one by one: remove the qid",
}


@pytest.mark.parametrize(
    ("token", "suffix"), [*((token, "") for token in WRONG), *(("x", suffix) for suffix in PACKED)]
)
def test_an_error_names_the_file_and_the_line(token: str, suffix: str, tmp_path: Path) -> None:
    lines = [f"{'# a comment' * (n % 3)}\n1 {n % 7 + 1}:0.5" for n in range(30)]
    bad = 41
    text = "\n".join(lines).split("\n")
    text[bad - 1] = f"1 {token}" if token == "0:1" else f"1 2:1 {token} 9:1"
    path = written(tmp_path / f"rows{suffix}", "\n".join(text).encode())
    ranks = 1 if suffix else 4
    for threads in (1, 2):
        said = []
        for rank in range(ranks):
            try:
                with blocks_of(20):
                    read_svmlight(path, 30, rank=rank, ranks=ranks, threads=threads)
            except InputError as error:
                said.append(str(error))
        assert said == [f"{path}:{bad}: {WRONG[token]}"]


def test_labels_that_are_no_numbers_are_texts_or_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "rows", b"# a\n1 1:1\n+1 2:1\nn/a 1:2\n2:3 1:1")
    with pytest.raises(InputError, match=r"rows:4: the label 'n/a' is no finite number; labels="):
        read_svmlight(path, labels="numbers")
    with pytest.raises(InputError, match="rows:5: the line begins with '2:3', not with a label"):
        read_svmlight(path)
    path.write_bytes(path.read_bytes()[:-7] + b"3\xff 1:1")
    with pytest.raises(InputError, match=r"rows:5: the label b'3\\xff' is not UTF-8"):
        read_svmlight(path)
    path.write_bytes(path.read_bytes()[:-6])
    for labels in (None, "texts"):
        read = read_svmlight(path, labels=labels)
        assert read.labels is not None and read.labels.tolist() == ["1", "+1", "n/a"]
    with pytest.raises(InputError, match="did you mean 'texts'"):
        read_svmlight(path, labels="text")  # type: ignore[arg-type]


def test_more_dimensions_than_int32_has_give_wide_columns(tmp_path: Path) -> None:
    path = written(tmp_path / "rows", b"1 2147483647:1 2147483648:2\n")
    with pytest.raises(InputError, match=r"rows:1: '2147483648:2' needs dimensions=2147483648 or"):
        read_svmlight(path)
    read = read_svmlight(path, 2**31)
    assert read.columns.dtype == np.int64 and read.columns.tolist() == [2**31 - 2, 2**31 - 1]
    assert read_svmlight(path, 2**31 - 1 + 1, rank=1, ranks=2).columns.dtype == np.int64


def test_blocks_hold_the_rows_in_turn(tmp_path: Path) -> None:
    path = written(tmp_path / "rows", b"".join(b"%d 1:1\n" % n for n in range(50)))
    with blocks_of(64):
        found = [rows.labels for rows in SvmLight(1).blocks(path)]
    assert len(found) > 5
    assert np.concatenate([labels for labels in found if labels is not None]).tolist() == list(
        range(50)
    )


def test_files_that_hold_no_rows_give_none(tmp_path: Path) -> None:
    for text in (b"", b"\n\n# nothing", b"\xef\xbb\xbf"):
        read = read_svmlight(written(tmp_path / "rows", text))
        assert (len(read), read.nnz, read.dimensions) == (0, 0, 0)


def test_the_mark_that_some_editors_write_is_skipped(tmp_path: Path) -> None:
    read = read_svmlight(written(tmp_path / "rows", b"\xef\xbb\xbf1 1:1\n"))
    assert read.labels is not None and read.labels.tolist() == [1]


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz", ".zst"])
def test_a_broken_file_is_never_taken_for_a_short_one(suffix: str, tmp_path: Path) -> None:
    text = b"".join(b"%d 1:%d\n" % (n % 17, n) for n in range(5000))
    path = written(tmp_path / f"rows{suffix}", text)
    packed = path.read_bytes()
    path.write_bytes(packed + packed)  # as `cat` makes them
    assert len(read_svmlight(path)) == 10_000
    later = packed + b"garbage", packed + b"\0" * 4 + packed[1:]
    early = packed[: len(packed) // 2], packed[:-1], b"garbage", b"\0" * 4, b"", b"\0" + packed
    for broken in (*early, packed[:90] + packed[95:], *later):
        path.write_bytes(broken)
        at = (len(packed), len(packed) + 4) if broken in later else (0,)
        said = "|".join(f"begins at byte {place}$" for place in at) if broken else "it is empty"
        with pytest.raises(InputError, match=rf"rows{suffix} can't be read: .*({said})"):
            read_svmlight(path)


@pytest.mark.parametrize("suffix", list(PACKED))
@pytest.mark.parametrize("byte", [b"\n", b"1"])
def test_a_text_that_is_not_meant_to_be_read_is_refused(
    suffix: str, byte: bytes, tmp_path: Path
) -> None:
    """A line without an end, and few bytes that become very many, a little at a time."""
    path = written(tmp_path / f"rows{suffix}", b"1 1:1\n" + byte * (4 << 20))
    lengths = [0]
    refused = nullcontext() if (suffix, byte) == ("", b"\n") else pytest.raises(InputError)
    with (
        blocks_of(1 << 16),
        mock.patch.object(files, "MOST_LINE", 1 << 18),
        mock.patch.object(files, "_MOST_RATIO", 1 << 9),
        refused,
    ):
        for block in files.blocks(FilePiece(path, 0, path.stat().st_size)):
            lengths.append(len(block.lines))
    assert max(lengths) < 1 << 20


def test_a_file_that_becomes_shorter_while_it_is_read_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "rows", b"1 1:1\n" * 10_000)
    with blocks_of(60):
        rows = SvmLight(1).blocks(path, threads=1)
        next(rows)
        path.write_bytes(b"1 1:1\n" * 50)
        with pytest.raises(InputError, match=r"it ended after .* bytes, and had 60000"):
            list(rows)


@given(st.data(), st.sampled_from(list(PACKED)[1:]), st.integers(1, 5000))
def test_streams_are_read_to_the_last_row_or_refused(
    data: st.DataObject, suffix: str, block: int
) -> None:
    packed, ends = bytearray(), []
    for stream in range(data.draw(st.integers(1, 3))):
        packed += PACKED[suffix](b"%d 1:1\n" % stream * 20)
        ends.append(len(packed))
        if suffix != ".zst":  # which alone knows no padding
            packed += bytes(4 * data.draw(st.integers(0, 3)))
    what = data.draw(st.sampled_from(["whole", "truncated", "flipped"]))
    at = data.draw(st.integers(0, len(packed) - 1))
    if what == "truncated":
        del packed[at:]
    elif what == "flipped":
        packed[at] ^= 1 << data.draw(st.integers(0, 7))
    streams = sum(end <= len(packed) for end in ends)
    is_cut = streams == 0 or (any(packed[ends[streams - 1] :]) and what == "truncated")
    with folder() as where, blocks_of(block):
        path = where / f"rows{suffix}"
        path.write_bytes(packed)
        found = None
        with suppress(InputError):
            found = read_svmlight(path).labels
    assert (found is None) == is_cut or what == "flipped"
    if found is not None:
        assert found.tolist() == [row // 20 for row in range(20 * streams)]


def test_what_is_wrong_with_arguments_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InputError, match=r"there is no file .*nowhere"):
        read_svmlight(tmp_path / "nowhere")
    with pytest.raises(InputError, match="at least one file"):
        read_svmlight([])
    with pytest.raises(InputError, match="a can't be read: File name too long"):
        read_svmlight("a" * 300)
    for wrong, kind in ((5, "int"), (None, "NoneType"), (b"rows", "bytes"), ([5], "list")):
        with pytest.raises(InputError, match=f"must be the path of a file, or several, got {kind}"):
            read_svmlight(wrong)  # type: ignore[arg-type]
    path = written(tmp_path / "rows.zst", b"1 1:1\n")
    for name in ("dimensions", "index_from", "rank", "ranks", "threads"):
        with pytest.raises(InputError, match=f"^{name} must"):
            read_svmlight(path, **{name: -1})
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(MissingDependencyError, match=r"needs zstandard: pip install 'sparcel\[lin"):
        read_svmlight(path)


@given(st.data(), LAYOUTS)
def test_any_bytes_are_parsed_or_refused(data: st.DataObject, layout: dict[str, int]) -> None:
    text = bytearray(data.draw(texts_of(data.draw(made(NUMBERS)), 1)))
    for _ in range(data.draw(st.integers(0, 6))):
        at = data.draw(st.integers(0, len(text)))
        new = data.draw(st.binary(max_size=3) | st.sampled_from([b":", b"\n", b"-", b"#", b"9"]))
        text[at : at + data.draw(st.integers(0, 2))] = new
    with folder() as where, blocks_of(data.draw(st.integers(1, 99))):
        try:
            rows = read_svmlight(written(where / "rows", bytes(text)), 30, **layout)
        except InputError:
            return
    assert rows.labels is not None and len(rows.labels) == len(rows)
    assert rows.offsets[0] == 0 and rows.offsets[-1] == len(rows.columns) == len(rows.values)
    assert np.isfinite(rows.values).all()
    for row in range(len(rows)):
        columns = rows.slice(row, row + 1).columns
        assert (np.diff(columns) > 0).all() and ((columns >= 0) & (columns < 30)).all()
