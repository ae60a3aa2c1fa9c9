"""Memory that processes share, whatever happens to some of them."""

import gc
import os
import pickle
import resource

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparcel.errors import InputError, SparcelWarning
from sparcel.products.data.shared import Shared, available
from tests.data.sources import killed_after, processes, put_on, record_of

PAGE = os.sysconf("SC_PAGESIZE")


def is_right(shared, place):
    record = shared.get(place)
    return record is None or bytes(record).rstrip(b"\0") == record_of(place).rstrip(b"\0")


@given(st.lists(st.integers(0, 30), max_size=40), st.integers(2 * PAGE, 8 * PAGE))
def test_records_come_back_within_the_limit(places, limit):
    shared = Shared(31, limit)
    for place in places:
        assert shared.put(place, record_of(place))
    assert shared.used <= limit
    assert os.fstat(shared.name[1]).st_size <= limit
    kept = [place for place in range(31) if shared.get(place) is not None]
    assert len(kept) == shared.kept()
    assert set(kept) <= set(places)
    assert all(is_right(shared, place) for place in kept)
    if not shared.wants(30) and 30 not in kept:
        assert limit - shared.used < 64


PARTS = np.arange(20), np.arange(10, 30), np.arange(20, 40), np.arange(0, 40, 2)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 39)), max_size=20))
def test_a_part_is_held_alone_and_the_rest_of_the_memory_freed(turns):
    shared, kept = Shared(40, 4 << 20), set()
    for number, place in turns:
        part, before = PARTS[number], int(shared.words[3])
        shared.hold(np.random.default_rng(place).permutation(part))  # the order makes no difference
        assert int(shared.words[3]) >= before
        kept = (kept & {*part.tolist()}) | ({place} & {*part.tolist()})
        shared.put(place, record_of(place))
        assert {other for other in range(40) if shared.get(other) is not None} == kept
        assert all(is_right(shared, other) for other in kept)
        assert shared.used <= 4 << 20
    blocks = os.fstat(shared.name[1]).st_blocks * 512
    assert blocks <= shared.used + 2 * PAGE


def test_a_part_that_is_held_already_stays_where_it_is_and_is_let_go():
    shared = Shared(40, 4 << 20)
    shared.hold(PARTS[0])
    shared.put(3, record_of(3))
    used = shared.used
    shared.hold(PARTS[0][::-1])
    assert shared.used == used
    assert not shared.wants(30)
    shared.hold(None)
    assert shared.wants(30)
    assert shared.get(3) is not None


@pytest.mark.parametrize("step", ["_move", "reserve", "write", "_free"])
@pytest.mark.parametrize("part", [PARTS[1], None], ids=["a part", "all"])
def test_who_is_killed_as_it_moves_records_leaves_no_memory_that_does_not_count(
    step, part, monkeypatch
):
    shared = Shared(40, 4 << 20)
    for place in range(20):
        shared.put(place, record_of(place) * 100)

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Shared, "_can_free", lambda _: True)
        patched.setattr(Shared, step, killed)
        with pytest.raises(KeyboardInterrupt):
            shared.hold(PARTS[1])
    shared.hold(part)
    assert os.fstat(shared.name[1]).st_blocks * 512 <= shared.used + 2 * PAGE
    kept = {place: shared.get(place) for place in range(40)}
    assert all(
        record is None or bytes(record).startswith(record_of(place) * 100)
        for place, record in kept.items()
    )
    assert shared.wants(25)
    assert shared.wants(5) == (part is None)


def test_a_record_that_comes_meanwhile_is_not_harmed_by_asking_what_can_be_freed(monkeypatch):
    shared, free = Shared(40, 4 << 20), Shared._free

    def put_before(*freed):
        shared.put(3, record_of(3))
        free(*freed)

    with monkeypatch.context() as patched:
        patched.setattr(Shared, "_free", put_before)
        assert shared.hold(None)
    assert bytes(shared.get(3)).startswith(record_of(3))


def test_a_record_that_comes_while_others_move_takes_no_memory(monkeypatch):
    shared, write = Shared(40, 4 << 20), Shared.write

    def write_late(*written):
        patched.undo()
        shared.hold(PARTS[0])
        write(*written)

    with monkeypatch.context() as patched:
        patched.setattr(Shared, "write", write_late)
        assert shared.put(3, bytes(16 * PAGE))
    assert shared.get(3) is None
    assert os.fstat(shared.name[1]).st_blocks * 512 <= shared.used + 2 * PAGE


def test_a_process_opens_each_memory_once():
    shared = Shared(3, PAGE)
    name, pickled = shared.name, pickle.dumps(shared)
    assert pickle.loads(pickled) is shared
    del shared
    gc.collect()
    with pytest.raises(InputError, match=r"make the Cached anew"):
        Shared.attached(*name)
    with pytest.warns(SparcelWarning, match=r"keeps no samples in memory: .*make the Cached anew"):
        assert not pickle.loads(pickled).wants(2)


def fill(shared, places):
    for place in places:
        shared.put(place, record_of(place))


def test_processes_fill_it_together():
    shared = Shared(300, 1 << 20)
    filling = [
        processes.Process(target=fill, args=(shared, range(start, 300, 2))) for start in (0, 1, 1)
    ]
    for process in filling:
        process.start()
    for process in filling:
        process.join()
        assert process.exitcode == 0
    assert shared.kept() == 300
    assert all(is_right(shared, place) for place in range(300))


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.02, 0.1])
def test_a_killed_process_leaves_no_broken_record_and_no_lock(seconds):
    shared = Shared(100, 1 << 20)
    killed_after(seconds, put_on, shared, 100)
    assert all(is_right(shared, place) for place in range(100))
    shared.hold(np.arange(100))
    assert shared.put(7, record_of(7))
    assert shared.get(7) is not None
    assert shared.used <= 1 << 20


def put_with_little_memory(answers):
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, 64 << 10))
    shared = Shared(100, 1 << 20)
    worked = [shared.put(place, bytes(10_000)) for place in range(100)]
    answers.send((worked.index(False), worked[-1], shared.kept(), shared.wants(50)))


def test_a_system_without_memory_ends_the_keeping():
    ours, theirs = processes.Pipe()
    process = processes.Process(target=put_with_little_memory, args=(theirs,))
    process.start()
    first_failure, _, kept, wants = ours.recv()
    process.join()
    assert first_failure == kept > 0
    assert not wants


@pytest.mark.parametrize(
    ("line", "folder", "files"),
    [
        ("0::/a/b", "a", ("memory.max", "memory.current", "inactive_file")),
        ("0::/", ".", ("memory.max", "memory.current", "inactive_file")),
        (
            "4:cpu,memory:/of/the/host",
            "memory",
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ),
    ],
)
@pytest.mark.parametrize("limit", [700, 1 << 40, "max"])
def test_limits_of_containers_count(tmp_path, line, folder, files, limit):
    assert available(tmp_path) == 1 << 62  # nothing is known
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9 kB\nMemAvailable: 2 kB\n")
    assert available(tmp_path) == 2048
    (tmp_path / "proc/self/cgroup").write_text(line + "\n")
    group = tmp_path / "sys/fs/cgroup" / folder
    group.mkdir(parents=True)
    for file, content in zip(files, (limit, 500, 0), strict=True):
        if file.startswith("memory."):
            (group / file).write_text(f"{content}\n")
    (group / "memory.stat").write_text(f"anon 400\n{files[2]} 100\n")
    assert available(tmp_path) == (300 if limit == 700 else 2048)
