"""sparcel in frameworks: Lightning, the Trainer of transformers, and Accelerate.

`sparcel.integrations.lightning` and `sparcel.integrations.transformers` need their frameworks, so
they are imported by name. Accelerate needs one object, which is here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import sparcel
from sparcel.errors import InputError, warn

if TYPE_CHECKING:
    from torch import Tensor

    from sparcel.core.training import Handle

__all__ = ["FullState"]


class FullState:
    """What a framework saves on rank 0 alone, of what all ranks remember.

    ``accelerator.register_for_checkpointing`` saves rank 0's ``state_dict()`` and loads it on all
    ranks. Of the handle itself that would be rank 0's memory alone.

    Parameters
    ----------
    handle
        What `sparcel.attach` returned.
    """

    def __init__(self, handle: Handle) -> None:
        self.handle = handle

    def state_dict(self) -> dict[str, Tensor]:
        """Return on rank 0 what all ranks remember, and nothing elsewhere; all ranks call."""
        return self.handle.full_state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Go on from such a state; all ranks call, each with the state whole."""
        self.handle.load_state_dict(state_dict)


def attach_wrapped(
    model: Any, copies: int, way_out: str, arguments: Mapping[str, Any]
) -> Handle | None:
    """Attach to what a framework made of a model, unless there is only one copy of it.

    Parameters
    ----------
    way_out
        How the framework is told to use DDP.
    arguments
        Those of `sparcel.attach`, with ``replicate`` for a model of fully_shard.

    Raises
    ------
    InputError
        If several processes train a model that is in neither.

    Warns
    -----
    SparcelWarning
        If there is only one copy: None is returned.
    """
    from torch.nn.parallel import DistributedDataParallel

    if copies == 1:
        warn("there is one copy of the model, so sparcel has nothing to exchange, and does nothing")
        return None
    # Compiled at its first call, so the DDP object inside can still be changed.
    model = getattr(model, "_orig_mod", model)
    if "replicate" in arguments or isinstance(model, DistributedDataParallel):
        return sparcel.attach(model, **arguments)
    raise InputError(
        f"sparcel exchanges the gradients of a DistributedDataParallel, and {copies} processes"
        f" train a {type(model).__name__}; {way_out}"
    )


def load_or_warn(handle: Handle, state: Mapping[str, Tensor], checkpoint: object) -> None:
    """Load what a checkpoint holds; warn if that is nothing."""
    if state:
        handle.load_state_dict(state)
    else:
        warn(f"{checkpoint} holds no memory of sparcel, which starts empty")
