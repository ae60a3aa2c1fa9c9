"""The settings of a training, checked, and the rules for the size of steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sparcel.core._checks import checked_flag, checked_number, checked_whole
from sparcel.core.collectives import ALGORITHMS
from sparcel.core.formats import FewBits
from sparcel.core.formats.indices import INDEX_CODES
from sparcel.core.schemes.density import checked_density
from sparcel.errors import InputError, checked_name
from sparcel.products.linear.batches import MOST_ROWS
from sparcel.products.linear.parameters import LOSSES, SOLVERS, Parameters, Rule

RULES: dict[str, Callable[[float], float]] = {
    "adagrad": lambda _: 1.0,
    "constant": lambda _: 1.0,
    "inverse": lambda epochs: 1 / (1 + epochs),
    "inverse_sqrt": lambda epochs: 1 / (1 + epochs) ** 0.5,
    "bold_driver": lambda _: 1.0,
}
"""What a rule makes of the first step's size, by the epochs done."""

_GROWTH, _CUT = 1.05, 0.5


class StepSizes:
    """The sizes of the steps of one training.

    Parameters
    ----------
    rule
        One of `RULES`, which multiply ``eta0``, or a function from the epochs done to the size.
        ``"adagrad"`` also divides each coordinate's step by the root of its squared gradients so
        far; ``"bold_driver"`` changes the size by 1.05 after an epoch whose loss was lower than
        that of the epoch before, and by 0.5 otherwise.
    eta0
        The first step's size. A function gives sizes itself, and does not use it.

    Raises
    ------
    InputError
        When there is no rule of that name.
    """

    def __init__(self, rule: Rule, eta0: float) -> None:
        self.adaptive = rule == "adagrad"
        self._is_bold = rule == "bold_driver"
        self._rule = rule if callable(rule) else RULES[checked_name(rule, RULES, "step")]
        self._given = callable(rule)
        self.size, self.last_loss = eta0, float("inf")

    def at(self, epochs: float) -> float:
        """Return the size of a step after so many epochs."""
        size = self._rule(epochs) * (1 if self._given else self.size)
        if not 0 <= size < float("inf"):
            raise InputError(f"a step's size must be finite and not negative, got {size}")
        return size

    def epoch_ended(self, loss: float) -> None:
        """Take note of an epoch's mean loss."""
        if self._is_bold:
            self.size *= _GROWTH if loss < self.last_loss else _CUT
        self.last_loss = loss


_BITS = (8, 4)
_BLOCK = 64
"""Values that share a scale. Columns are as different as their frequencies, so a scale for few is
worth its half a bit a value."""

SHARDED = "sharded"
"""The name of what `Sharded` does, beside those of the algorithms of `sparcel.all_reduce`."""


@dataclass(kw_only=True)
class Settings(Parameters):
    """How a model is trained, and what it minimises: the mean ``loss`` of the rows."""

    loss: str = LOSSES[0]

    def __post_init__(self) -> None:
        checked_name(self.loss, LOSSES, "loss")
        checked_name(self.solver, SOLVERS, "solver")
        checked_number(self.l1, "l1", at_least=0)
        checked_number(self.l2, "l2", at_least=0)
        checked_whole(self.epochs, "epochs", at_least=1)
        if self.tol is not None:
            checked_number(self.tol, "tol", at_least=0)
        checked_whole(self.batch_size, "batch_size", at_least=1, at_most=MOST_ROWS)
        StepSizes(self.step, checked_number(self.eta0, "eta0", above=0))
        checked_whole(self.block, "block", at_least=1)
        for name in ("average", "fit_intercept", "asynchronous"):
            checked_flag(getattr(self, name), name)
        if self.solver == "sgd" and self.average and self.l1 > 0:
            raise InputError(
                f"average=True goes with l1=0, got {self.l1}: the average of models is not sparse;"
                " leave one of them out"
            )
        checked_name(self.algorithm, (SHARDED, "auto", *ALGORITHMS), "algorithm")
        checked_name(self.format, INDEX_CODES, "format")
        checked_whole(self.random_state, "random_state", at_least=0)
        if self.solver == "scd":
            self._check_descent()
        if self.density is not None:
            checked_density(self.density)
            self._goes_with("density", "auto", *ALGORITHMS.keys() - {"dense"})
        if self.bits is not None:
            if self.bits not in _BITS:
                raise InputError(f"bits must be 8, 4 or None for all, got {self.bits!r}")
            self._goes_with("bits", SHARDED, "auto", "split_allgather")

    def _check_descent(self) -> None:
        if self.loss == "hinge":
            raise InputError(
                "coordinate descent needs a loss with a derivative everywhere, which 'hinge' is"
                " not; take 'squared_hinge', or solver='sgd'"
            )
        if (self.density, self.bits) != (None, None):
            raise InputError(
                f"density={self.density} and bits={self.bits} go with solver='sgd', got 'scd',"
                " which exchanges without loss; leave them out"
            )

    def _goes_with(self, name: str, *algorithms: str) -> None:
        """Refuse an algorithm that has no use for a setting."""
        if self.algorithm not in algorithms:
            raise InputError(
                f"{name}={getattr(self, name)} goes with algorithm="
                f"{' or '.join(map(repr, sorted(algorithms)))}, got {self.algorithm!r};"
                f" choose one of these, or leave out {name}"
            )

    def rounding(self) -> FewBits | None:
        """Return what rounds the values of gradients; None where they travel as they are."""
        if self.bits is None:
            return None
        return FewBits(self.bits, _BLOCK, "float32", stochastic=True, seed=self.random_state)

    def described(self) -> str:
        """Return a text that is the same for the same settings, in any process."""
        step = getattr(self.step, "__qualname__", self.step)
        if callable(self.step):
            step = f"{step}, at first {self.step(0.0)}"
        return ", ".join(f"{name}={value}" for name, value in {**vars(self), "step": step}.items())
