"""A training's schedule, written down once: schemes, rates, resolutions and batches by phases.

Three things change how much is sent in the course of a training. A scheme has a ``warmup``, a list
of densities for its first steps. Without one, the averager front-loads: it asks the scheme for more
in the first steps (`sparcel.schemes.front_loaded`). And `Handle.switch` changes the scheme itself,
by hand or by a `Schedule`. All three count the steps of the training, not those of a phase.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from fractions import Fraction
from itertools import accumulate, pairwise
from weakref import WeakSet

from torch import Tensor
from torch.optim import Optimizer

from sparcel.core._checks import check_type, checked_number, checked_whole
from sparcel.core.schemes import Scheme, chosen_scheme
from sparcel.core.training.handle import Handle, check_switch
from sparcel.errors import InputError

_HEAD = ("from", "to", "scheme", "lr", "resolution", "batch size")

Rate = float | tuple[float, float] | Callable[[float], float]
"""A rule for the learning rate: the rate, its first and last value, or a function of progress."""


@dataclass(frozen=True)
class Phase:
    """A part of a training with one scheme, resolution and batch size, and one rule for the rate.

    Parameters
    ----------
    length
        How long it lasts, more than 0, in the unit that the training counts in: epochs or steps.
    scheme
        A name that `sparcel.scheme` knows, or a scheme that it made.
    lr
        The learning rate: a number; a pair, from the first to the second in equal steps; or a
        function of the progress in [0, 1) of the phase.
    resolution, batch_size
        For the loader, which may ignore them: the side of the images in pixels, and the samples of
        a step on one rank. None if the schedule does not say.

    Raises
    ------
    InputError
        For a length, rate, resolution or batch size out of range, or an unknown scheme.
    """

    length: float
    scheme: Scheme | str
    _: KW_ONLY
    lr: Rate
    resolution: int | None = None
    batch_size: int | None = None

    def __post_init__(self) -> None:
        # An infinite length or rate has no limit of its own to break.
        length = checked_number(self.length, "length", above=0, below=math.inf)
        object.__setattr__(self, "length", int(length) if length.is_integer() else length)
        object.__setattr__(self, "scheme", chosen_scheme(self.scheme, {}))
        if isinstance(self.lr, tuple | list):
            if len(self.lr) != 2:
                raise InputError(
                    f"a pair of rates is the first and the last of the phase, got {self.lr}"
                )
            object.__setattr__(self, "lr", tuple(_checked_rate(one, "lr") for one in self.lr))
        elif not callable(self.lr):
            object.__setattr__(self, "lr", _checked_rate(self.lr, "lr"))
        for name in ("resolution", "batch_size"):
            if (size := getattr(self, name)) is not None:
                object.__setattr__(self, name, checked_whole(size, name, at_least=1))

    @property
    def rule(self) -> str:
        """The rule for the learning rate as a text."""
        if isinstance(self.lr, tuple):
            return f"{self.lr[0]:g} to {self.lr[1]:g}"
        return getattr(self.lr, "__name__", "a function") if callable(self.lr) else f"{self.lr:g}"

    def rate(self, progress: float) -> float:
        """Return the learning rate at a progress in [0, 1)."""
        if callable(self.lr):
            return _checked_rate(self.lr(progress), f"lr({progress:g})")
        if isinstance(self.lr, tuple):
            first, last = self.lr
            return first + (last - first) * progress
        return self.lr


class Schedule:
    """The phases of a training, one after the other.

    Parameters
    ----------
    phases
        At least one `Phase`. Their schemes correct the same momentum, if any.
    length
        How long they should last together, if that is to be checked.

    Raises
    ------
    InputError
        When there are no phases, one is no `Phase`, their schemes correct different momentums, or
        their lengths add up to something else than ``length``.

    Examples
    --------
    The 28 epochs of CommLib's record on 16 nodes (section 5.6): sparse while images are small and
    steps short, dense later. Its rates are not in the paper; these are made up.

    >>> import sparcel
    >>> sparse = sparcel.scheme("hitopk", density=0.01, selector="mstopk")
    >>> schedule = sparcel.Schedule(
    ...     sparcel.Phase(13, sparse, lr=(0.4, 1.7), resolution=96, batch_size=256),
    ...     sparcel.Phase(11, "torus2d", lr=(1.7, 0.3), resolution=128, batch_size=256),
    ...     sparcel.Phase(3, "torus2d", lr=(0.3, 0.05), resolution=224, batch_size=256),
    ...     sparcel.Phase(1, "torus2d", lr=0.02, resolution=288, batch_size=128),
    ...     length=28,
    ... )
    >>> schedule.length, schedule.at(12.5).resolution, schedule.lr(27)
    (28, 96, 0.02)
    """

    def __init__(self, *phases: Phase, length: float | None = None) -> None:
        if not phases:
            raise InputError("a schedule needs a phase: Schedule(Phase(length, scheme, lr=...))")
        for place, phase in enumerate(phases):
            check_type(phase, Phase, f"phase {place}")
            check_switch(_scheme_of(phases[0]), _scheme_of(phase))
        self.phases = phases
        """The phases, in order."""
        lengths = (_exact(phase.length) for phase in phases)
        self._starts = [_plain(start) for start in accumulate(lengths, initial=Fraction(0))]
        """Where the phases start, and where the last one ends."""
        self._prepared: WeakSet[Handle] = WeakSet()
        """The handles that can have the schemes of all phases."""
        if length is not None and checked_number(length, "length") != self.length:
            raise InputError(
                f"the phases last {self.length:.15g} together, not length={length}; correct their"
                f" lengths, {[phase.length for phase in phases]}, or leave out length"
            )

    @property
    def length(self) -> float:
        """How long all phases last together, an int if that is a whole number."""
        return self._starts[-1]

    def at(self, t: float) -> Phase:
        """Return the phase at a time in [0, length), such as an epoch's number with a fraction.

        Raises
        ------
        InputError
            For another time.
        """
        return self._phase_at(t)[0]

    def lr(self, t: float) -> float:
        """Return the learning rate at a time; see `at`."""
        phase, progress = self._phase_at(t)
        return phase.rate(progress)

    def apply(self, t: float, handle: Handle, *optimizers: Optimizer) -> Phase:
        """Prepare the step at a time: switch the scheme, and set the learning rates.

        Call it before each step, on all ranks. If the phase has another scheme than the handle,
        the handle is switched, see `Handle.switch`. Groups of parameters keep their ratios to the
        rate that their optimiser was made with: a group's ``initial_lr``, or else its rate, when a
        schedule is first applied, over the optimiser's default. They become the groups'
        ``lr_ratio``, a part of the optimiser's state.

        Returns
        -------
        Phase
            The phase, whose resolution and batch size are for the loader.

        Raises
        ------
        InputError
            For a time outside of the schedule, a rate that is not finite or negative, an optimiser
            that was made with the rate 0, and as `Handle.switch` raises; the first call also for
            the schemes of later phases.
        """
        check_type(handle, Handle, "handle", "sparcel.attach returns one")
        phase, progress = self._phase_at(t)
        rate = phase.rate(progress)
        for optimizer in optimizers:
            _check_base_rate(optimizer)
        if handle not in self._prepared:
            handle.prepare(*map(_scheme_of, self.phases))
            self._prepared.add(handle)
        scheme = _scheme_of(phase)
        if repr(scheme) != repr(handle.scheme):
            handle.switch(scheme)
        for optimizer in optimizers:
            _set_rates(optimizer, rate)
        return phase

    def __repr__(self) -> str:
        rows: list[tuple[str, ...]] = [_HEAD]
        for phase, (start, stop) in zip(self.phases, pairwise(self._starts), strict=True):
            sizes = (str(size or "") for size in (phase.resolution, phase.batch_size))
            rows.append((f"{start:g}", f"{stop:g}", str(phase.scheme), phase.rule, *sizes))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = (
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        )
        return "\n".join(["Schedule", *lines])

    def _phase_at(self, t: float) -> tuple[Phase, float]:
        """Return the phase at a time, and how much of it is over, in [0, 1)."""
        hint = "the schedule is over" if t == self.length else ""
        checked_number(t, "t", at_least=0, below=self.length, hint=hint)
        place = bisect_right(self._starts, t) - 1
        start, stop = self._starts[place : place + 2]
        # A quotient of rounded numbers may round to 1.
        return self.phases[place], min((t - start) / (stop - start), math.nextafter(1, 0))


def _scheme_of(phase: Phase) -> Scheme:
    assert isinstance(phase.scheme, Scheme), "__post_init__ made one"
    return phase.scheme


def _check_base_rate(optimizer: Optimizer) -> None:
    """Raise `InputError` if the groups of an optimiser have no ratios to its rate."""
    check_type(optimizer, Optimizer, "an optimizer")
    if not float(optimizer.defaults.get("lr", 0)) > 0:
        raise InputError(
            f"{type(optimizer).__name__} was made with lr={optimizer.defaults.get('lr')!r}; make it"
            " with a rate above 0, by which the schedule knows the ratios of its groups"
        )


def _set_rates(optimizer: Optimizer, rate: float) -> None:
    """Set the rate of each group, whose ratio to the optimiser's is a part of the group."""
    made_with = optimizer.defaults["lr"]
    for group in optimizer.param_groups:
        if "lr_ratio" not in group:  # torch's schedulers keep what a group began with
            group["lr_ratio"] = float(group.get("initial_lr", group["lr"])) / float(made_with)
    taken = [made_with]
    for group in optimizer.param_groups:
        lr, scaled = group["lr"], rate * group["lr_ratio"]
        if not isinstance(lr, Tensor):
            group["lr"] = scaled
            continue
        if any(lr is other for other in taken):  # torch gives one tensor to all groups
            group["lr"] = lr = lr.clone()
        taken.append(lr.fill_(scaled))


def _exact(length: float) -> Fraction:
    """Return the number that a float is meant to be, so that 0.2 five times is 1."""
    simple = Fraction(length).limit_denominator(10**6)
    return simple if float(simple) == length else Fraction(length)


def _plain(total: Fraction) -> float:
    return int(total) if total.denominator == 1 else float(total)


def _checked_rate(value: object, name: str) -> float:
    return checked_number(value, name, at_least=0, below=math.inf)
