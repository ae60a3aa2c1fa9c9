"""The list of versions: the ways that it finds, and what it forgets."""

from __future__ import annotations

import json
import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparcel.errors import FormatError, VersionError
from sparcel.products.delta import Entry, Folder, Index, Version, read_index
from sparcel.products.delta.index import INDEX, write_index


def entry(base: Version | None, version: Version, size: int) -> Entry:
    kind = "delta" if base else "anchor"
    name = f"{kind}-{base.number if base else ''}-{version.number}"
    return Entry(kind, base, version, (name,), size, 100, 10, 0.5)


@st.composite
def published(draw: st.DrawFn) -> list[list[Entry]]:
    """Draw what each publication adds: a delta, and a merged one and an anchor now and then.

    Sometimes a publisher cannot read its store, and goes on with an anchor alone.
    """
    sizes = st.integers(1, 50)
    number, steps = draw(st.integers(0, 3)), []
    last = anchor = Version(number, draw(st.integers(0, 9)))
    steps.append([entry(None, last, draw(sizes))])
    for _ in range(draw(st.integers(0, 14))):
        number += draw(st.sampled_from([1, 1, 1, 7]))
        version = Version(number, draw(st.integers(0, 9)))
        match draw(st.sampled_from(["delta"] * 4 + ["merged", "anchor", "alone"])):
            case "delta":
                steps.append([entry(last, version, draw(sizes))])
            case "merged" if anchor != last:
                merged = entry(anchor, version, draw(sizes))
                whole = entry(None, version, 3 * draw(sizes))
                steps.append([entry(last, version, draw(sizes)), merged, whole])
                anchor = version
            case "alone":
                steps.append([entry(None, version, draw(sizes))])
                anchor = version
            case _:
                whole = entry(None, version, 3 * draw(sizes))
                steps.append([entry(last, version, draw(sizes)), whole])
                anchor = version
        last = version
    return steps


def entries_of(steps: list[list[Entry]]) -> tuple[Entry, ...]:
    return tuple(one for step in steps for one in step)


def least_bytes(entries: tuple[Entry, ...], since: Version | None, to: Version) -> int | None:
    """Return the bytes of the shortest way, by trying again until nothing is shorter."""
    best: dict[Version | None, int] = {None: 0, since: 0}
    for _ in entries:
        for one in entries:
            if one.base in best:
                cost = best[one.base] + one.bytes
                best[one.version] = min(best.get(one.version, cost), cost)
    return best.get(to)


@given(published(), st.data())
def test_a_way_leads_there_with_the_fewest_bytes(
    steps: list[list[Entry]], data: st.DataObject
) -> None:
    entries = entries_of(steps)
    versions = [step[0].version for step in steps]
    since = data.draw(st.sampled_from([None, Version(2, 99), *versions]))
    to = data.draw(st.sampled_from([None, *versions]))
    names = [one.names[0] for one in entries]
    without = data.draw(st.sets(st.sampled_from(names), max_size=4))
    wanted = to or versions[-1]
    usable = tuple(one for one in entries if one.names[0] not in without)
    expected = 0 if since == wanted else least_bytes(usable, since, wanted)
    # The order of the list does not matter.
    shuffled = data.draw(st.permutations(entries))
    for index in (Index(entries), Index(tuple(shuffled))):
        if expected is None:
            with pytest.raises(VersionError, match="no files lead"):
                index.way(since, to and to.number, without)
            continue
        way = index.way(since, to and to.number, without)
        assert sum(one.bytes for one in way) == expected
        assert not {one.names[0] for one in way} & without
        if way:
            assert way[-1].version == wanted
            assert way[0].base in (None, since)
        assert all(after.base == before.version for before, after in pairwise(way))


def test_few_of_many_whole_models_are_told() -> None:
    entries = [entry(None, Version(number, 0), 9) for number in range(300)]
    with pytest.raises(
        VersionError, match=r"the newest whole models are of versions 299, 298, 297"
    ):
        Index(tuple(entries)).way(None, without=entries[-1].names)


