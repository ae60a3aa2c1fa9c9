"""Programs that the lab's tests run as processes of their own: ``programs.py NAME ARGUMENTS``."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time

_PORT = 5000
_READY = b"r"


def transfer(direction: str, total_bytes: int) -> None:
    """Move ``total_bytes`` between node 0 and all the others together, and time it at node 0.

    The direction is node 0's: ``receive`` loads its switch port, ``send`` its own link.
    """
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    share = total_bytes // (world - 1)
    if rank != 0:
        with _connect(os.environ["MASTER_ADDR"]) as peer:
            peer.recv(1)
            if direction == "receive":
                peer.sendall(bytes(share))
            else:
                _drain(peer, share)
            peer.sendall(_READY)
            peer.recv(1)
        return
    with socket.create_server(("", _PORT), backlog=world) as server:
        peers = [server.accept()[0] for _ in range(world - 1)]
    start = time.monotonic()
    threads = [threading.Thread(target=_serve, args=(peer, direction, share)) for peer in peers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(json.dumps({"seconds": time.monotonic() - start, "bytes": share * (world - 1)}))
    for peer in peers:
        peer.sendall(_READY)
        peer.close()


def _connect(address: str) -> socket.socket:
    while True:
        try:
            return socket.create_connection((address, _PORT))
        except ConnectionRefusedError:
            time.sleep(0.05)


def _drain(peer: socket.socket, count: int) -> None:
    while count > 0:
        count -= len(peer.recv(min(count, 1 << 20)))


def _serve(peer: socket.socket, direction: str, share: int) -> None:
    peer.sendall(_READY)
    if direction == "receive":
        _drain(peer, share)
    else:
        peer.sendall(bytes(share))
    peer.recv(1)  # the other side has it all


def parent(kind: str) -> None:
    """Open a network, run workers that never end, and say what exists; for tests that kill it."""
    from sparcel.lab import Job, Link, open_network

    with open_network(3, Link() if kind == "emulated" else None) as network:
        here = {os.readlink(f"/proc/self/ns/{name}") for name in ("user", "mnt", "pid", "net")}
        namespaces = {os.readlink(f"/proc/self/fd/{fd}") for fd in network.descriptors} - here
        worker = "import os, time; print(os.getpid(), flush=True); time.sleep(1e6)"
        with Job(network, [sys.executable, "-c", worker]) as job:
            lines = job.lines()
            printed = [int(next(lines)[1]) for _ in range(3)]
            known = [process.pid for process in job.processes]
            pids = known if kind == "emulated" else known + printed
            print(json.dumps({"namespaces": sorted(namespaces), "pids": pids}), flush=True)
            command = sys.stdin.readline().strip()
            if command == "raise":
                raise RuntimeError("as asked")
            next(lines)


if __name__ == "__main__":
    name, *arguments = sys.argv[1:]
    if name == "transfer":
        transfer(arguments[0], int(arguments[1]))
    else:
        parent(arguments[0])
