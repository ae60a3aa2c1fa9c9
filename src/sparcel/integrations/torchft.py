"""torchft: its DiLoCo exchanges pseudo-gradients by a scheme, and replicas come and go."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, ReduceOp, Store, Work

from sparcel.core._checks import FLOAT_DTYPES, check_type, checked_number, checked_whole
from sparcel.core.comm import Communicator, Job, TorchCommunicator, Traffic, carry
from sparcel.core.schemes import Outcome, Request, Scheme
from sparcel.errors import CommunicationError, InputError, optional

with optional("sparcel.integrations.torchft"):
    from torchft.process_group import ProcessGroupGloo


class SparseProcessGroup(ProcessGroupGloo):  # type: ignore[misc]
    """A process group of torchft over which sums of float tensors are steps of a scheme.

    Give it to a Manager, and let it `follow` that Manager. The n-th sum of an outer step is that of
    the same tensor in each step, and has a memory of its own, which takes effect when the Manager
    commits. Whatever else the Manager sends, such as the state of a replica that heals, goes over
    Gloo as it is, and so does everything while one replica is alone.

    - Replicas keep their memories when others leave or join. A replica that joins begins with an
      empty one, and what a replica that left still owed is lost.
    - A replica that does not take part in a step, such as a spare, keeps its memory as it is.
    - If a tensor of any replica holds NaN or Inf, no replica commits the step.

    It is for sums of pseudo-gradients, or of gradients in tensors that stay the same: `LocalSGD`
    averages parameters, of which a scheme would send a part.

    Parameters
    ----------
    scheme
        Such as ``sparcel.scheme("bidirectional", density=0.01)``. Each tensor gets a fresh scheme
        with its settings.
    timeout
        How long connecting, and an exchange, may take.
    decay
        What a memory is multiplied by when a step commits, in [0, 1]: 1 loses nothing, 0 is no
        error feedback.

    Attributes
    ----------
    traffic
        What this replica has sent and received for the scheme so far.
    """

    def __init__(
        self, scheme: Scheme, timeout: timedelta = timedelta(seconds=60), decay: float = 1.0
    ) -> None:
        check_type(scheme, Scheme, "scheme", "sparcel.scheme('topk') makes one")
        super().__init__(timeout)
        self.traffic = Traffic()
        self._scheme, self._decay = scheme, checked_number(decay, "decay", at_least=0, at_most=1)
        self._manager, self._fragments = None, 1
        self._comm: Communicator | None = None
        self._schemes: dict[tuple[int, int], Scheme] = {}
        """What exchanges a tensor, by the number of its fragment and its place in the step."""
        self._begun: list[_Exchange] = []
        """The exchanges of the step that is under way."""

    def follow(self, manager: Any, fragments: int = 1) -> Any:
        """Let memories take effect when a Manager commits; return the Manager.

        Parameters
        ----------
        manager
            The `torchft.Manager` that has this group.
        fragments
            The number of DiLoCo's ``model_fragments``, which take turns.
        """
        self._manager, self._fragments = manager, checked_whole(fragments, "fragments", at_least=1)
        decide = manager.should_commit

        @wraps(decide)
        def should_commit(*arguments: Any, **named: Any) -> bool:
            begun, self._begun = self._begun, []
            for exchange in begun:
                try:
                    exchange.wait()
                except Exception as error:
                    manager.report_error(error)
            commits: bool = decide(*arguments, **named)
            if commits:
                for exchange in begun:
                    exchange.commit()
            return commits

        manager.should_commit = should_commit
        return manager

    def allreduce(self, tensors: list[Tensor], opts: Any) -> Work:
        """Sum a float tensor over the replicas by a step of its scheme; all else over Gloo.

        Raises
        ------
        InputError
            When the group follows no Manager, or the tensor is not that of earlier steps.
        """
        tensor, op = tensors[0].detach(), getattr(opts, "reduceOp", opts)
        if self._comm is None or tensor.dtype not in FLOAT_DTYPES or op != ReduceOp.SUM:
            work: Work = super().allreduce(tensors, opts)
            return work
        manager, place = self._manager, len(self._begun)
        if manager is None:
            raise InputError("the group follows no Manager; call group.follow(manager) before")
        step, fragment = divmod(manager.current_step(), self._fragments)
        scheme = self._schemes.setdefault((fragment, place), self._scheme.fresh())
        vector = tensor.reshape(-1)
        known = vector.numel() if scheme.memory is None else scheme.memory.numel()
        if vector.numel() != known:
            raise InputError(
                f"tensor {place} of the step has {vector.numel()} elements and had {known} before;"
                " give follow(manager, fragments=...) the number of DiLoCo's model_fragments"
            )
        # All replicas know the Manager's step, those that joined, too.
        scheme.steps = step
        # The Manager divides the sum by the number of participants. Others give zeros.
        participants, takes_part = manager.num_participants(), manager.is_participating()
        request = Request(ranks=participants, withheld=[] if takes_part else [(0, known)])
        comm, decay = carry(self._comm, tensor.device), self._decay if takes_part else 1.0

        def exchange() -> Outcome:
            begun = scheme.begin(vector, comm, request, in_place=True)
            (outcome,), _ = request.costs.settle([begun])
            vector.mul_(participants)
            if not tensor.is_contiguous():
                tensor.copy_(vector.view_as(tensor))
            return outcome

        self._begun.append(_Exchange(tensors, scheme, decay, comm.submit(exchange)))
        return self._begun[-1]

    def state_dict(self) -> dict[str, Tensor]:
        """Return copies of this replica's memories, for a checkpoint of its own."""
        return {
            f"{fragment}.{place}.{name}": part.clone()
            for (fragment, place), scheme in self._schemes.items()
            for name, part in scheme.coordinates().items()
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state_dict` returned when the training was at the same step."""
        parts: dict[tuple[int, int], dict[str, Any]] = {}
        for key, part in state.items():
            fragment, place, name = key.split(".")
            parts.setdefault((int(fragment), int(place)), {"steps": 0})[name] = part
        self._schemes = {which: self._scheme.fresh() for which in parts}
        for which, scheme in self._schemes.items():
            scheme.load_state_dict(parts[which])

    def _create_pg(self, store: Store, rank: int, world_size: int) -> Any:
        """Connect the replicas of a new quorum; what a scheme keeps but memory starts anew."""
        self._comm = None  # it disconnects beside, and waits for nobody
        group = super()._create_pg(store, rank, world_size)
        if world_size > 1:
            place, seconds = PrefixStore("sparcel", store), self._timeout.total_seconds()
            self._comm = TorchCommunicator.at(place, rank, world_size, seconds)
            self._comm.traffic = self.traffic
            self.load_state_dict(self.state_dict())
        return group


class _Exchange(Work):
    """The sum of a tensor, whose memory has yet to take effect."""

    def __init__(
        self, tensors: list[Tensor], scheme: Scheme, decay: float, job: Job[Outcome]
    ) -> None:
        super().__init__()
        self._tensors, self._scheme, self._decay, self._job = tensors, scheme, decay, job

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the sum is in place."""
        if not self._job.wait().finite:
            raise CommunicationError("a replica's tensor holds NaN or Inf; the step is void")
        return True

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """Return a future that has the tensors when the sum is in place."""
        return self._job.future.then(lambda _: self._tensors if self.wait() else [])

    def commit(self) -> None:
        """Let the memory take effect."""
        self._scheme.commit(self._job.wait())
        if self._decay != 1:
            for part in self._scheme.coordinates().values():
                part.mul_(self._decay)
