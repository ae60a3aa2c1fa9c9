"""Control alone decides: on torch's meta device, whose tensors have no bytes, nothing else can."""

import pytest
import torch

from sparcel import SparseStream, simulate
from sparcel.core.collectives import ALGORITHMS, all_gather, broadcast
from sparcel.core.formats import Format
from sparcel.core.ops import SUM
from sparcel.core.stream import concatenate, reduce
from sparcel.core.wire import Wire

# The dense all-reduce is the engine's; before it, ranks compare their headers only.
SUMS = [name for name in ALGORITHMS if name != "dense"]


def dense(size, device):
    return SparseStream(None, torch.ones(size, device=device), size)


@pytest.mark.parametrize("name", SUMS)
@pytest.mark.parametrize("world", [2, 3, 8, 17])
def test_a_sum_travels_without_anybody_reading_it(name, world):
    def on(device):
        return simulate(
            world,
            lambda comm: ALGORITHMS[name](dense(1000, device), Wire(comm), SUM, None),
        )

    unread, read = on("meta"), on("cpu")
    assert unread.traffic == read.traffic
    for total in unread.results:
        assert total.device.type == "meta"
        assert total.values.shape == (1000,)


@pytest.mark.parametrize("world", [2, 5, 9])  # straight to all, and in rounds
def test_gathered_and_broadcast_messages_are_forwarded_unread(world):
    def program(comm):
        root = dense(77, "meta") if comm.rank == 1 else None  # short: long ones are scattered
        return [*all_gather(dense(100, "meta"), Wire(comm)), broadcast(root, Wire(comm), 1)]

    for streams in simulate(world, program).results:
        assert [stream.values.shape for stream in streams] == [(100,)] * world + [(77,)]
        assert all(stream.values.is_meta for stream in streams)


def test_a_flag_on_a_device_is_not_read_on_its_way():
    """Rounding asks for one; sums and messages pass it on."""

    def program(comm):
        wire = Wire(comm, Format("raw", "float16"))
        packets = [wire.pack(dense(10, "meta")) for _ in range(3)]
        streams = [packet.stream for packet in packets]
        return [*packets, *(wire.exact.pack(f(streams)) for f in (reduce, concatenate))]

    for message, stream in simulate(1, program).results[0]:
        assert stream.finite.is_meta
        assert all(part.is_meta for part in message)
