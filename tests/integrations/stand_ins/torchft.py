"""A stand-in for what `sparcel.integrations.torchft` uses of torchft."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor


class ProcessGroupGloo:
    def __init__(self, timeout: timedelta = timedelta(seconds=60), pg: Any = None) -> None:
        self._timeout, self._pg = timeout, pg

    def allreduce(self, tensors: list[Tensor], opts: object) -> Any:
        return self._pg.allreduce(tensors, opts)

    def _create_pg(self, store: dist.Store, rank: int, world_size: int) -> Any:
        return dist.ProcessGroupGloo(store, rank, world_size, self._timeout)


MODULES: dict[str, dict[str, Any]] = {
    "torchft.process_group": {"ProcessGroupGloo": ProcessGroupGloo}
}
