"""Rules for the size of steps."""

from __future__ import annotations

from collections.abc import Callable

from sparcel.errors import InputError, checked_name
from sparcel.linear.parameters import Rule

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
