"""Which of several ways is taken next, by prediction first and by measurement as it comes."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

STEADY_STEPS = 64
"""So many steps go by between two agreements, each of which costs ⌈log₂P⌉ rounds."""

TRIAL_STEPS = 3
STALE_STEPS = 1024
"""A measurement as old as this may be repeated."""

LOST_SHARE = 0.05
"""At most this share of the time goes into trials of what turns out, or is known, to be slower."""

WORTHWHILE = 0.95
"""A switch has to promise this much of the time of what runs now, or less."""


class Contest:
    """Picks among ways to do a step; ranks that report and decide alike pick alike.

    Steps come in windows. A window runs one way; at its end the ranks agree on what a step of it
    took, and `decide` picks the next. The first step after a switch is a window of its own, and is
    not measured: it pays for what the switch brings along, such as the memory that a dense step
    sends.

    Parameters
    ----------
    predicted
        Seconds a step of each way, the same on all ranks. The least is taken first; the others are
        tried for a few steps each, those first that are expected to lose least time, when the time
        that trials have lost is a small enough share of all.

    Attributes
    ----------
    chosen
        The way to go now.
    left
        How many steps the window still has; at 0 a decision is due.
    best
        What trials are held against: the way to return to.
    measured
        Seconds a step, by way, as agreed; the last measurement of each.
    """

    def __init__(self, predicted: Mapping[str, float]) -> None:
        self.predicted = dict(predicted)
        self.measured: dict[str, float] = {}
        self.chosen = min(self.predicted, key=self.predicted.__getitem__)
        self.left = 1
        self.best = self.chosen
        self._settled = False
        self._samples: list[float] = []
        self._steps, self._measured_at = 0, dict.fromkeys(self.predicted, 0)
        self._spent = self._lost = 0.0

    def record(self, seconds: float, counts: bool = True) -> None:
        """Add a step of the present way; its time ``counts`` unless the step was void."""
        self.left -= 1
        self._steps += 1
        if counts:
            self._samples.append(seconds)

    def report(self) -> float:
        """Return what a step of this window typically took here, in seconds; 0 if none counts."""
        return median(self._samples) if self._samples else 0.0

    def decide(self, seconds: float) -> None:
        """Begin the next window, given what all ranks agreed that a step of the last one took."""
        steps, self._samples = len(self._samples), []
        if not self._settled:
            self._settled = True
            self.left = STEADY_STEPS if self.chosen == self.best else TRIAL_STEPS
            return
        if seconds > 0:
            self._take(seconds, steps)
        self.best = self._fastest_measured()
        following = self._trial() or self.best
        self._settled = following == self.chosen
        self.chosen = following
        self.left = STEADY_STEPS if self._settled else 1

    def _take(self, seconds: float, steps: int) -> None:
        """Book a window: what it says of its way, and what it cost."""
        self.measured[self.chosen] = seconds
        self._measured_at[self.chosen] = self._steps
        self._spent += seconds * steps
        if self.chosen != self.best:
            # The step that settled is not measured; it is taken to be like the others.
            self._lost += max(0.0, seconds - self._expected(self.best)) * (steps + 1)

    def _fastest_measured(self) -> str:
        """Return the way to stay with: the best so far, unless another is clearly faster."""
        if not self.measured:
            return self.best
        fastest = min(self.measured, key=self.measured.__getitem__)
        stays = self.measured[fastest] > WORTHWHILE * self._expected(self.best)
        return self.best if stays else fastest

    def _trial(self) -> str | None:
        """Return the way whose trial is due and loses least, if that can be afforded."""
        if not self.measured:
            return None
        due = [way for way in self.predicted if way != self.best and self._is_due(way)]
        if not due:
            return None
        way = min(due, key=self._expected)
        loss = max(0.0, self._expected(way) - self._expected(self.best)) * (TRIAL_STEPS + 1)
        return way if self._lost + loss <= LOST_SHARE * self._spent else None

    def _is_due(self, way: str) -> bool:
        return way not in self.measured or self._steps - self._measured_at[way] > STALE_STEPS

    def _expected(self, way: str) -> float:
        """Return seconds a step: measured, or else predicted, as wrongly as the worst so far."""
        if way in self.measured:
            return self.measured[way]
        ratios = [self.measured[other] / self.predicted[other] for other in self.measured]
        return self.predicted[way] * max(ratios, default=1.0)
