"""The hook that DDP calls for each bucket, and what the user holds of it."""

# DDP looks at the annotations of its hook and takes no strings: no postponed evaluation here.

from dataclasses import dataclass
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from sparcel.comm import Communicator
from sparcel.ddp.policy import Policy
from sparcel.ddp.residuals import Piece, Residuals
from sparcel.ddp.step import Step
from sparcel.errors import InputError
from sparcel.schemes import Dense, Scheme


@dataclass(frozen=True)
class Stats:
    """What training cost on this rank since `sparcel.attach`, small tensors included.

    ``density_before`` is the share of the coordinates that this rank selected,
    ``density_after`` the share that the updates had; both of the tensors that are made sparse.
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
    """What `sparcel.attach` returns: statistics, state, and the end of it all."""

    def __init__(
        self,
        model: DistributedDataParallel,
        comm: Communicator,
        template: Scheme,
        policy: Policy,
        scaler: torch.amp.GradScaler | None,
        owns_communicator: bool = False,
    ) -> None:
        self._owns_communicator = owns_communicator
        self._comm, self._template, self._scaler = comm, template, scaler
        self._residuals = Residuals(template)
        parameters = dict(model.module.named_parameters())
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        # A dense scheme serves small tensors as well as large ones, and has no memory to unscale.
        self._is_dense = isinstance(template, Dense)
        self._small = {
            name
            for name, parameter in parameters.items()
            if not self._is_dense and policy(name, parameter)
        }
        self._trained = {name: p for name, p in parameters.items() if p.requires_grad}
        self._may_be_unused = model.find_unused_parameters or model.static_graph
        self._step: Step | None = None

    def hook(self, state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Queue a bucket's exchange; DDP calls this from the backward pass."""
        if bucket.index() == 0:
            # DDP queues its own callback after its last hook, so that this one runs before it.
            self._step = Step(self._comm)
            torch.autograd.Variable._execution_engine.queue_callback(self._complete)
        step = self._step
        assert step is not None, "DDP calls its hook for bucket 0 first"
        gradient = bucket.buffer()
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        if gradient.is_sparse:
            step.queue(lambda: step.deliver(future, step.exchange_rows(gradient)))
        else:
            pieces = self._pieces(bucket)
            scale = 1.0 if self._scaler is None or self._is_dense else self._scaler.get_scale()
            step.queue(lambda: self._exchange(step, pieces, gradient, scale))
            step.deliver(future, gradient)
        if bucket.is_last():
            step.queue(step.finish)
        return future

    def stats(self) -> Stats:
        """Return what training cost so far; the counts are this rank's."""
        cost, traffic = self._template.cost, self._comm.traffic
        coordinates = max(1, cost.coordinates)
        return Stats(
            steps=self._residuals.steps,
            messages_sent=traffic.messages_sent,
            bytes_sent=traffic.bytes_sent,
            bytes_received=traffic.bytes_received,
            density_before=cost.selected / coordinates,
            density_after=cost.reduced / coordinates,
            select_seconds=cost.select_seconds,
            communicate_seconds=cost.communicate_seconds,
        )

    def state_dict(self, saved_by: int | None = None) -> dict[str, Tensor]:
        """Return this rank's residuals, for `torch.distributed.checkpoint` or `torch.save`.

        Parameters
        ----------
        saved_by
            To load a checkpoint that another number of ranks saved, give that number: the result
            then has room for all that this rank has to load.

        Returns
        -------
        dict
            ``rank{r}.{name}``: the residual of a parameter at rank r, flat, in the order of DDP's
            bucket; ``steps``.
        """
        ranks = [self._comm.rank] if saved_by is None else self._inherited(saved_by)
        state = {"steps": torch.tensor(self._residuals.steps)}
        for rank in ranks:
            for name, parameter in self._trained.items():
                if name not in self._small:
                    residual = self._residuals.of(name) if rank == self._comm.rank else None
                    wide = torch.float64 if parameter.dtype == torch.float64 else torch.float32
                    state[f"rank{rank}.{name}"] = (
                        parameter.new_zeros(parameter.numel(), dtype=wide)
                        if residual is None
                        else residual
                    )
        return state

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Go on from what `state_dict` returned, here or on another number of ranks.

        Rank r takes over the residuals of all old ranks r, r+P, r+2P, …; nothing that was owed is
        lost. Entries of other ranks are passed over, so that gathered states may be given whole.

        Raises
        ------
        InputError
            When an entry fits no parameter of the model.
        """
        residuals: dict[str, Tensor] = {}
        for key, residual in state.items():
            if key == "steps":
                continue
            rank, _, name = key.removeprefix("rank").partition(".")
            parameter = self._trained.get(name)
            if not rank.isdigit() or parameter is None or parameter.numel() != residual.numel():
                raise InputError(
                    f"{key!r} with {residual.numel()} elements fits no trained parameter of the"
                    " model; load the state into the model that it was saved from"
                )
            if int(rank) % self._comm.size == self._comm.rank:
                known = residuals.get(name)
                residuals[name] = residual.clone() if known is None else known + residual
        self._residuals.load(residuals, int(state["steps"]))

    def close(self) -> None:
        """End the communication thread; call it before the process group is destroyed.

        DDP has no way to take a hook off again: the model cannot train any more after this. A
        communicator that was passed to `sparcel.attach` stays open.
        """
        if self._owns_communicator:
            self._comm.close()

    def _exchange(
        self, step: Step, pieces: list[Piece], gradient: Tensor, scale: float
    ) -> None:
        for piece in pieces:
            if piece.name in self._small:
                step.take_small(gradient[piece.start : piece.stop])
        large = tuple(piece for piece in pieces if piece.name not in self._small)
        if not large:
            return
        vector = self._residuals.vector(large, gradient)
        if self._may_be_unused:
            # DDP throws the update of a parameter away that no rank used, so none may be sent.
            vector.scheme.withhold(
                [(p.start, p.stop) for p in large if not gradient[p.start : p.stop].any()]
            )
        step.exchange_vector(vector, gradient, scale)

    def _complete(self) -> None:
        """Wait for all exchanges of the step, then commit all of them, or none and raise."""
        step, self._step = self._step, None
        assert step is not None, "queued by the hook that made the step"
        for job in step.jobs:
            job.wait()
        if step.finite:
            for vector in step.vectors:
                vector.scheme.commit()
            self._residuals.steps += 1

    def _pieces(self, bucket: dist.GradBucket) -> list[Piece]:
        first = bucket.buffer().storage_offset()
        pieces = []
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            start = gradient.storage_offset() - first
            pieces.append(Piece(self._names[id(parameter)], start, start + parameter.numel()))
        return pieces

    def _inherited(self, saved_by: int) -> list[int]:
        return list(range(self._comm.rank, saved_by, self._comm.size))
