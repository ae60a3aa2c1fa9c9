"""How the ranks of a node come to share memory."""

from __future__ import annotations

from sparcel.comm import Call, Communicator
from sparcel.data.shared import Shared, attach, index_bytes
from sparcel.errors import InputError, warn


def shared_by_node(comm: Communicator, length: int, limit: int, dataset: str) -> Shared:
    """Return the memory of this rank's node; all ranks call.

    The first rank of each node makes it. Ranks that cannot open it, such as those in another
    container, have their share of ``limit`` to themselves.

    Raises
    ------
    MismatchError
        When ranks give another ``length``, ``limit`` or ``dataset``, which tells what is kept.
    """

    def job() -> Shared:
        nodes = comm.nodes()
        first = nodes.index(nodes[comm.rank])
        made = Shared(length, limit) if comm.rank == first else None
        name = (0, 0, 0) if made is None else made.name
        pids, descriptors, tokens = (comm.gather_numbers(number) for number in name)
        if made is None:
            try:
                made = attach(pids[first], descriptors[first], tokens[first])
            except InputError as error:
                share = limit // nodes.count(nodes[comm.rank])
                warn(
                    f"rank {comm.rank} cannot share the memory of rank {first}, which is on the"
                    f" same node ({error}); it has {share} bytes of its own"
                )
                made = Shared(length, share if share >= index_bytes(length) else 0)
        comm.gather_numbers(0)  # no rank ends before the others have opened what it made
        return made

    arguments = {"length": length, "memory": limit, "dataset": dataset}
    return comm.call(Call.of("cached", arguments), job)
