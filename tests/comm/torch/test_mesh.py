"""Messages over sockets arrive whole and in order, within bounds, or fail in time."""

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparcel import _cpu

OK, LOST, LATE, TOO_LONG, OTHER_CALL = range(5)
CALL = 2**32 - 7


def frame(length: int, call: int = CALL) -> bytes:
    return length.to_bytes(8, "little") + call.to_bytes(8, "little")


def pair() -> tuple[_cpu.Mesh, _cpu.Mesh]:
    """Connect two ranks."""
    first, second = socket.socketpair()
    return _cpu.Mesh([-1, first.detach()]), _cpu.Mesh([second.detach(), -1])


@pytest.fixture
def half() -> Iterator[tuple[_cpu.Mesh, socket.socket]]:
    """Connect rank 0 to a plain socket in the place of rank 1."""
    first, second = socket.socketpair()
    yield _cpu.Mesh([-1, first.detach()]), second
    second.close()


def content(length: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(seed)).to(
        torch.uint8
    )


lengths = st.one_of(
    st.integers(0, 40), st.sampled_from([16375, 16376, 16377, 16384, 16385, 70_000, 1_500_000])
)


@given(st.lists(st.tuples(st.lists(lengths, max_size=5), lengths), min_size=1, max_size=6))
def test_messages_in_parts_arrive_whole_and_in_order(rounds):
    """One rank sends all of its messages before the other rank receives its second one."""
    one, two = pair()
    arrived = {0: [], 1: []}
    sent = {
        0: [[content(length, seed) for seed, length in enumerate(parts)] for parts, _ in rounds],
        1: [[content(length, 7)] for _, length in rounds],
    }

    def run(rank: int, mesh: _cpu.Mesh) -> None:
        other = 1 - rank
        for parts, theirs in zip(sent[rank], sent[other], strict=True):
            due = sum(part.numel() for part in theirs)
            messages, fault, *_ = mesh.exchange([(other, parts)], [(other, due)], 60.0, CALL)
            assert fault == OK
            arrived[rank] += map(torch.from_numpy, messages)

    thread = threading.Thread(target=run, args=(0, one))
    thread.start()
    run(1, two)
    thread.join()
    for rank in (0, 1):
        for message, parts in zip(arrived[rank], sent[1 - rank], strict=True):
            assert message.data_ptr() % 8 == 0
            assert torch.equal(message, torch.cat([torch.empty(0, dtype=torch.uint8), *parts]))


def test_an_early_message_waits_for_its_exchange(half):
    mesh, peer = half
    bodies = [bytes([number]) * (number * 5000) for number in range(8)]
    peer.setblocking(False)
    with suppress(BlockingIOError):
        for body in bodies:
            peer.sendall(frame(len(body)) + body)
    for body in bodies:
        (message,), fault, *_ = mesh.exchange([], [(1, len(body))], 5.0, CALL)
        assert fault == OK
        assert bytes(message) == body


def test_a_message_above_its_bound_is_refused_before_it_is_read(half):
    mesh, peer = half
    peer.sendall(frame(1 << 60))
    assert mesh.exchange([], [(1, 100)], 5.0, CALL)[1:] == (TOO_LONG, 1, 1 << 60)


def test_a_message_of_another_call_is_refused_before_it_is_read(half):
    mesh, peer = half
    for call in (0, CALL + 1):
        peer.sendall(frame(3, call) + b"abc")
        assert mesh.exchange([], [(1, 100)], 5.0, CALL)[1:3] == (OTHER_CALL, 1)
        assert mesh.exchange([], [(1, 100)], 5.0, call)[1] == OK


@pytest.mark.parametrize("sent", [b"", b"abc", frame(100) + b"half"])
def test_a_peer_that_is_gone_is_lost(half, sent):
    mesh, peer = half
    peer.sendall(sent)
    assert mesh.broken() == []
    peer.close()
    assert mesh.broken() == [1]
    assert mesh.exchange([], [(1, 100)], 5.0, CALL)[1:3] == (LOST, 1)


def test_sending_to_a_peer_that_is_gone_raises_no_signal(half):
    mesh, peer = half
    peer.close()
    message = content(10, 0)
    assert mesh.exchange([(1, [message])], [], 5.0, CALL)[1:3] == (LOST, 1)


def test_the_last_message_of_a_peer_that_leaves_is_received(half):
    mesh, peer = half
    peer.sendall(frame(3) + b"bye")
    peer.close()
    (message,), fault, *_ = mesh.exchange([], [(1, 3)], 5.0, CALL)
    assert fault == OK
    assert bytes(message) == b"bye"


@pytest.mark.parametrize("sends", [True, False])
def test_a_silent_peer_is_late(half, sends):
    mesh, _ = half
    message = content(64 << 20, 0)  # more than sockets hold
    leaving = [(1, [message])] if sends else []
    start = time.monotonic()
    assert mesh.exchange(leaving, [] if sends else [(1, 10)], 0.3, CALL)[1:3] == (LATE, 1)
    assert time.monotonic() - start >= 0.3


def test_shutting_ends_a_wait(half):
    mesh, _ = half
    threading.Timer(0.1, mesh.shut).start()
    assert mesh.exchange([], [(1, 10)], 60.0, CALL)[1:3] == (LOST, 1)


def test_ctrl_c_ends_a_wait(half):
    mesh, _ = half
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        mesh.exchange([], [(1, 10)], 60.0, CALL)


def test_a_peer_that_does_not_exist_is_refused(half):
    mesh, _ = half
    with pytest.raises(ValueError, match="no such peer"):
        mesh.exchange([], [(7, 10)], 1.0, CALL)


@given(st.lists(st.tuples(lengths, lengths), min_size=1, max_size=4), lengths)
def test_parts_of_one_message_arrive_one_after_another(rounds, own):
    one, two = pair()

    def run(rank: int, mesh: _cpu.Mesh) -> None:
        other = 1 - rank
        for sizes in rounds:
            leaving, arriving = ([own, own] for _ in range(2))
            leaving[other], arriving[other] = sizes[rank], sizes[other]
            parts = [content(length, 10 * rank + to) for to, length in enumerate(leaving)]
            out = torch.empty(sum(arriving), dtype=torch.uint8)
            sent = mesh.all_to_all(rank, torch.cat(parts), leaving, out, arriving, 60.0, CALL)
            assert sent[0] == OK
            expected = [content(n, 10 * source + rank) for source, n in enumerate(arriving)]
            found.append(torch.equal(out, torch.cat(expected)))

    found: list[bool] = []
    thread = threading.Thread(target=run, args=(0, one))
    thread.start()
    run(1, two)
    thread.join()
    assert found == [True] * 2 * len(rounds)


@pytest.mark.parametrize("length", [3, 5])
def test_a_part_of_another_length_is_refused(half, length):
    mesh, peer = half
    peer.sendall(frame(length) + b"abcde"[:length])
    out = torch.empty(4, dtype=torch.uint8)
    assert mesh.all_to_all(0, content(2, 0), [0, 2], out, [0, 4], 5.0, CALL) == (
        *(TOO_LONG, 1, length),
    )


def test_parts_that_do_not_fit_their_message_are_refused(half):
    mesh, _ = half
    three = content(3, 0)
    for leaving, arriving in (([0, 4], [0, 3]), ([0, 3], [0, 4]), ([3], [3]), ([1, 2], [2, 1])):
        with pytest.raises(ValueError, match="as long as the ranks' parts"):
            mesh.all_to_all(0, three, leaving, three.clone(), arriving, 1.0, CALL)
