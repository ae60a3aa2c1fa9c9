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
    from torch.distributed.device_mesh import DeviceMesh

    from sparcel.training import Handle


@contextmanager
def needs(package: str) -> Iterator[None]:
    """Turn a failed import in the block into an error that says what to install."""
    try:
        yield
    except ModuleNotFoundError as missing:
        raise MissingDependencyError(
            f"sparcel.integrations.{package} needs {package}: pip install {package}",
            name=missing.name,
        ) from missing


def attach_wrapped(
    model: Any, replicate: DeviceMesh | int, way_out: str, arguments: Mapping[str, Any]
) -> Handle | None:
    """Attach to what a framework made of a model, unless there is only one of it.

    Parameters
    ----------
    replicate
        The ranks that hold the same shard of a model of fully_shard; or how many processes train
        the whole model.
    way_out
        How the framework is told to use DDP.
    arguments
        Those of `sparcel.attach`.

    Raises
    ------
    InputError
        If several processes train a model that is not in DDP.

    Warns
    -----
    SparcelWarning
        If there is only one model: None is returned.
    """
    replicas = replicate if isinstance(replicate, int) else replicate.size()
    if replicas == 1:
        warn("there is one copy of the model, so sparcel has nothing to exchange, and does nothing")
        return None
    if not isinstance(replicate, int):
        return sparcel.attach(model, replicate=replicate, **arguments)
    # Compiled at its first call, so the DDP object inside can still be changed.
    model = getattr(model, "_orig_mod", model)
    if isinstance(model, DistributedDataParallel):
        return sparcel.attach(model, **arguments)
    raise InputError(
        f"sparcel exchanges the gradients of a DistributedDataParallel, and {replicas} processes"
        f" train a {type(model).__name__}; {way_out}"
    )


def go_on(handle: Handle, state: Mapping[str, Tensor], checkpoint: object) -> None:
    """Load what a checkpoint holds; warn if that is nothing."""
    if state:
        handle.load_state_dict(state)
    else:
        warn(f"{checkpoint} holds no memory of sparcel, which starts empty")