@given(published(), st.integers(0, 9))
def test_nobody_within_the_lag_is_stranded(steps: list[list[Entry]], lag: int) -> None:
    """Whoever has one of the last versions goes on by deltas, if there were any, and can go back.

    So it is at every moment of a history in which the index was pruned all along.
    """
    index = Index()
    for number, step in enumerate(steps):
        index = index.with_entries(*step).pruned(lag)
        assert index.newest == step[0].version
        assert index.pruned(lag) == index
        recent = steps[max(number - lag, 0) : number + 1]
        for begin in range(len(recent)):
            since = recent[begin][0].version
            index.way(since)
            index.way(None, since.number)
            index.way(step[0].version, since.number)
            deltas = Index(tuple(one for one in index.entries if one.kind == "delta"))
            if all(one[0].kind == "delta" for one in recent[begin + 1 :]) and since != index.newest:
                assert deltas.way(since)[-1].version == index.newest


@given(published(), st.integers(0, 9))
def test_pruning_forgets(steps: list[list[Entry]], lag: int) -> None:
    """Nothing is kept from before the last anchor that whoever lags may have begun with."""
    index = Index(entries_of(steps)).pruned(lag)
    oldest = steps[max(len(steps) - 1 - lag, 0)][0].version.number
    before = [one.version.number for one in index.entries if one.kind == "anchor"]
    assert sum(number <= oldest for number in before) == 1
    assert min(before) == min(one.version.number for one in index.entries)


@given(published(), st.text("0123456789abcdef", max_size=8))
def test_an_index_is_read_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, steps: list[list[Entry]], writer: str
) -> None:
    store = Folder(tmp_path_factory.mktemp("store"))
    assert read_index(store) == Index()
    index = Index(entries_of(steps), writer)
    write_index(store, index)
    assert read_index(store) == index


def test_unknown_versions_are_named() -> None:
    index = Index((entry(None, Version(3, 1), 9),))
    with pytest.raises(VersionError, match="there is no version 4; the store has 3 to 3"):
        index.way(None, 4)
    with pytest.raises(VersionError, match="there is no version 0; the store has none"):
        Index().way(None, 0)
    assert Index().way(None) == []


WRONG = {
    "format": ["sparcel-delta-0", 1],
    "entries": [5, "text", {}, [1], None],
    "base": [
        [2, "1"],
        [],
        [1],
        [1, "xyz"],
        ["a", "1"],
        7,
        [float("inf"), "1"],
        [1, 1],
        {},
        "",
        False,
        0,
    ],
    "version": [None, [], [1], 7],
    "kind": ["anchor", "other", 3],
    "names": [
        *(3, None, [], [3], [None]),
        *([name] for name in ("../a", "/etc/a", "..", ".", "", "a\0b", "\ud800", "a" * 300, INDEX)),
    ],
    "changed": [-1],
    "bytes": [-1, "x", None, float("inf"), float("nan")],
}


@pytest.mark.parametrize(("key", "value"), [(key, v) for key, vs in WRONG.items() for v in vs])
def test_a_wrong_index_is_refused(
    tmp_path_factory: pytest.TempPathFactory, key: str, value: object
) -> None:
    store = Folder(tmp_path_factory.mktemp("store"))
    is_anchor = isinstance(value, dict | str | bool) or value == []
    base = None if key == "base" and is_anchor else Version(1, 2)
    write_index(store, Index((entry(base, Version(2, 3), 9),)))
    told = json.loads(bytes(store.read(INDEX)))
    (told if key in ("format", "entries") else told["entries"][0])[key] = value
    if key == "entries":
        told[key] = [value]
    store.write(INDEX, [json.dumps(told).encode()])
    with pytest.raises(FormatError, match=r"the index of .* is wrong.*; restore index\.json"):
        read_index(store)


def test_a_damaged_index_is_refused_or_the_same(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Whatever a byte becomes."""
    store, dice = Folder(tmp_path_factory.mktemp("store")), random.Random(0)
    versions = [Version(number, number) for number in range(4)]
    write_index(store, Index(tuple(entry(a, b, 9) for a, b in pairwise([None, *versions]) if b)))
    data = bytes(store.read(INDEX))
    for _ in range(100):
        damaged = bytearray(data)
        damaged[dice.randrange(len(data))] = dice.randrange(256)
        store.write(INDEX, [damaged])
        try:
            index = read_index(store)
        except FormatError:
            continue
        assert all(isinstance(one, Entry) for one in index.entries)
    store.write(INDEX, [data[: len(data) // 2]])
    with pytest.raises(FormatError):
        read_index(store)
