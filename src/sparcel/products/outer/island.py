"""The ranks inside an island, which train one replica of the model together."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from sparcel.core.comm import ALL_CONTROL, Communicator
from sparcel.core.fsdp import checked_mesh, group_of_ranks
from sparcel.core.memory import wide_dtype
from sparcel.core.training import Shard, Stats
from sparcel.core.training.ranks import connected
from sparcel.errors import CommunicationError
from sparcel.products.outer.model import Model, unwrapped
from sparcel.products.outer.shared import Shared

_FAILED = -1

_MOST_BYTES = 1 << 20
"""How long a message to the ranks of an island may be."""


class Ranks:
    """The ranks of an island, as this one sees them.

    Of those that hold the same, as in DDP, the first exchanges, and the others follow: see `lead`.
    If the model is sharded, those that exchange do it each with its own shard, and the first of
    them tells the others what to do.

    Attributes
    ----------
    shard
        Which shard this rank holds, if the model is sharded.
    rank, size
        Of those that exchange, which this one is, and how many there are.

    Raises
    ------
    InputError
        When parameters are on ranks that are in no common mesh.
    """

    def __init__(self, module: Module, model: Model) -> None:
        self._model = model
        self._copies, self._shards, self.shard = _found(module, model)
        self._comm: Communicator | None = None
        self.rank, self.size = 0, 1

    @property
    def several(self) -> bool:
        """Whether several ranks train the model."""
        return self._copies is not None or self.shard is not None

    @property
    def follows(self) -> bool:
        """Whether another rank exchanges for this one."""
        return self._copies is not None and self._copies.rank() > 0

    def connect(self, shared: Shared) -> None:
        """Connect those that exchange, given what islands share, of which all have a copy."""
        self._shared = shared
        if self._shards is not None:
            self._comm = connected(self._shards, shared.device, "host")[0]
            self.rank, self.size = self._comm.rank, self._comm.size

    def gather(self, number: int) -> list[int]:
        """Return the number (64-bit) that each rank that exchanges gives."""
        comm = self._comm
        return [number] if comm is None else comm.run(lambda: comm.gather_numbers(number))

    def all(self, flag: bool) -> bool:
        """Return whether a flag is set on all of these ranks."""
        return all(self.gather(int(flag)))

    def tell(self, told: object) -> Any:
        """Return what the first rank tells, which JSON can hold."""
        comm = self._comm
        if comm is None:
            return told
        text = json.dumps(told).encode()
        message = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        sends = dict.fromkeys(range(1, self.size), message) if self.rank == 0 else {}
        receives = {0: _MOST_BYTES} if self.rank else {}
        came = comm.run(lambda: comm.exchange(sends, receives, ALL_CONTROL))
        return json.loads(bytes(came[0].tolist())) if self.rank else told

    def close(self) -> None:
        """End the connections."""
        if self._comm is not None:
            self._comm.close()

    def lead(
        self, steps: int, islands: int, changed: bool, anew: bool, averaged: Collection[str]
    ) -> None:
        """Tell the others what an inner step has ended with.

        Parameters
        ----------
        steps
            How many outer steps have been done so far.
        islands
            How many islands the latest was tried with.
        changed
            Whether parameters are others than this inner step has made.
        anew
            Whether this island goes on from what is shared, because of NaN or Inf.
        averaged
            The parameters whose second moments have become averages.
        """
        self._share([steps, islands, changed, anew, len(averaged)], averaged)

    def fail(self) -> None:
        """Tell the others that an outer step has failed."""
        self._share([_FAILED, 0, 0, 0, 0])

    def follow(self) -> tuple[int, int, bool]:
        """Learn from the first rank what it tells by `lead`, and take over what has changed.

        Raises
        ------
        CommunicationError
            When the first rank has failed.
        """
        steps, islands, _, anew, _ = self._share([0] * 5)
        if steps == _FAILED:
            raise CommunicationError(
                "the first rank of this island could not exchange; its own output tells why"
            )
        return steps, islands, bool(anew)

    def _share(self, told: list[int], averaged: Collection[str] = ()) -> list[int]:
        if self._copies is None:
            return told
        model = self._model
        numbers = torch.tensor(told, device=next(iter(model.parameters.values())).device)
        dist.broadcast(numbers, group=self._copies, group_src=0)
        found: list[int] = numbers.tolist()
        if found[2]:
            model.look()
            shared = (vector.shared for vector in self._shared.vectors)
            for tensor in (*model.parameters.values(), *model.buffers.values(), *shared):
                wide = tensor.to(wide_dtype(tensor.dtype))  # a copy may be on one rank only
                dist.broadcast(wide, group=self._copies, group_src=0)
                tensor.copy_(wide)
            model.settle()
        if found[-1]:
            self._share_moments(averaged)
        return found

    def _share_moments(self, averaged: Collection[str]) -> None:
        """Take over the first rank's second moments; a rank may keep those of some tensors only."""
        model = self._model
        own, parameters = model.moments(), model.parameters.items()
        device = next(iter(model.parameters.values())).device
        flags = torch.tensor([name in averaged for name, _ in parameters], device=device).int()
        dist.broadcast(flags, group=self._copies, group_src=0)
        for (name, parameter), flag in zip(parameters, flags.tolist(), strict=True):
            if flag:
                wide = torch.zeros_like(parameter, dtype=wide_dtype(parameter.dtype))
                if name in own:
                    wide.copy_(own[name].kept)
                dist.broadcast(wide, group=self._copies, group_src=0)
                if name in own:
                    own[name].kept.copy_(wide)


