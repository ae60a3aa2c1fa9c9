"""Samples of a cache are those of its source, wherever they are found."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import IterableDataset, Subset

from sparcel import simulate
from sparcel.errors import InputError, MismatchError, SparcelWarning
from sparcel.products.data import Cached
from tests.data.sources import Files, Given, all_right, decode, is_right
from tests.data.test_source import SAMPLES, alike


@settings(max_examples=10)
@given(samples=st.lists(SAMPLES, min_size=1, max_size=6), memory=st.sampled_from([0, 5000, "1 MB"]))
def test_any_samples_come_back_from_each_level(tmp_path_factory, samples, memory):
    folder = tmp_path_factory.mktemp("cache")
    for on_disk in (folder, folder, None):
        source = Given(samples)
        cached = Cached(source, on_disk, memory=memory, looks=0)
        for _ in range(3):
            assert all(alike(cached[i], sample) for i, sample in enumerate(samples))
        assert on_disk is None or max(source.reads) <= 1
        stats = cached.stats()
        assert stats.from_memory + stats.from_disk + stats.from_source == 3 * len(samples)
        assert stats.memory_bytes <= 5000 or memory != 5000


@given(st.lists(st.integers(-9, 8), max_size=12), st.integers(1, 3))
def test_batches_are_samples_one_by_one(indices, threads):
    cached = Cached(Files(9), None, memory="1 MB", decode=decode, threads=threads)
    for _ in range(2):
        batch = cached.__getitems__(indices)
        assert all(is_right(s, i % 9) for s, i in zip(batch, indices, strict=True))
    assert len({sample[0].data_ptr() for sample in batch}) == len(batch)
    assert cached.stats().from_source == len({index % 9 for index in indices})


def test_indices_out_of_range_raise_index_errors():
    cached = Cached(Files(9), None, memory=0)
    for index in (9, -10, 1 << 40):
        with pytest.raises(IndexError, match=rf"index {index} is out of range for 9 samples"):
            cached[index]
    with pytest.raises(TypeError):
        cached["first"]
    assert cached[np.int32(-1)] == cached[torch.tensor(8)]


def test_decoding_happens_once_and_the_transform_at_each_access(tmp_path):
    decoded, transformed = [], []

    def decoding(sample):
        decoded.append(sample[1])
        return decode(sample)

    def transform(sample):
        transformed.append(sample[1])
        sample[0].zero_()  # what is cached stays as it is
        return sample[0].sum(), sample[1]

    cached = Cached(Files(5), tmp_path, memory="1 MB", decode=decoding, transform=transform)
    for _ in range(3):
        assert [cached[i] for i in range(5)] == [(0, i) for i in range(5)]
    assert decoded == [*range(5)]
    assert transformed == [*range(5)] * 3
    assert all_right(Cached(Files(5), tmp_path, memory=0, decode=decode))


def test_a_dataset_that_reads_batches_is_asked_for_batches_and_gives_whole_ones():
    cached = Cached(Subset(Files(20), range(3, 9)), None, memory="1 MB", decode=decode)
    assert [sample[1] for sample in cached.__getitems__([0, 5])] == [3, 8]

    class Fewer(Files):
        def __getitems__(self, places):
            return [self[place] for place in places[1:]]

    cached = Cached(Fewer(9), None, memory=0)
    with pytest.raises(InputError, match=r"__getitems__ must give a sample for each of 3 .* got 2"):
        cached.__getitems__([0, 1, 2])


def test_a_system_without_files_in_memory_is_told(monkeypatch):
    def refused(*_: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("os.memfd_create", refused)
    with pytest.raises(InputError, match="share can't be made: Too many open files; allow more"):
        Cached(Files(9), None, memory=0)


def test_a_system_that_frees_no_part_of_the_memory_keeps_all(monkeypatch):
    cached = Cached(Files(9), None, memory="1 MB", decode=decode)
    assert all_right(cached)
    monkeypatch.setattr("sparcel.products.data.shared._libc.fallocate", lambda *_: -1)
    with pytest.warns(SparcelWarning, match="does not free a part of the memory; samples of other"):
        cached.hold(np.arange(3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cached.hold(np.arange(3, 6))
        assert all_right(cached)
    assert cached.stats().from_source == 9


def test_a_run_with_less_memory_keeps_a_fixed_part():
    cached = Cached(Files(200), None, memory=20_000, decode=decode)
    for _ in range(3):
        assert all_right(cached)
    stats = cached.stats()
    assert 0 < stats.in_memory < 200
    assert stats.from_memory == 2 * stats.in_memory
    assert stats.memory_bytes <= 20_000


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


class Endless(Files):
    __len__ = None


class Lambdas(Files):
    def __getitem__(self, place):
        return lambda: place


BAD = [
    ({"dataset": Stream()}, r"dataset must be map-style, .*; Stream has no samples by number"),
    ({"dataset": 5}, r"dataset must be map-style, .*; int has no samples by number"),
    ({"dataset": Endless(5)}, r"Endless has no length"),
    ({"memory": -1}, r"memory must lie in \[0, 4611686018427387904\], got -1"),
    ({"memory": 1 << 70}, r"memory must lie in .*, got 1180591620717411303424"),
    ({"memory": "4 GiBi"}, r"a size is a number of bytes .* got '4 GiBi'"),
    ({"memory": 2.5}, r"memory must be a whole number, got 2.5"),
    ({"memory": 10}, r"memory must hold at least the index of 5 samples, \d+ bytes; got 10"),
    ({"decode": "jpeg"}, r"decode must be a function, got 'jpeg'"),
    ({"transform": 3}, r"transform must be a function, got 3"),
    ({"version": 2}, r"version must be a str, got 2"),
    ({"threads": 0}, r"threads must be at least 1, got 0"),
    ({"looks": -1}, r"looks must be at least 0, got -1"),
    ({"folder": 5}, r"folder must be the path of a folder, or None, got int"),
    ({"folder": __file__}, r"folder must be a folder, and .*test_cached.py is a file"),
    ({"group": "all"}, r"group must be a torch.distributed process group"),
]


@pytest.mark.parametrize(("given", "message"), BAD, ids=[message for _, message in BAD])
def test_bad_arguments_are_answered_in_words(given, message):
    with pytest.raises(InputError, match=message):
        Cached(**{"dataset": Files(5), "folder": None, "memory": 0, **given})


def test_samples_that_cannot_be_pickled_are_named(tmp_path):
    for folder, memory in ((tmp_path, 0), (None, "1 MB")):
        with pytest.raises(InputError, match=r"sample 3, of type function, cannot be pickled"):
            Cached(Lambdas(5), folder, memory=memory)[3]
    assert Cached(Lambdas(5), None, memory=0)[3]() == 3


def shared_by_ranks(comm):
    def together():
        comm.run(lambda: comm.gather_numbers(0))

    cached = Cached(Files(12), None, memory="1 MB", decode=decode, group=comm)
    together()
    for place in range(comm.rank, 12, comm.size):
        assert is_right(cached[place], place)
    together()
    assert all_right(cached)
    together()
    return cached.stats()


def test_ranks_of_a_group_share_memory():
    for stats in simulate(3, shared_by_ranks, ranks_per_node=3).results:
        assert (stats.from_source, stats.from_memory) == (12, 36)


def shared_without_warnings(comm):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return shared_by_ranks(comm)


@pytest.mark.processes
def test_ranks_on_real_processes_share_memory(run_on):
    for stats in run_on(2, shared_without_warnings):
        assert (stats.from_source, stats.from_memory) == (12, 24)


@pytest.mark.parametrize(
    ("of_rank", "message"),
    [
        (lambda rank: Files(5 + rank), "length=6"),
        (lambda rank: Subset(Files(9), range(rank, 5 + rank)), 'dataset=.*"Subset", "length": 5'),
    ],
)
def test_ranks_with_other_arguments_are_told(of_rank, message):
    def on_rank(comm):
        Cached(of_rank(comm.rank), None, memory=0, group=comm)

    with pytest.raises(MismatchError, match=message):
        simulate(2, on_rank)
