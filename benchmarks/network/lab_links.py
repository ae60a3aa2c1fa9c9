"""Up to which rates the lab's delays and losses hold: throughput and times of pings of two nodes.

For each rate, delay and loss, node 1 pings node 0 by datagrams on an idle link, and then sends to
it over one TCP connection, or several. The throughput is of data, without headers, from
`WARM_S` seconds after the first byte on. Run as root or where user namespaces are permitted, as in

    python -m benchmarks.network.lab_links

The record tells the kernel's settings of TCP, which limit what a connection carries: at most its
window in a round trip. `relayed` says whether the lab's own process held the packets back, not the
kernel's netem. Links that the record has are not measured again.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from statistics import median

from benchmarks.record import RESULTS, Row, grid, run_here
from sparcel.tools.lab import EmulatedNetwork, Workers, parse_link

RATES = ("20mbit", "100mbit", "500mbit", "1gbit")
DELAYS = ("20ms", "50ms", "100ms")
LOSSES = ("0%", "0.1%")
FLOWS = (1, 4)
WARM_S, MEASURED_S = 5.0, 6.0
PINGS = 40
PORT = 5000
SETTINGS = ("tcp_congestion_control", "tcp_rmem", "tcp_wmem")


def answer(flows: int) -> None:
    """Be node 0: answer the pings, take what comes, and print the throughput."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as pings:
        pings.bind(("", PORT))
        threading.Thread(target=_echo, args=(pings,), daemon=True).start()
        with socket.create_server(("", PORT), backlog=flows) as server:
            peers = [server.accept()[0] for _ in range(flows)]
        taken = [0] * flows
        for flow, peer in enumerate(peers):
            threading.Thread(target=_drain, args=(peer, taken, flow), daemon=True).start()
        time.sleep(WARM_S)
        before, start = sum(taken), time.monotonic()
        time.sleep(MEASURED_S)
        mbit = 8e-6 * (sum(taken) - before) / (time.monotonic() - start)
        print(json.dumps({"mbit_per_s": round(mbit, 1)}), flush=True)
    os._exit(0)  # the threads wait for more


def ask(flows: int) -> None:
    """Be node 1: ping, then send until the connections end."""
    address = (os.environ["MASTER_ADDR"], PORT)
    times: list[float] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as pings:
        pings.settimeout(1.0)
        while len(times) <= PINGS:
            start = time.monotonic()
            pings.sendto(b"%d" % len(times), address)
            try:
                while pings.recv(16) != b"%d" % len(times):
                    pass
            except (TimeoutError, ConnectionRefusedError):  # lost, or node 0 is not there yet
                continue
            times.append(1e3 * (time.monotonic() - start))
    times = sorted(times[1:])  # the first one has asked for the address, too
    found = {"ping_min_ms": times[0], "ping_median_ms": median(times), "ping_max_ms": times[-1]}
    print(json.dumps({name: round(value, 2) for name, value in found.items()}), flush=True)
    peers = [socket.create_connection(address) for _ in range(flows)]
    threads = [threading.Thread(target=_send, args=(peer,)) for peer in peers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _echo(pings: socket.socket) -> None:
    while True:
        pings.sendto(*pings.recvfrom(16))


def _drain(peer: socket.socket, taken: list[int], flow: int) -> None:
    buffer = bytearray(1 << 20)
    while count := peer.recv_into(buffer):
        taken[flow] += count


def _send(peer: socket.socket) -> None:
    try:
        while True:
            peer.sendall(bytes(1 << 18))
    except OSError:  # node 0 has seen enough
        return


def measure(rate: str, delay: str, loss: str, flows: int) -> Row:
    """Return a row of the record; times in milliseconds."""
    row: Row = {}
    program = [sys.executable, "-m", "benchmarks.network.lab_links", str(flows)]
    with (
        EmulatedNetwork(2, parse_link(rate, delay, loss)) as network,
        Workers(network, program) as workers,
    ):
        for _, line in workers.lines():
            row.update(json.loads(line))
    return row


def main() -> None:
    """Measure all links, print them and write the record."""
    netem = ["unshare", "--net", "tc", "qdisc", "add", "dev", "lo", "root", "netem"]
    relayed = subprocess.run(netem, capture_output=True, check=False).returncode != 0
    told = {name: Path(f"/proc/sys/net/ipv4/{name}").read_text().strip() for name in SETTINGS}
    jobs = grid(rate=RATES, delay=DELAYS, loss=LOSSES, flows=FLOWS)
    run_here(RESULTS / "lab_links.json", measure, jobs, relayed=relayed, **told)


if __name__ == "__main__":
    if len(sys.argv) == 1:
        main()
    elif os.environ["RANK"] == "0":
        answer(int(sys.argv[1]))
    else:
        ask(int(sys.argv[1]))
