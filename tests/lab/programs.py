"""Programs that the lab's tests run as separate processes: ``programs.py NAME ARGUMENTS``."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sparcel.core.comm import Communicator

TIMEOUT_S = 3.0
"""Timeout of an exchange of `steps`."""

_LINGER_S = 2.0
"""Time that rank 0 stays after a failure, so that the others can read the cause from its store."""

_PORT = 5000
_READY = b"r"
_NAMESPACES = ("user", "mnt", "pid", "net", "uts", "ipc")


def transfer(direction: str, total_bytes: int) -> None:
    """Move ``total_bytes`` in all between node 0 and the other nodes, and time it at node 0.

    ``receive`` loads the switch port of node 0, ``send`` its own link.
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
    """Open a network with workers that never end, and print what exists; tests kill it."""
    from sparcel.tools.lab import Link, Loopback, Workers, open_network

    link = Link(delay_s=0.01 if kind == "delayed" else 0.0)
    with open_network(3, None if kind == "loopback" else link) as network:
        here = {os.readlink(f"/proc/self/ns/{name}") for name in _NAMESPACES}
        namespaces = {os.readlink(f"/proc/self/fd/{fd}") for fd in network.descriptors} - here
        with Workers(network, [sys.executable, "-c", _worker(kind)], mpi=kind == "mpi") as workers:
            lines = workers.lines()
            printed = [int(next(lines)[1]) for _ in range(3)]
            known = [process.pid for process in workers.processes]
            pids = known if kind != "loopback" else known + printed
            print(json.dumps({"namespaces": sorted(namespaces), "pids": pids}), flush=True)
            command = sys.stdin.readline().strip()
            if command == "raise":
                raise RuntimeError("as asked")
            if command == "return":
                return
            if command == "kill node":
                assert not isinstance(network, Loopback)
                network.kill_node(1)
            next(lines)


def _worker(kind: str) -> str:
    become_mpi = "from mpi4py import MPI; " if kind == "mpi" else ""
    return become_mpi + "import os, time; print(os.getpid(), flush=True); time.sleep(1e6)"


def steps(engine: str) -> None:
    """Step a scheme until it fails; report the first step, the error and the memory."""
    import torch

    from sparcel.core.schemes import TopK
    from sparcel.errors import CommunicationError

    comm = _communicator(engine)
    topk = TopK(density=0.01)
    gradient = torch.randn(10_000)
    topk.step(gradient, comm)
    print(json.dumps({}), flush=True)
    while True:
        assert topk.memory is not None
        before = topk.memory.clone()
        start = time.monotonic()
        try:
            topk.step(gradient, comm)
        except CommunicationError as error:
            seconds = time.monotonic() - start
            unchanged = torch.equal(topk.memory, before)
            report = {"error": str(error), "seconds": seconds, "unchanged": unchanged}
            print(json.dumps(report), flush=True)
            time.sleep(_LINGER_S)
            os._exit(0)  # an orderly exit from MPI or a process group needs all ranks


def _communicator(engine: str) -> Communicator:
    if engine == "mpi":
        from mpi4py import MPI

        from sparcel.core.comm.mpi import MpiCommunicator

        return MpiCommunicator.of(MPI.COMM_WORLD, timeout=TIMEOUT_S)
    import torch.distributed as dist

    from sparcel.core.comm import resolve

    dist.init_process_group("gloo")
    return resolve(dist.new_group(timeout=timedelta(seconds=TIMEOUT_S)))


if __name__ == "__main__":
    name, *arguments = sys.argv[1:]
    if name == "transfer":
        transfer(arguments[0], int(arguments[1]))
    elif name == "steps":
        steps(arguments[0])
    else:
        parent(arguments[0])
