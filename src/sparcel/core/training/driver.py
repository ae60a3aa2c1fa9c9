"""What drivers of wrappers share: names, what `attach` asks of them, how they watch optimisers."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from functools import cache
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from sparcel.core._checks import check_type
from sparcel.core.comm import Group, size_of
from sparcel.core.training.ahead import Ahead
from sparcel.core.training.averager import Averager
from sparcel.core.training.ranks import Shard
from sparcel.errors import InputError, shown, warn_on_rank_0

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
"""What `torch.compile`, torch's wrapper for activation checkpoints and its first FSDP put into
names."""

_PREFIX = "module."
"""What DDP and DataParallel begin all names with."""


def model_name(name: str) -> str:
    """Return the name that a parameter has in the model before parts of it are wrapped."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def model_names(names: Iterable[str], known: Set[str] | None = frozenset()) -> dict[str, str]:
    """Return for each name of a model's tensors the one before the model or parts are wrapped.

    ``module.`` is taken off where all names begin with it. So the names of a model that has one
    child of this name lose it, too, which hurts nobody who takes wrappers off on both sides.

    Parameters
    ----------
    names
        Of the model's tensors.
    known
        The other side's names, which may be of more tensors: ``module.`` stays if it is in a name
        that both sides have. None if it stays anyway.

    Raises
    ------
    InputError
        If several names become one.
    """
    plain = {name: model_name(name) for name in names}
    while (
        plain
        and known is not None
        and known.isdisjoint(plain.values())
        and all(name.startswith(_PREFIX) for name in plain.values())
    ):
        plain = {name: found.removeprefix(_PREFIX) for name, found in plain.items()}
    own: dict[str, str] = {}
    for name, found in plain.items():
        if (other := own.setdefault(found, name)) != name:
            raise InputError(
                f"'{shown(other)}' and '{shown(name)}' are both '{shown(found)}' without what"
                " wrappers put into names; leave one of them out"
            )
    return plain


def model_patterns(densities: Mapping[str, float], names: Collection[str]) -> dict[str, float]:
    """Return densities by patterns of the names in the model.

    Patterns may also be of the names in the wrapped model, which DDP begins with ``module.``.
    """
    prefix = "" if any(name.startswith(_PREFIX) for name in names) else _PREFIX
    return {
        model_name(pattern).removeprefix(prefix): density for pattern, density in densities.items()
    }


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


def check_group(group: Group, ranks: int) -> None:
    """Raise `InputError` unless a group is of as many ranks as train the model."""
    if (given := size_of(group)) != ranks:
        raise InputError(
            f"the model is on {ranks} ranks, group has {given}; give the group of all of them, or"
            " none"
        )


def checked_optimizers(given: Optimizer | Sequence[Optimizer] | None) -> list[Optimizer]:
    """Return optimisers, of which one, several or none are given; raise `InputError` for others."""
    several = [] if given is None else given
    optimizers = list(several) if isinstance(several, Sequence) else [several]
    for one in optimizers:
        check_type(one, Optimizer, "optimizer")
    return [_with_hooks(one) for one in optimizers]


def _with_hooks(optimizer: Optimizer) -> Optimizer:
    """Return an optimiser, or the one inside of it that does its steps.

    Some that wrap another, as Accelerate's, are Optimizers without what the class would set up.
    """
    while "_optimizer_step_post_hooks" not in vars(optimizer):
        inside = [one for one in vars(optimizer).values() if isinstance(one, Optimizer)]
        if len(inside) != 1:
            raise InputError(
                f"{type(optimizer).__name__} takes no hooks, which torch.optim.Optimizer.__init__"
                " sets up; give the optimiser that it wraps"
            )
        optimizer = inside[0]
    return optimizer


def check_updates(optimizer: Optimizer, tensors: Iterable[Tensor]) -> None:
    """Raise an `InputError` if an optimiser updates none of a model's parameters."""
    ids = {id(one) for one in tensors}
    if not any(id(one) in ids for group in optimizer.param_groups for one in group["params"]):
        raise InputError(
            "optimizer updates none of the model's parameters; pass the one that does, and make it"
            " after fully_shard, which replaces parameters"
        )


