"""What `attach` asks of the driver of a wrapper."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

from torch import Tensor

from sparcel.comm import Group
from sparcel.training.averager import Averager
from sparcel.training.following import Follower
from sparcel.training.shard import Shard


class Driver(Protocol):
    """Brings the gradients of a wrapped model to an averager, and takes updates away.

    A driver is made of the model, which it checks. `attach` makes an averager of its attributes,
    and starts the driver with that.

    Attributes
    ----------
    parameters
        The parameters that are averaged, by their names in the model, whole.
    tensors
        What this rank holds of them.
    group
        All ranks that train the model.
    rows, withhold_zeros, shard
        As for `Averager`.
    """

    parameters: Mapping[str, Tensor]
    tensors: Mapping[str, Tensor]
    group: Group
    rows: Collection[str]
    withhold_zeros: bool
    shard: Shard | None

    def move_ahead(self, averager: Averager, names: Collection[str]) -> Follower:
        """Let the model compute with moved values of these parameters, until its `end`."""

    def start(self, averager: Averager) -> None:
        """Let the averager exchange gradients from now on."""
