"""What a training has cost on this rank: totals, means, and the last step."""

from __future__ import annotations

from dataclasses import dataclass, field

from sparcel.schemes.costs import Costs

_AMOUNTS = (
    "messages_sent",
    "bytes_sent",
    "bytes_received",
    "dense_bytes",
    "select_seconds",
    "communicate_seconds",
)
_RATIOS = ("compression", "density_before", "density_after")


@dataclass
class Stats(Costs):
    """What the steps since the exchange was made have cost on this rank, and the last of them.

    Attributes
    ----------
    training_steps
        How many steps of the training took effect, those before a checkpoint included.
    void_steps
        How many of ``steps`` had no effect, because some rank's gradient held NaN or Inf.
    last
        What the last step has cost.
    rates
        What ``"auto"`` takes the cluster to be good for: measured, read or assumed.

    The others are those of `Costs`, so that ``bytes_sent / steps`` is the mean of a step.
    """

    training_steps: int = 0
    void_steps: int = 0
    last: Costs = field(default_factory=Costs)
    rates: str = ""

    def as_dict(self) -> dict[str, float]:
        """Return all numbers, flat and by names that stay the same, for loggers.

        Returns
        -------
        dict
            ``sparcel/steps``, ``sparcel/training_steps`` and ``sparcel/void_steps``. The amounts
            ``messages_sent``, ``bytes_sent``, ``bytes_received``, ``dense_bytes``,
            ``select_seconds`` and ``communicate_seconds``, each in total, as the mean of a step and
            of the last step: ``sparcel/total/bytes_sent``, ``sparcel/mean/bytes_sent``,
            ``sparcel/last/bytes_sent``. The ratios ``compression``, ``density_before`` and
            ``density_after``, each in total and of the last step.
        """
        numbers: dict[str, float] = {
            "steps": self.steps,
            "training_steps": self.training_steps,
            "void_steps": self.void_steps,
        }
        for name in _AMOUNTS:
            numbers[f"total/{name}"] = getattr(self, name)
            numbers[f"mean/{name}"] = getattr(self, name) / max(1, self.steps)
            numbers[f"last/{name}"] = getattr(self.last, name)
        for name in _RATIOS:
            numbers[f"total/{name}"] = getattr(self, name)
            numbers[f"last/{name}"] = getattr(self.last, name)
        return {f"sparcel/{name}": float(number) for name, number in numbers.items()}


@dataclass(eq=False)
class Tally:
    """What the steps of an exchange have cost.

    Attributes
    ----------
    total, last
        What all steps have cost, and what the last one has.
    void_steps
        How many steps had no effect.
    taken
        The magnitude that the last effective step took out of memory.
    """

    total: Costs = field(default_factory=Costs)
    last: Costs = field(default_factory=Costs)
    void_steps: int = 0
    taken: float = 0.0

    def count(self, step: Costs, effective: bool) -> None:
        """Add a step that ended."""
        self.total, self.last = self.total + step, step
        if effective:
            self.taken = float(step.magnitude)
        else:
            self.void_steps += 1