def warn_if_alone(ranks: int, sparse: Collection[str]) -> None:
    """Warn if only one rank averages the tensors, some of which are made sparse."""
    if ranks == 1 and sparse:
        warn_on_rank_0(
            "there is only one replica: nothing is exchanged, but a part of the gradients is kept"
            " back; attach only where there are several replicas"
        )


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


class _Watcher(ABC):
    """Is told of the steps of all optimisers, as long as something else holds it."""

    def __init__(self) -> None:
        _watch_optimizers()
        _WATCHERS.add(self)

    @abstractmethod
    def before_step(self, optimizer: Optimizer) -> None:
        """Learn that an optimiser is about to do a step."""

    def end(self) -> None:
        """Look at no more steps."""
        _WATCHERS.discard(self)


_WATCHERS: weakref.WeakSet[_Watcher] = weakref.WeakSet()


@cache
def _watch_optimizers() -> None:
    """Tell all watchers of the steps of all optimisers, by one hook that stays."""

    def before_any_step(optimizer: Optimizer, *_: object) -> None:
        for watcher in tuple(_WATCHERS):
            watcher.before_step(optimizer)

    register_optimizer_step_pre_hook(before_any_step)


class Follower(_Watcher):
    """Lets step-ahead follow the optimisers that do steps, and those that it is told of.

    Parameters
    ----------
    ahead
        What moves the parameters.
    before_step
        Called before each step of any optimiser.
    """

    def __init__(
        self, ahead: Ahead, before_step: Callable[[Optimizer], None] | None = None
    ) -> None:
        self._ahead, self._before_step = ahead, before_step
        self._groups: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        """How many groups the optimisers have that are followed."""
        super().__init__()

    def follow(self, optimizer: Optimizer) -> None:
        """Move the parameters of this optimiser by its rule, as those that have done a step."""
        self._groups[optimizer] = len(optimizer.param_groups)
        self._ahead.follow(optimizer)

    def before_step(self, optimizer: Optimizer) -> None:
        """Follow an optimiser that is new or has new groups."""
        if self._groups.get(optimizer) != len(optimizer.param_groups):
            self.follow(optimizer)
        if self._before_step is not None:
            self._before_step(optimizer)


class Unaveraged(_Watcher):
    """Refuses a step of an optimiser that would let ranks drift apart.

    What averages gradients looks at a model once. It says nothing of a parameter that is added to
    the model later.

    Parameters
    ----------
    model
        The model, which is not kept alive.
    averaged
        Returns the ids of the parameters that are averaged, or were there to be.
    ignored
        The names in the model of the parameters that are the user's business.
    why, way_out
        Why nobody averages a parameter, and what to do before its memory is loaded.
    """

    def __init__(
        self,
        model: nn.Module,
        averaged: Callable[[], Collection[int]],
        ignored: Collection[str],
        why: str,
        way_out: str,
    ) -> None:
        self._model = weakref.ref(model)
        self._averaged, self._ignored = averaged, ignored
        self._why, self._way_out = why, way_out
        super().__init__()

    def before_step(self, optimizer: Optimizer) -> None:
        """Raise `InputError` if the optimiser is about to update such a parameter."""
        averaged, model = self._averaged(), self._model()
        others = {
            id(parameter)
            for group in optimizer.param_groups
            for parameter in group["params"]
            if id(parameter) not in averaged
            and parameter.requires_grad
            and parameter.grad is not None
        }
        if not others or model is None:
            return
        for key, parameter in model.named_parameters():
            if id(parameter) in others and (name := model_name(key)) not in self._ignored:
                raise InputError(
                    f"{name!r} {self._why}, and now {type(optimizer).__name__} updates it with a"
                    f" gradient that nobody averages; {self._way_out}, and load the old handle's"
                    " state_dict(), with strict=False"
                )
