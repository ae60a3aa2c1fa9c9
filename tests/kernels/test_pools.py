"""The pools of memory and threads: blocks are reused and bounded; threads and forks are safe."""

import multiprocessing
import os
import random
import threading

import pytest
import torch

from sparcel import _cpu

KEPT = 256 << 20
MB = 1 << 20


def test_freed_memory_is_reused():
    _cpu.drop_kept()  # of tests before, which may have left another block of that size
    first = _cpu.empty(MB)
    address = first.data_ptr()
    del first
    assert _cpu.empty(MB - 1000).data_ptr() == address


def test_a_view_keeps_its_memory():
    view = _cpu.empty(MB)[1000:2000].numpy()
    view[:] = 7
    _cpu.empty(MB).fill_(1)
    assert (view == 7).all()


def test_large_block_is_not_reused_for_a_far_smaller_buffer():
    large = _cpu.empty(64 * MB)
    address = large.data_ptr()
    del large
    small = _cpu.empty(MB)
    assert not address <= small.data_ptr() < address + 64 * MB


def test_waiting_memory_is_bounded():
    held = [_cpu.empty(16 * MB) for _ in range(20)]
    held.clear()
    assert KEPT - 16 * MB < _cpu.kept_bytes() <= KEPT
    held = [_cpu.empty(MB) for _ in range(300)]
    held.clear()
    assert 256 * MB >= _cpu.kept_bytes() >= 200 * MB
    before = _cpu.kept_bytes()
    _cpu.empty(KEPT + MB)
    assert _cpu.kept_bytes() == before


def test_threads_never_share_a_block():
    wrong = []

    def use(number: int) -> None:
        draw = random.Random(number)
        held = []
        for _ in range(300):
            held.append(_cpu.empty(draw.choice([10, 20_000, 30_000, 300_000])).fill_(number))
            if len(held) > 5:
                freed = held.pop(draw.randrange(5))
                if not (freed.numpy() == number).all():
                    wrong.append(number)

    threads = [threading.Thread(target=use, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.skipif(
    "SPARCEL_CPU_DIRECTORY" in os.environ, reason="the sanitizer's own locks do not survive forks"
)
def test_a_forked_child_computes():
    """The process forks while other threads run kernels; the child does not have these threads."""
    x = torch.arange(1 << 20, dtype=torch.float32)
    expected = list(range((1 << 20) - 5, 1 << 20))
    done = threading.Event()

    def keep_busy() -> None:
        while not done.is_set():
            _cpu.topk(x, 1000, 0, 2)

    def child() -> None:
        for _ in range(3):
            assert _cpu.topk(x, 5, 0, 2)[0].tolist() == expected

    busy = [threading.Thread(target=keep_busy) for _ in range(2)]
    for thread in busy:
        thread.start()
    try:
        for _ in range(10):
            process = multiprocessing.get_context("fork").Process(target=child)
            process.start()
            process.join(60)
            assert process.exitcode == 0
    finally:
        done.set()
        for thread in busy:
            thread.join()
