"""What the ranks of a trainer tell one another."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from sparcel.errors import CommunicationError


def agreed(own: object, group: dist.ProcessGroup) -> Any:
    """Return what rank 0 passes, on all ranks; or raise on all of them if one passes an exception.

    A rank raises its own exception, and the others a `CommunicationError` that tells it.
    """
    failed = isinstance(own, Exception)
    told: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(told, (failed, repr(own) if failed else own), group=group)
    if isinstance(own, Exception):
        raise own
    for rank, (has_failed, what) in enumerate(told):
        if has_failed:
            raise CommunicationError(f"rank {rank} failed: {what}")
    return told[0][1]
