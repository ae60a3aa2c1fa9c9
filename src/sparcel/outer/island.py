"""The ranks inside an island, which train one replica of the model together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from sparcel._checks import all_finite
from sparcel.errors import CommunicationError
from sparcel.training import Stats

_FAILED = -1


class Island(Protocol):
    """What a rank that exchanges tells the other ranks of its island."""

    def all(self, flag: bool) -> bool:
        """Return whether a flag is set on all ranks of the island that exchange."""

    def lead(self, steps: int, changed: bool, anew: bool) -> None:
        """Tell the others what an inner step has ended with.

        Parameters
        ----------
        steps
            How many outer steps have been done so far.
        changed
            Whether parameters are others than this inner step has made.
        anew
            Whether this island goes on from what is shared, because of NaN or Inf.
        """

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

    def lead(self, steps: int, changed: bool, anew: bool) -> None:
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

    def all(self, flag: bool) -> bool:
        """See `Island.all`; one rank exchanges."""
        return flag

    def lead(self, steps: int, changed: bool, anew: bool) -> None:
        """See `Island.lead`; the others take over the parameters."""
        self._share(steps, changed, anew)
        if changed:
            for tensor in self._tensors:
                dist.broadcast(tensor, group=self._group, group_src=0)

    def fail(self) -> None:
        """See `Island.fail`."""
        self._share(_FAILED, False, False)

    def follow(self) -> tuple[int, bool]:
        """Learn from the first rank what it tells by `lead`, and take over the parameters.

        Raises
        ------
        CommunicationError
            When the first rank has failed.
        """
        steps, changed, anew = self._share(0, False, False)
        if steps == _FAILED:
            raise CommunicationError(
                "the first rank of this island could not exchange; its own output tells why"
            )
        if changed:
            for tensor in self._tensors:
                dist.broadcast(tensor, group=self._group, group_src=0)
        return steps, bool(anew)

    def _share(self, steps: int, changed: bool, anew: bool) -> list[int]:
        told = torch.tensor([steps, changed, anew], device=self._tensors[0].device)
        dist.broadcast(told, group=self._group, group_src=0)
        numbers: list[int] = told.tolist()
        return numbers


class Follower:
    """What `attach` returns on the ranks of an island that do not exchange themselves."""

    def __init__(self, island: Copies) -> None:
        self._island, self.steps = island, 0

    def start(self, optimizers: Sequence[Optimizer]) -> None:
        """Follow after each step of the last of these optimisers."""
        self._inner = optimizers
        self.close = optimizers[-1].register_step_post_hook(lambda *_: self.advance()).remove

    @torch.no_grad()
    def advance(self) -> None:
        """Follow the first rank; optimisers call it after each step."""
        self.steps, anew = self._island.follow()
        if anew:
            forget_spoilt(self._inner)

    def stats(self) -> Stats:
        """Return what this rank has exchanged with other islands: nothing."""
        return Stats()

    def state_dict(self) -> dict[str, Tensor]:
        """Return nothing: the first rank's state is the island's."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Do nothing; the first rank loads the island's state."""


def forget_spoilt(optimizers: Sequence[Optimizer]) -> None:
    """Clear what inner optimisers remember of parameters, where it holds NaN or Inf."""
    for optimizer in optimizers:
        for state in optimizer.state.values():
            tensors = [one for one in state.values() if isinstance(one, Tensor)]
            if not all(map(all_finite, tensors)):
                state.clear()
