"""Outer steps: islands train alone, and exchange what their parameters have moved now and then."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal, TypeAlias, cast
from uuid import uuid4

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from sparcel.core._checks import check_type, checked_number, checked_whole
from sparcel.core.comm import Group, digest, ranks_with_other
from sparcel.core.schemes import Scheme
from sparcel.core.training import Averager
from sparcel.core.training.driver import check_updates, checked_optimizers, warn_if_alone
from sparcel.errors import InputError, MismatchError, checked_name, warn
from sparcel.products.outer.driver import Outer
from sparcel.products.outer.exchange import Exchange, Poison, entry
from sparcel.products.outer.island import FollowingRank, Ranks
from sparcel.products.outer.islands import Elastic, Fixed
from sparcel.products.outer.method import (
    Method,
    Pace,
    chosen_method,
    diloco,
    muloco,
    sparseloco,
    streaming,
)
from sparcel.products.outer.model import Model, unwrapped
from sparcel.products.outer.places import meeting_at
from sparcel.products.outer.protocol import Protocol
from sparcel.products.outer.shared import Shared
from sparcel.products.stores import Store

__all__ = ["Method", "Outer", "attach", "diloco", "muloco", "sparseloco", "streaming"]

Place: TypeAlias = "Group | DeviceMesh | Store | str | os.PathLike[str]"
"""Where islands meet: see `attach`."""


def attach(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    method: Method | Scheme | str | None = None,
    *,
    every: int | str = 30,
    islands: Place = None,
    buffers: Literal["average", "local"] = "average",
    poison: Poison = "leave out",
    least: int = 2,
    patience: float = 60.0,
) -> Outer | FollowingRank:
    """Let islands exchange what their parameters have moved, every so many inner steps.

    The training loop stays as it is: each island trains alone, and the outer step is taken at the
    end of the inner optimiser's step in which it is due.

    Parameters
    ----------
    model
        A model, the same on all islands when the run begins. It may be wrapped in DDP over the
        ranks of the island, or be HSDP: the first of those that hold the same exchanges for them.
        It may be sharded, by ``fully_shard`` or tensor parallelism: each rank exchanges its shards
        with the ranks of other islands that hold the same ones.
    optimizer
        The inner optimiser; several in the order of their steps, such as Muon and AdamW.
    method
        A `Method`, the name of one (``"diloco"``, ``"streaming"``, ``"sparseloco"``,
        ``"muloco"``), or a scheme that averages pseudo-gradients. By default what is recommended.
    every
        After how many inner steps each parameter is exchanged. Or after how many seconds, such as
        ``"60s"``, for islands of unequal speed: see `Outer.count`, too.
    islands
        Where they meet. A group of ranks that hold the same, one of each island, which take part in
        every step: a process group, a mesh of one dimension, a sparcel communicator, an MPI
        communicator, or None for the default group.
        ``"tcp://HOST:PORT"``, where ``sparcel meet`` runs: they come and go, and exchange over
        links. Or a folder, a URL such as ``"s3://bucket/run"``, or a store of `sparcel.delta`: they
        come and go, and exchange by way of files.
    buffers
        Whether buffers of floats that any island has changed, such as BatchNorm's, become their
        averages, or stay local. Masks and the vectors of spectral norms stay local.
    poison
        What becomes of a step in which an island's pseudo-gradient holds NaN or Inf: the others go
        on without it, or it is void. That island goes on from what is shared.
    least
        How many islands begin a run, where they come and go.
    patience
        Seconds for which an island is waited for, where they come and go: at a meeting, and in an
        exchange. Three fifths as long, some 15 at most, if it gives no sign of life: at a meeting,
        and in an exchange by way of files.

    Raises
    ------
    InputError
        For an unknown method, a model that cannot be exchanged, an optimiser of other parameters,
        ``every`` or ``overlap`` out of range, or a place where nobody can meet. At an outer step,
        when the parameters to train are others than they were.
    MismatchError
        When islands have other settings, or begin with other parameters.
    CommunicationError
        When the others cannot be reached.

    Warns
    -----
    SparcelWarning
        For a schedule-free optimiser, whose own parameters are not shared.
    """
    chosen = chosen_method(method)
    checked_name(poison, ("leave out", "void"), "poison")
    watched = _watched(model, optimizer, buffers)
    least = checked_whole(least, "least", 1)
    patience = checked_number(patience, "patience", above=0)
    ranks = Ranks(model, watched)
    if islands is None and ranks.several:
        raise InputError(
            "the ranks that train this model together are one island; say where islands meet:"
            ' islands=mesh["replicate"], or a place'
        )
    shared = Shared(watched, replace(chosen, momentum=0.0) if ranks.follows else chosen)
    if ranks.follows:
        return FollowingRank(ranks, shared)
    settings = {"every": every, "method": chosen, "buffers": buffers, "poison": poison}
    try:
        pace = Pace(every, len(shared.fragments), chosen.overlap)
        ranks.connect(shared)
        joined = _islands_at(islands, patience, settings, shared, least, ranks)
        averager = _averager(chosen, shared, islands if joined is None else joined.comm, ranks)
        if joined is None:
            _check_group(settings, averager)
        place = joined or Fixed(averager.comm, ranks)
        outer = Outer(Exchange(shared, averager, place, chosen, poison, ranks), pace, ranks)
    except BaseException:
        ranks.fail()
        raise
    outer.start(unwrapped(model)[-1])
    return outer


def _watched(model: nn.Module, optimizer: Optimizer | Sequence[Optimizer], buffers: str) -> Model:
    """Return what islands share of a model, and of the optimisers that train it, if they can."""
    optimizers = checked_optimizers(optimizer)
    if not optimizers:
        raise InputError("optimizer must be one, or several, got none")
    checked_name(buffers, ("average", "local"), "buffers")
    check_type(model, nn.Module, "model")
    if any(hasattr(one, "train") and hasattr(one, "eval") for one in optimizers):
        warn(
            "the inner optimiser is schedule-free: it keeps parameters of its own, which islands do"
            " not share, so what it brings by eval() differs between islands; evaluate outer.shared"
        )
    watched = Model(model, buffers == "average", optimizers)
    for one in optimizers:
        check_updates(one, model.parameters())
    return watched


def _averager(method: Method, shared: Shared, group: object, ranks: Ranks) -> Averager:
    """Return what averages all that is shared, and second moments."""
    tensors = shared.by_name()
    trained, buffers = shared.model.parameters, shared.model.buffers
    moments = {entry(name): tensors[name] for name in trained if method.moments}
    return Averager(
        tensors | moments,
        method.scheme,
        group=group.get_group() if isinstance(group, DeviceMesh) else cast("Group", group),
        policy=lambda name, _: name in buffers or name in moments,
        frontload=False,
        shard=ranks.shard,
    )


def _islands_at(
    place: object,
    patience: float,
    settings: Mapping[str, object],
    shared: Shared,
    least: int,
    ranks: Ranks,
) -> Elastic | None:
    """Return the islands that come and go at a place, or None if it is a group."""
    if (meeting := meeting_at(place, patience)) is None:
        return None
    lines = [f"{name} {list(one.shape)}" for name, one in shared.by_name().items()]
    if ranks.size > 1:
        lines.append(f"ranks of an island: {ranks.size}")
    layout = "\n".join(lines)
    facts = {name: f"{value}" for name, value in settings.items()}
    narrow = torch.backends.cpu.get_cpu_capability() == "DEFAULT"
    facts["rounding of the processor"] = "narrow" if narrow else "wide"
    facts["layout"] = f"{digest(layout, 128):032x}"
    protocol = Protocol(f"{uuid4().int >> 65}", facts, layout, least, patience)
    return Elastic(meeting, protocol, shared, ranks)


def _check_group(settings: Mapping[str, object], averager: Averager) -> None:
    """Raise `MismatchError` if the ranks of a group have other settings; warn if there is one."""
    comm = averager.comm
    if others := ranks_with_other(repr(settings), comm):
        averager.handle.close()
        raise MismatchError(
            f"ranks {others} have other settings than rank {comm.rank}, which has {settings}; give"
            " all islands the same"
        )
    warn_if_alone(comm.size, averager.handle.sparse)
