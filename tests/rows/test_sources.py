"""Files become rows in the same way whoever reads them: one rank, several, or a cache."""

import gzip
import json
import os
import tempfile

import numpy as np
import pytest

from sparcel.errors import InputError
from sparcel.products.rows import (
    HashedNGrams,
    SvmLight,
    Text,
    cached,
    concatenate,
    describe,
    described,
    load,
    make_cache,
    map_rows,
)

NGRAMS = HashedNGrams(dimensions=1000)
TEXTS = [(str(i % 3), " ".join(["tea", "jam", "bun"][: i % 4]) + f" word{i}") for i in range(50)]


def written(folder, layout, packed=False):
    """Write the texts, and return the file and its source."""
    lines = {
        "lines": [text for _, text in TEXTS],
        "tsv": ["kind\tlabel\ttext", *(f"x\t{label}\t{text}" for label, text in TEXTS)],
        "jsonl": [json.dumps({"label": label, "text": text}) for label, text in TEXTS],
    }[layout]
    content = "".join(f"{line}\n" for line in lines).encode()
    file = folder / f"texts.{layout}{'.gz' if packed else ''}"
    file.write_bytes(gzip.compress(content) if packed else content)
    return file, Text(layout, NGRAMS, None if layout == "lines" else "label")


def equal(one, other):
    assert (one.offsets == other.offsets).all()
    assert (one.columns == other.columns).all()
    assert (one.values == other.values).all()
    assert one.dimensions == other.dimensions
    assert (one.labels is None) == (other.labels is None)
    if one.labels is not None:
        assert list(one.labels) == list(other.labels)


@pytest.mark.parametrize("layout", ["lines", "tsv", "jsonl"])
@pytest.mark.parametrize("packed", [False, True])
def test_ranks_and_caches_hold_the_rows_of_the_files(tmp_path, layout, packed):
    file, source = written(tmp_path, layout, packed)
    labels = None if layout == "lines" else [label for label, _ in TEXTS]
    whole = NGRAMS.rows([text for _, text in TEXTS], labels)
    equal(source.read(file), whole)
    equal(source.read([file, file]), concatenate([whole, whole]))
    for ranks in (3, 60):
        parts = [source.read(file, rank, ranks) for rank in range(ranks)]
        equal(concatenate([p for p in parts if len(p)]), whole)
        make_cache(tmp_path / "cache", file, source)
        parts = [cached(tmp_path / "cache", file, source, rank, ranks) for rank in range(ranks)]
        equal(concatenate(parts), whole)


def test_a_cache_is_made_anew_when_what_it_is_made_of_changes(tmp_path):
    file, source = written(tmp_path, "tsv")
    cache = tmp_path / "cache"
    make_cache(cache, file, source)
    made = cache.stat().st_mtime_ns
    make_cache(cache, file, source)
    assert cache.stat().st_mtime_ns == made
    other = Text("tsv", HashedNGrams(dimensions=77))
    with pytest.raises(InputError, match="is a cache of other rows"):
        cached(cache, file, other)
    make_cache(cache, file, other)
    assert cached(cache, file, other).dimensions == 77
    file.write_text("label\ttext\n1\ttea\n")
    make_cache(cache, file, source)
    assert len(cached(cache, file, source)) == 1
    file.write_text("label\ttext\n1\n")
    with pytest.raises(InputError, match=r"texts.tsv:2: expected 2 fields, got 1"):
        make_cache(cache, file, source)
    found = load(cache)
    assert found is not None and len(found) == 1


@pytest.mark.parametrize("length", [0, 5, 30, -1])
def test_a_truncated_cache_is_made_anew(tmp_path, length):
    file, source = written(tmp_path, "tsv")
    cache = tmp_path / "cache"
    make_cache(cache, file, source)
    whole = cache.read_bytes()
    cache.write_bytes(whole[:length])
    make_cache(cache, file, source)
    assert cache.read_bytes() == whole


def test_a_file_that_is_no_cache_is_left_alone(tmp_path):
    file, source = written(tmp_path, "tsv")
    before = file.read_bytes()
    with pytest.raises(InputError, match="is no cache of rows; give the cache another path"):
        make_cache(file, file, source)
    assert file.read_bytes() == before


@pytest.mark.parametrize("labels", [["1", "-1", "1"], ["spam", "ham", "spam"]])
def test_labels_of_svmlight_files_are_numbers_if_all_are(tmp_path, labels):
    file, source = tmp_path / "data", SvmLight(dimensions=9)
    file.write_text("".join(f"{label} 3:1 9:2\n" for label in labels))
    make_cache(tmp_path / "cache", file, source)
    equal(cached(tmp_path / "cache", file, source), source.read(file))
    assert np.issubdtype(source.read(file).labels.dtype, np.number) == ("1" in labels)


def test_lines_are_counted_with_the_header(tmp_path):
    file, source = written(tmp_path, "tsv")
    file.write_text(file.read_text() + "only one field\n")
    for ranks in (1, 4):
        with pytest.raises(InputError, match=rf"texts.tsv:{len(TEXTS) + 2}: expected 3 fields"):
            source.read(file, ranks - 1, ranks)


@pytest.mark.parametrize(
    "source", [SvmLight(7, 0), Text("jsonl", HashedNGrams("char", (2, 3)), None, "body")]
)
def test_a_source_is_described_in_json(source):
    assert described(json.loads(json.dumps(describe(source)))) == source


def test_mapped_rows_have_no_file_that_a_killed_process_could_leave(tmp_path, monkeypatch):
    file, source = written(tmp_path, "tsv")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    seen = []

    class Watched(Text):
        def blocks(self, *arguments):
            for rows in super().blocks(*arguments):
                yield rows
                seen.append(os.listdir(temporary))

    equal(map_rows(file, Watched(source.layout, source.ngrams)), source.read(file))
    assert seen == [[]]
