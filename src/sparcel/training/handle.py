"""What the user of a running exchange holds: statistics, state for checkpoints, and its end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from torch import Tensor

from sparcel.comm import Communicator, TorchCommunicator
from sparcel.cost import default_rates
from sparcel.schemes import Meter
from sparcel.training import checkpoint
from sparcel.training.policy import Treatment
from sparcel.training.residuals import Residuals

T = TypeVar("T")


@dataclass(frozen=True)
class Stats:
    """What training has cost on this rank so far, small tensors included.

    ``density_before`` is the share of the coordinates that this rank selected,
    ``density_after`` the share that the updates had; both of the tensors that are made sparse.
    ``steps`` counts the steps that took effect, those before a checkpoint included.
    ``communicate_seconds`` includes waiting for slower ranks; it may overlap with computation.
    ``rates`` says what ``"auto"`` takes the cluster to be good for: measured, read or assumed.
    """

    steps: int
    messages_sent: int
    bytes_sent: int
    bytes_received: int
    density_before: float
    density_after: float
    select_seconds: float
    communicate_seconds: float
    rates: str


class Handle:
    """Tells what an exchange has cost, saves and loads what it remembers, and ends it.

    ``owned`` is the communicator if it ends with the handle.
    """

    def __init__(
        self,
        comm: Communicator,
        owned: TorchCommunicator | None,
        residuals: Residuals,
        treatment: Treatment,
    ) -> None:
        self._comm, self._owned = comm, owned
        self._residuals, self._treatment = residuals, treatment
        self._meter, self._traffic_before = Meter(), replace(comm.traffic)
        self.closed = False

    @property
    def sparse(self) -> frozenset[str]:
        """Names of the tensors that are made sparse.

        Under momentum correction the optimiser's own momentum is for the others alone.
        """
        return frozenset(self._treatment.remembered)

    @property
    def chosen(self) -> dict[str, str]:
        """What the scheme ``"auto"`` chose last, by tensor; empty for all other schemes.

        Tensors of one vector share a choice. Small ones are exchanged separately, unless it is
        ``"dense"``.
        """
        return self._residuals.chosen()

    def stats(self) -> Stats:
        """Return what training has cost so far; the counts are this rank's."""
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
            rates=(self._comm.rates or default_rates()).description,
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
            ``rank{r}.{name}``: the memory that rank r has of a tensor, float32 or float64, flat, in
            the order of the queued vectors; zeros before the first step, and outside the shard
            that the rank serves in its node. ``velocity{r}.{name}``, under momentum correction,
            likewise. ``steps``, ``world_size``, and where the tensors lay in the vectors of the
            last step.
        """
        saved_by = self._comm.size if saved_by is None else saved_by
        remembered = self._treatment.remembered
        return checkpoint.collect(
            self._residuals, remembered, self._comm.rank, self._comm.size, saved_by
        )

    def full_state_dict(self) -> dict[str, Tensor]:
        """Return on rank 0 what all ranks remember; all ranks call, between two steps.

        For frameworks that save the state of rank 0 alone. Every rank loads the result whole.

        Returns
        -------
        dict
            On rank 0 the entries of all ranks' `state_dict`, on the CPU: the memory of P models.
            Empty on the other ranks, as torch's own full state dicts are. Tensors are gathered
            one by one, so no rank needs room for a second copy of more than one. `stats` leaves
            these messages out.

        Raises
        ------
        CommunicationError
            On all ranks, when one fails.
        """
        comm, remembered = self._comm, self._treatment.remembered
        return self._run_uncounted(lambda: checkpoint.gather(self._residuals, remembered, comm))

    def load_state_dict(self, state: Mapping[str, Tensor], strict: bool = True) -> None:
        """Go on from what `state_dict` or `full_state_dict` returned, on any number of ranks.

        All ranks load what was saved after the same step. Rank r takes over what all old ranks r,
        r+P, r+2P, … remember; nothing that was owed is lost. Entries of other ranks are ignored,
        so every rank gives a full state whole. A velocity that was not saved starts at 0.

        Parameters
        ----------
        state
            Tensors on any device. Those that ``torch.load(..., mmap=True)`` returns are read from
            the file when they are needed, which saves reading the entries of other ranks.
        strict
            Whether entries that fit no tensor, and missing ones, are errors. If not, this rank's
            memory of the tensors concerned starts empty, and a warning says so.

        Raises
        ------
        InputError
            When an entry fits no tensor, or entries are missing; the memory stays as it was.

        Notes
        -----
        Training continues bit by bit as if it had not been interrupted, unless the driver had laid
        out the tensors anew after it: a checkpoint of DDP's first step (the first two with
        ``static_graph``) was saved before DDP rebuilt its buckets. What is owed stays right in any
        layout. Thresholds and boundaries that were reused (``threshold="reuse"``,
        ``selector="reuse"``) are estimated anew.
        """
        comm, remembered = self._comm, self._treatment.remembered
        checkpoint.load(state, self._residuals, remembered, comm.rank, comm.size, strict)

    def meet(self) -> None:
        """Wait until all ranks have called; raise `CommunicationError` if one cannot."""
        self._run_uncounted(lambda: self._comm.gather_numbers(0))

    def _run_uncounted(self, job: Callable[[], T]) -> T:
        """Run a job whose messages `stats` leaves out."""

        def uncounted() -> T:
            before = replace(self._comm.traffic)
            result = job()
            self._traffic_before += self._comm.traffic - before
            return result

        return self._comm.run(uncounted)

    def close(self) -> None:
        """End the communication thread; call it before the process group is destroyed.

        Nothing can be exchanged after that. A communicator that was passed as ``group`` stays open.
        """
        self.closed = True
        if self._owned is not None:
            self._owned.close()
