"""Tensors of which each rank holds a shard: which one it is, and how checkpoints hold it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from sparcel.errors import InputError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True, eq=False)
class Shard:
    """The shard of all tensors that this rank holds, where no rank holds them whole.

    Attributes
    ----------
    number
        Ranks with the same number hold the same shard, and average it. Steps take effect on the
        ranks of all numbers, or on none.
    tensors
        The whole tensors, by name.
    copied
        The names of tensors that ranks of other shards hold as well, as under tensor parallelism.
        They are averaged densely: each of these ranks would select for itself.
    """

    number: int
    tensors: Mapping[str, DTensor]
    copied: frozenset[str] = frozenset()

    def distributed(self, name: str, part: Tensor) -> DTensor:
        """Return the tensor of which ``part``, flat, is this rank's shard."""
        from torch.distributed.tensor import DTensor

        like = self.tensors[name]
        shape = like.to_local().shape
        return DTensor.from_local(
            part.view(shape),
            like.device_mesh,
            like.placements,
            run_check=False,
            shape=like.shape,
            stride=like.stride(),
        )

    def local(self, name: str, whole: object) -> object:
        """Return this rank's shard of a tensor that is sharded as the one of that name is.

        What is no DTensor is returned as it is.

        Raises
        ------
        InputError
            When it is sharded otherwise.
        """
        from torch.distributed.tensor import DTensor

        like = self.tensors[name]
        if not isinstance(whole, DTensor):
            return whole
        if (whole.shape, whole.placements) != (like.shape, like.placements):
            raise InputError(
                f"the state of {name!r} must be sharded as the parameter is, {tuple(like.shape)} by"
                f" {like.placements}, got {tuple(whole.shape)} by {whole.placements}; let"
                " torch.distributed.checkpoint load it into state_dict()"
            )
        return whole.to_local().flatten()
