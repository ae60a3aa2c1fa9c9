"""What training has cost on this rank: totals, means, and the last step."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from operator import add, attrgetter

_AMOUNTS = (
    "messages_sent",
    "bytes_sent",
    "bytes_received",
    "dense_bytes",
    "select_seconds",
    "communicate_seconds",
)
_RATIOS = ("compression", "density_before", "density_after")


@dataclass(frozen=True)
class Costs:
    """What some steps have cost on this rank, small tensors and sparse gradients included.

    Attributes
    ----------
    steps
        How many steps these are. Those that a gradient with NaN or Inf made void count too.
    messages_sent, bytes_sent, bytes_received
        What the communicator of the exchange counted during these steps.
    dense_bytes
        Bytes that this rank would have sent for the same gradients by a ring all-reduce:
        2(P−1)/P times the bytes of the gradients in their own dtype.
    coordinates, asked, selected, reduced
        Coordinates of the gradients; those among them that the densities ask for, that this rank
        sent, and that the updates had. Small tensors count as sent whole. Of a sparse gradient,
        as embeddings make it, the rows that were used count as sent.
    magnitude
        The sum of ``|x|`` over what left this rank's memory, less that over what came back to it or
        arrived from other ranks.
    flushed
        What is in ``magnitude`` because the scheme was switched to one without memory: see
        `Handle.switch`.
    select_seconds, communicate_seconds
        Time spent selecting and exchanging; it may overlap with computation. An exchange includes
        waiting for slower ranks, and the second selection of `oktopk`.
    """

    steps: int = 0
    messages_sent: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    dense_bytes: int = 0
    coordinates: int = 0
    asked: int = 0
    selected: int = 0
    reduced: int = 0
    magnitude: float = 0.0
    flushed: float = 0.0
    select_seconds: float = 0.0
    communicate_seconds: float = 0.0

    @property
    def compression(self) -> float:
        """How many times fewer bytes were sent than a dense exchange would have sent.

        NaN if nothing was sent.
        """
        return self.dense_bytes / self.bytes_sent if self.bytes_sent else float("nan")

    @property
    def density_before(self) -> float:
        """The share of all coordinates that this rank sent."""
        return self.selected / max(1, self.coordinates)

    @property
    def density_after(self) -> float:
        """The share of all coordinates that the updates had."""
        return self.reduced / max(1, self.coordinates)

    def __add__(self, other: Costs) -> Costs:
        return Costs(*map(add, _counted(self), _counted(other)))


_counted = attrgetter(*(field.name for field in fields(Costs)))


@dataclass(frozen=True)
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
