"""A server for PMI-1, the protocol by which an MPI library learns its rank from its launcher.

MPICH and its descendants (Intel MPI, MVAPICH) use PMI-1 on a socket that they inherit. In lines of
``key=value``, ranks publish their addresses, wait for each other, and read the addresses. Launchers
such as ``mpiexec`` serve PMI-1 from their own tree of processes and end all ranks when one fails.
The lab serves it itself: the workers stay its children, it sees their output and exit statuses
unchanged, and the survivors of a failure keep running.
"""

from __future__ import annotations

import socket
import threading
import uuid
from contextlib import suppress

_LONGEST = {"kvsname_max": "256", "keylen_max": "64", "vallen_max": "4096"}


class PmiServer:
    """Answers the ranks of one program, each on a thread of its own, until it is closed.

    Parameters
    ----------
    nodes, ranks_per_node
        Rank r runs on node r // ranks_per_node; MPICH shares memory among the ranks of a node.

    Attributes
    ----------
    used
        Whether any rank has sent a request; every rank that starts MPI does.
    """

    def __init__(self, nodes: int, ranks_per_node: int) -> None:
        self.used = False
        self._ranks = nodes * ranks_per_node
        self._values = {"PMI_process_mapping": f"(vector,(0,{nodes},{ranks_per_node}))"}
        self._waiting: list[socket.socket] = []
        self._gone = 0
        self._lock = threading.Lock()
        # MPICH derives the names of shared memory from this, so it must be unique on the machine.
        space = f"sparcel-{uuid.uuid4()}"
        self._answers = {
            "init": {"cmd": "response_to_init", "pmi_version": "1", "pmi_subversion": "1"},
            "get_maxes": {"cmd": "maxes", **_LONGEST},
            "get_appnum": {"cmd": "appnum", "appnum": "0"},
            "get_my_kvsname": {"cmd": "my_kvsname", "kvsname": space},
            "get_universe_size": {"cmd": "universe_size", "size": str(self._ranks)},
            "finalize": {"cmd": "finalize_ack"},
        }
        self._ends = [socket.socketpair() for _ in range(self._ranks)]
        for ours, _ in self._ends:
            threading.Thread(target=self._serve, args=(ours,), daemon=True).start()

    def descriptor(self, rank: int) -> int:
        """Return the open file that the rank's process must inherit."""
        return self._ends[rank][1].fileno()

    def environment(self, rank: int) -> dict[str, str]:
        """Return the environment variables that lead the rank's process to the server."""
        return {
            "PMI_FD": str(self.descriptor(rank)),
            "PMI_RANK": str(rank),
            "PMI_SIZE": str(self._ranks),
        }

    def started(self, rank: int) -> None:
        """Close this copy of the rank's end of the socket, once its process has inherited it."""
        self._ends[rank][1].close()

    def _serve(self, end: socket.socket) -> None:
        with end:
            with suppress(OSError), end.makefile(errors="replace") as lines:
                for line in lines:
                    with self._lock:
                        self._reply(end, line)
            with self._lock:
                self._gone += 1
                self._waiting = [waiting for waiting in self._waiting if waiting is not end]
                self._release()

    def _reply(self, end: socket.socket, line: str) -> None:
        self.used = True
        words = dict(word.partition("=")[::2] for word in line.split())
        key = words.get("key", "")
        match words.get("cmd", ""):
            case "barrier_in":
                self._waiting.append(end)
                self._release()
            case "put":
                self._values[key] = words.get("value", "")
                _send(end, {"cmd": "put_result", "msg": "success"})
            case "get" if key in self._values:
                found = {"msg": "success", "value": self._values[key]}
                _send(end, {"cmd": "get_result", **found})
            case "get":
                _send(end, {"cmd": "get_result", "rc": "-1", "msg": "key_not_found"})
            case command:  # some are not served, such as spawning and publishing names
                unknown = {"cmd": command, "rc": "-1", "msg": "not_supported_in_the_lab"}
                _send(end, self._answers.get(command, unknown))

    def _release(self) -> None:
        """Release the barrier once all ranks wait that are still connected.

        Otherwise the survivors of a failure would hang in the barrier of MPI_Finalize.
        """
        if len(self._waiting) + self._gone >= self._ranks:
            for waiting in self._waiting:
                _send(waiting, {"cmd": "barrier_out"})
            self._waiting = []

    def close(self) -> None:
        """Stop the server."""
        for ours, theirs in self._ends:
            theirs.close()
            with suppress(OSError):  # its thread has ended
                ours.shutdown(socket.SHUT_RDWR)


def _send(end: socket.socket, answer: dict[str, str]) -> None:
    words = {"cmd": answer["cmd"], "rc": "0", **answer}  # some clients need this order
    line = " ".join(f"{key}={value}" for key, value in words.items())
    with suppress(OSError):  # the rank has died, which its exit status tells
        end.sendall((line + "\n").encode())
