"""Links with a delay, a loss or two rates: what packets between nodes take, and how many arrive."""

from __future__ import annotations

import hashlib
import json
import random
import sys

import pytest

from sparcel.tools.lab import EmulatedNetwork, Link, Workers

pytestmark = [
    pytest.mark.network,
    pytest.mark.processes,
    pytest.mark.usefixtures("emulation"),
]

_DATAGRAMS = """
import json, os, socket, time
# Packets that ask for an address may be lost, too: ask again soon.
open("/proc/sys/net/ipv4/neigh/eth0/retrans_time_ms", "w").write("20")
socket_ = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
if os.environ["RANK"] == "0":
    socket_.bind(("", 5000))
    while (received := socket_.recvfrom(16))[0] != b"end":
        socket_.sendto(*received)
else:
    times, asked = [], 0
    socket_.settimeout(0.05)
    address = (os.environ["MASTER_ADDR"], 5000)
    while not times:  # node 0 is not there yet, or the first packets are lost
        try:
            socket_.sendto(b"first", address)
            times.append(len(socket_.recv(16)))
        except TimeoutError:
            pass
        except ConnectionRefusedError:
            time.sleep(0.05)
    socket_.settimeout(0.5)
    def came(silence):
        socket_.settimeout(silence)
        back = 0
        try:
            while True:
                back += socket_.recv(16) != b"first"
        except TimeoutError:
            return back
    back = 0
    for number in range(int({count})):
        asked = time.monotonic()
        socket_.sendto(str(number).encode(), address)
        if {wait}:
            while socket_.recv(16) != str(number).encode():
                pass
            times.append(time.monotonic() - asked)
        elif number % 100 == 99:  # more at once would not fit the buffers of a busy machine
            back += came(0.1)
    back += came(0.5)
    for _ in range(100):  # half of the packets may be lost
        socket_.sendto(b"end", address)
    print(json.dumps([times[1:], back]))
"""


def _datagrams(link: Link, count: int, wait: bool) -> tuple[list[float], int]:
    """Return the times of pings, each after another, or how many of pings at once come back."""
    script = _DATAGRAMS.format(count=count, wait=wait)
    network = EmulatedNetwork(2, link)
    with network, Workers(network, [sys.executable, "-c", script]) as workers:
        ((_, line),) = workers.lines()
    times, back = json.loads(line)
    return times, back


def test_a_ping_takes_twice_the_delay() -> None:
    times, _ = _datagrams(Link(delay_s=0.05), 5, wait=True)
    assert len(times) == 5
    assert 0.1 <= min(times) < 0.15  # not the delay of a node's link, which a ping crosses 4 times


def test_the_asked_share_of_packets_is_lost() -> None:
    _, back = _datagrams(Link(delay_s=0.01, loss=0.5), 400, wait=False)
    assert 50 < back < 150  # 100, with a standard deviation of 9; 200 if lost on one way alone


SLOW, FAST = 40, 200  # Mbit/s


@pytest.mark.parametrize("delay_s", [0.0, 0.005])
@pytest.mark.parametrize(("up", "down"), [(SLOW, FAST), (FAST, SLOW)])
def test_what_leaves_a_node_and_what_reaches_it_have_rates_of_their_own(
    up: int, down: int, delay_s: float, programs: str
) -> None:
    """Both limit two nodes; of three, two send to one, or one to two."""
    link = Link(up * 10**6, down_bits_per_s=down * 10**6, delay_s=delay_s)

    def reached(direction: str) -> float:
        argv = [sys.executable, programs, "transfer", direction, "2000000"]
        with Workers(network, argv) as workers:
            ((_, line),) = workers.lines()
        result = json.loads(line)
        return float(8e-6 * result["bytes"] / result["seconds"])

    slow, fast = ("send", "receive") if up < down else ("receive", "send")
    with EmulatedNetwork(3, link) as network:
        assert reached(slow) <= 1.2 * SLOW
        assert any(1.2 * SLOW < reached(fast) <= 2.4 * SLOW for _ in range(8))  # cores may be busy


_COPY = """
import hashlib, os, random, socket, time
data = random.Random(7).randbytes({size})
if os.environ["RANK"] == "0":
    server = socket.create_server(("", 5000))
    print(hashlib.sha256(server.accept()[0].makefile("rb").read()).hexdigest())
else:
    while True:
        try:
            with socket.create_connection((os.environ["MASTER_ADDR"], 5000)) as peer:
                peer.sendall(data)
            break
        except ConnectionRefusedError:
            time.sleep(0.05)
"""


@pytest.mark.parametrize("loss", [0.0, 0.02])
def test_data_arrive_whole(loss: float) -> None:
    link, size = Link(delay_s=0.005, loss=loss), 3_000_001
    network = EmulatedNetwork(2, link)
    with network, Workers(network, [sys.executable, "-c", _COPY.format(size=size)]) as workers:
        ((_, line),) = workers.lines()
    assert line == hashlib.sha256(random.Random(7).randbytes(size)).hexdigest()
