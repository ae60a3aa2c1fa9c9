"""How two ranks prove to each other that they belong to one group.

The rank that dials sends its number and a nonce. The rank that listens answers with a nonce of its
own and a proof; the first rank then sends its proof. A proof is an HMAC, under the group's key, of
the role, both ranks and both nonces. So the key itself never travels, a proof is of no use on
another connection, and none can be sent back as an answer.

A greeting is a generator, so that the greetings of many connections can be awaited side by side. It
yields whenever it waits for bytes, and returns the peer's rank.
"""

from __future__ import annotations

import hmac
import os
import socket
import struct
from collections.abc import Collection, Generator

Greeting = Generator[None, None, int]

KEY_BYTES = 32

_NONCE_BYTES = _PROOF_BYTES = 32

_HELLO = struct.Struct(f"<I{_NONCE_BYTES}s")
"""What the rank that dials sends first: its number and its nonce."""

_ANSWER = struct.Struct(f"{_NONCE_BYTES}s{_PROOF_BYTES}s")
"""What the rank that listens answers: its nonce and its proof."""

_PROVEN = struct.Struct(f"<8sII{_NONCE_BYTES}s{_NONCE_BYTES}s")
"""What a proof covers: the prover's role, the ranks and the nonces, those of the dialling first."""


class StrangerError(ConnectionError):
    """The other end of a connection does not prove to be a rank that is expected."""


def greet(connection: socket.socket, key: bytes, me: int, peer: int) -> Greeting:
    """Greet as rank ``me``, which dialled rank ``peer``."""
    mine = os.urandom(_NONCE_BYTES)
    connection.sendall(_HELLO.pack(me, mine))
    theirs, proof = _ANSWER.unpack((yield from _receive(connection, _ANSWER.size)))
    _check(proof, key, b"listens", me, peer, mine, theirs)
    connection.sendall(_proof(key, b"dials", me, peer, mine, theirs))
    return peer


def welcome(connection: socket.socket, key: bytes, me: int, expected: Collection[int]) -> Greeting:
    """Greet as rank ``me``, which was dialled; the peer must be expected, and above ``me``.

    Each rank dials those below it.
    """
    peer, theirs = _HELLO.unpack((yield from _receive(connection, _HELLO.size)))
    if peer not in expected or peer <= me:
        raise StrangerError(f"rank {peer} is not expected")
    mine = os.urandom(_NONCE_BYTES)
    answer = _ANSWER.pack(mine, _proof(key, b"listens", peer, me, theirs, mine))
    connection.sendall(answer)
    proof = yield from _receive(connection, _PROOF_BYTES)
    _check(proof, key, b"dials", peer, me, theirs, mine)
    if peer not in expected:
        raise StrangerError(f"another connection has proven to be rank {peer} meanwhile")
    return int(peer)


def _receive(connection: socket.socket, nbytes: int) -> Generator[None, None, bytes]:
    """Read exactly ``nbytes``, because a peer's first message may follow them at once."""
    came = b""
    while len(came) < nbytes:
        try:
            more = connection.recv(nbytes - len(came))
        except BlockingIOError:
            yield
            continue
        if not more:
            raise ConnectionResetError("the other end closed the connection during the greeting")
        came += more
    return came


def _proof(key: bytes, role: bytes, *proven: int | bytes) -> bytes:
    return hmac.digest(key, _PROVEN.pack(role, *proven), "sha256")


def _check(proof: bytes, key: bytes, role: bytes, *proven: int | bytes) -> None:
    if not hmac.compare_digest(proof, _proof(key, role, *proven)):
        raise StrangerError("the other end does not know the group's key")
