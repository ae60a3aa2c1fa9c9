"""The ranks inside an island, which train one replica of the model together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from sparcel.errors import CommunicationError
from sparcel.training import Stats

_FAILED = -1


class Island(Protocol):
    """What a rank that exchanges tells the other ranks of its island."""

    def all(self, flag: bool) -> bool:
        """Return whether a flag is set on all ranks of the island that exchange."""

    def lead(self, steps: int) -> None:
        """Tell the others that so many outer steps have been done after an inner step."""

    def fail(self) -> None:
        """Tell the others that an outer step has failed."""


class Shards:
    """Ranks each of which exchanges its own shard."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._device = group, device

    def all(self, flag: bool) -> bool:
        """See `Island.all`."""
        held = torch.tensor(int(flag), device=self._device)
        dist.all_reduce(held, dist.ReduceOp.MIN, group=self._group)
        return bool(held)

    def lead(self, steps: int) -> None:
        """See `Island.lead`; all do the same."""

    def fail(self) -> None:
        """See `Island.fail`; all see it."""


class Copies:
    """Ranks that hold the same, of which the first exchanges and the others follow.

    Parameters
    ----------
    group
        The ranks of the island.
    tensors
        The parameters of the model, and the buffers that are averaged.
    """

    def __init__(self, group: dist.ProcessGroup, tensors: Sequence[Tensor]) -> None:
        self._group, self._tensors = group, tensors
        self._code = torch.zeros((), dtype=torch.int64, device=tensors[0].device)

    def all(self, flag: bool) -> bool:
        """See `Island.all`; one rank exchanges."""
        return flag

    def lead(self, steps: int) -> None:
        """See `Island.lead`; the others take over the parameters."""
        self._share(steps)
        if steps:
            for tensor in self._tensors:
                dist.broadcast(tensor, group=self._group, group_src=0)

    def fail(self) -> None:
        """See `Island.fail`."""
        self._share(_FAILED)

    def follow(self) -> int:
        """Learn from the first rank how many outer steps were done, and take over the parameters.

        Raises
        ------
        CommunicationError
            When the first rank has failed.
        """
        self._share(0)
        steps = int(self._code)
        if steps == _FAILED:
            raise CommunicationError(
                "the first rank of this island could not exchange; its own output tells why"
            )
        if steps:
            for tensor in self._tensors:
                dist.broadcast(tensor, group=self._group, group_src=0)
        return steps

    def _share(self, code: int) -> None:
        self._code.fill_(code)
        dist.broadcast(self._code, group=self._group, group_src=0)


class Follower:
    """What `attach` returns on the ranks of an island that do not exchange themselves."""

    def __init__(self, island: Copies) -> None:
        self._island, self.steps = island, 0

    def start(self, optimizers: Sequence[Optimizer]) -> None:
        """Follow after each step of the last of these optimisers."""
        self.close = optimizers[-1].register_step_post_hook(lambda *_: self.advance()).remove

    @torch.no_grad()
    def advance(self) -> None:
        """Follow the first rank; optimisers call it after each step."""
        self.steps += self._island.follow()

    def stats(self) -> Stats:
        """Return what this rank has exchanged with other islands: nothing."""
        return Stats()

    def state_dict(self) -> dict[str, Tensor]:
        """Return nothing: the first rank's state is the island's."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Do nothing; the first rank loads the island's state."""
