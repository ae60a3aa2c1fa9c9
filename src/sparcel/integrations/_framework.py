"""What the integrations share: a framework that must be there, and the model that it wrapped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch.nn.parallel import DistributedDataParallel

import sparcel
from sparcel.errors import InputError, MissingDependencyError, warn

if TYPE_CHECKING:
    from torch import Tensor

    from sparcel.core.training import Handle


@contextmanager
def needs(package: str) -> Iterator[None]:
    """Turn a failed import in the block into an error that says what to install."""
    try:
        yield
    except ModuleNotFoundError as missing:
        raise MissingDependencyError(
            f"sparcel.integrations.{package} needs {package}: install it as its project says",
            name=missing.name,
        ) from missing


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