_Groups = tuple[dist.ProcessGroup | None, dist.ProcessGroup | None, Shard | None]


def _found(module: Module, model: Model) -> _Groups:
    """Find the ranks that train a model together: by DDP, by its shards, or by both.

    Return the group of those that hold the same as this one, that of all which exchange shards,
    each None for one alone, and which shard this rank holds.
    """
    for one in unwrapped(module):
        if isinstance(one, DistributedDataParallel):
            return one.process_group if one.process_group.size() > 1 else None, None, None
    if not model.whole:
        return None, None, None
    mesh = checked_mesh(model.whole)
    placed = {
        name: dict(zip(_dimensions(one.device_mesh), one.placements, strict=True))
        for name, one in model.whole.items()
    }
    same = {  # of each dimension, the parameters that are the same along it
        key: [name for name, where in placed.items() if _is_copied(where.get(key))]
        for number, key in enumerate(_dimensions(mesh))
        if mesh.size(number) > 1
    }
    copies = next((key for key, names in same.items() if len(names) == len(placed)), None)
    copied = {name for key, names in same.items() if key != copies for name in names}
    copied |= model.parameters.keys() - model.whole.keys()
    group: dist.ProcessGroup | None = None
    ranks = mesh.mesh
    if copies is not None:
        dimension = _dimensions(mesh).index(copies)
        group, ranks = mesh.get_group(dimension), ranks.select(dimension, 0)
        if group.rank() > 0:
            return group, None, None
    numbers = sorted(ranks.flatten().tolist())
    shard = Shard(numbers.index(dist.get_rank()), model.whole, frozenset(copied))
    if len(numbers) == 1:
        return group, None, shard
    return group, group_of_ranks(numbers, mesh.get_group(0), mesh.device_type), shard


def _dimensions(mesh: DeviceMesh) -> tuple[object, ...]:
    return mesh.mesh_dim_names or tuple(range(mesh.ndim))


def _is_copied(placement: Placement | None) -> bool:
    return placement is None or isinstance(placement, Replicate)


class FollowingRank:
    """What `attach` returns on the ranks of an island that do not exchange themselves.

    Attributes
    ----------
    steps, islands
        As `Outer` has them.
    optimizer
        One whose learning rate may be changed as that of `Outer`; the first rank's counts.
    """

    def __init__(self, ranks: Ranks, shared: Shared) -> None:
        ranks.connect(shared)
        self._ranks, self._shared, self.optimizer = ranks, shared, shared.optimizer
        self.advance()
        self._end = shared.model.after_steps(self.advance)

    @property
    def shared(self) -> dict[str, Tensor]:
        """The parameters that islands share, by name, not copied."""
        return self._shared.by_name()

    @torch.no_grad()
    def advance(self) -> None:
        """Follow the first rank; optimisers call it after each step."""
        self.steps, self.islands, anew = self._ranks.follow()
        if anew:
            self._shared.model.forget_spoilt()

    def count(self, amount: float) -> None:
        """Do nothing; the first rank tells what the island learns from."""

    def stats(self) -> Stats:
        """Return what this rank has exchanged with other islands: nothing."""
        return Stats()

    def state_dict(self) -> dict[str, Tensor]:
        """Return nothing: the first rank's state is the island's."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Do nothing; the first rank loads the island's state."""

    def close(self) -> None:
        """Follow no more."""
        self._end()
