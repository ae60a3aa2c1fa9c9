"""What the user's optimiser must not do to updates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from sparcel.errors import InputError, warn_on_rank_0


def check_momentum(
    optimizers: Sequence[Optimizer], momentum: float, sparse: Mapping[str, Tensor]
) -> None:
    """Raise `InputError` if an optimiser, too, has momentum for parameters that are made sparse.

    Also if all are those of other parameters. Warns if none is known.

    Parameters
    ----------
    momentum
        The momentum that the scheme corrects.
    sparse
        The parameters that are made sparse, by name.
    """
    twice = f'the scheme has momentum={momentum:g} ("dgc" has 0.9 unless another is given)'
    if not optimizers:
        warn_on_rank_0(
            f"{twice}, so the optimiser must have none for the parameters in handle.sparse; pass"
            " optimizer= to have that checked"
        )
        return
    names = {id(parameter): name for name, parameter in sparse.items()}
    groups = [(one, group) for one in optimizers for group in one.param_groups]
    updated = {id(one) for _, group in groups for one in group["params"]}
    if updated.isdisjoint(names):
        raise InputError(
            f"optimizer updates none of the {len(names)} parameters that are made sparse; pass the"
            " one that does"
        )
    for optimizer, group in groups:
        found = [names[id(one)] for one in group["params"] if id(one) in names]
        if found and (theirs := _momentum_of(group)):
            raise InputError(
                f"{twice}, and {type(optimizer).__name__} has {theirs} for {len(found)} of the"
                f" parameters that are made sparse, such as {found[0]!r}; give these a group"
                " without momentum (sparcel.training.stays_dense tells the others), or pass"
                " momentum=0 to the scheme"
            )


def _momentum_of(group: Mapping[str, Any]) -> str | None:
    """Return the setting that gives a group of parameters momentum, as SGD and Adam name it."""
    if group.get("momentum"):
        return f"momentum={group['momentum']}"
    if group.get("betas") and group["betas"][0]:
        return f"betas={tuple(group['betas'])}"
    return None
