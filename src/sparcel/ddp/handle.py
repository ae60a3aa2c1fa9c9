"""What the user holds of an attached scheme: statistics, state, and the end of it all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from sparcel.comm import Communicator, TorchCommunicator
from sparcel.ddp import checkpoint
from sparcel.ddp.hook import Hook
from sparcel.ddp.residuals import Residuals
from sparcel.schemes import Meter


@dataclass(frozen=True)
class Stats:
    """What training cost on this rank since `sparcel.attach`, small tensors included.

    ``density_before`` is the share of the coordinates that this rank selected,
    ``density_after`` the share that the updates had; both of the tensors that are made sparse.
    ``steps`` counts the steps that took effect, those before a checkpoint included.
    ``communicate_seconds`` includes waiting for slower ranks; it overlaps with the backward pass.
    """

    steps: int
    messages_sent: int
    bytes_sent: int
    bytes_received: int
    density_before: float
    density_after: float
    select_seconds: float
    communicate_seconds: float


class Handle:
    """What `sparcel.attach` returns: statistics, state for checkpoints, and `close`."""

    def __init__(
        self,
        comm: Communicator,
        owned: TorchCommunicator | None,
        hook: Hook,
        residuals: Residuals,
        remembered: Mapping[str, Tensor],
        meter: Meter,
    ) -> None:
        self._comm, self._owned = comm, owned
        self._hook, self._residuals, self._remembered = hook, residuals, remembered
        self._meter, self._traffic_before = meter, replace(comm.traffic)

    @property
    def sparse(self) -> frozenset[str]:
        """Names of the parameters whose gradients are made sparse.

        Under momentum correction the optimiser's own momentum is for the others alone.
        """
        return frozenset(self._remembered)

    @property
    def chosen(self) -> dict[str, str]:
        """What the scheme ``"auto"`` chose last, by parameter; empty for all other schemes.

        Parameters of one bucket share a choice. Small ones travel apart, unless it is ``"dense"``.
        """
        return self._residuals.chosen()

    def stats(self) -> Stats:
        """Return what training cost so far; the counts are this rank's."""
        meter, traffic, before = self._meter, self._comm.traffic, self._traffic_before
        coordinates = max(1, meter.coordinates)
        return Stats(
            steps=self._residuals.steps,
            messages_sent=traffic.messages_sent - before.messages_sent,
            bytes_sent=traffic.bytes_sent - before.bytes_sent,
            bytes_received=traffic.bytes_received - before.bytes_received,
            density_before=meter.selected / coordinates,
            density_after=meter.reduced / coordinates,
            select_seconds=meter.select_seconds,
            communicate_seconds=meter.communicate_seconds,
        )

    def state_dict(self, saved_by: int | None = None) -> dict[str, Tensor]:
        """Return a copy of what this rank remembers, for `torch.distributed.checkpoint` and others.

        Parameters
        ----------
        saved_by
            To load a checkpoint that another number of ranks saved, give that number: the result
            then has room for all that this rank has to load.

        Returns
        -------
        dict
            ``rank{r}.{name}``: the memory that rank r has of a parameter, float32 or float64, flat,
            in the order of DDP's bucket; zeros before the first step, and outside of the shard
            that the rank serves in its node. ``velocity{r}.{name}``, under momentum correction,
            likewise. ``steps`` and ``world_size``.
        """
        saved_by = self._comm.size if saved_by is None else saved_by
        return checkpoint.collect(
            self._residuals, self._remembered, self._comm.rank, self._comm.size, saved_by
        )

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state_dict` returned, here or on another number of ranks.

        All ranks load what was saved after the same step. Rank r takes over what all old ranks r,
        r+P, r+2P, … remember; nothing that was owed is lost. Entries of other ranks are passed
        over, so that gathered states may be given whole. A velocity that was not saved begins anew.

        Raises
        ------
        InputError
            When an entry fits no parameter of the model, or a rank's entries are missing; the
            memory stays as it was.

        Notes
        -----
        Training goes on bit by bit as if it had not been interrupted where the buckets are the
        same. A new DDP object lays all out in one bucket for its first step, in which the largest
        are then selected from other vectors; what is owed stays right. Thresholds and boundaries
        that were reused (``threshold="reuse"``, ``selector="reuse"``) are estimated anew.
        """
        residuals = checkpoint.take_over(state, self._remembered, self._comm.rank, self._comm.size)
        beta = float(state["filter"]) if "filter" in state else None
        self._residuals.load(residuals, int(state["steps"]), beta)

    def close(self) -> None:
        """End the communication thread; call it before the process group is destroyed.

        DDP has no way to take a hook off again: the model cannot train any more after this. A
        communicator that was passed to `sparcel.attach` stays open.
        """
        self._hook.closed = True
        if self._owned is not None:
            self._owned.close()
