"""Chooses among several ways to do a step, by prediction first and then by measurement."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

STEADY_STEPS = 64
"""Steps between two agreements. In an agreement all ranks tell each other a number."""

TRIAL_STEPS = 3
STALE_STEPS = 1024
"""After this many steps a measurement may be repeated."""

LOST_SHARE = 0.05
"""The largest share of the time that may be lost in trials of slower ways."""

WORTHWHILE = 0.95
"""A switch must promise at most this share of the present way's time."""


class Contest:
    """Picks among ways to do a step; ranks that decide by the same numbers pick the same way.

    Steps come in windows. All steps of a window are done in one way. At its end the ranks agree on
    the time of a step, and `decide` picks the next way. The first step after a switch is a window
    of its own and is not measured, because it also pays for the switch: a dense step, for example,
    sends the whole memory.

    Parameters
    ----------
    predicted
        Seconds a step of each way, the same on all ranks. The fastest is taken first. The others
        are tried for a few steps each, as long as trials have lost only a small share of the time;
        ways that are expected to lose the least time come first.

    Attributes
    ----------
    chosen
        The present way.
    left
        How many steps are left in the window; at 0 a decision is due.
    best
        The way that trials are compared with and return to.
    measured
        The last agreed measurement of each way, in seconds a step.
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
        """Add a step of the present way; the time of a void step does not count."""
        self.left -= 1
        self._steps += 1
        if counts:
            self._samples.append(seconds)

    def report(self) -> float:
        """Return this window's median time of a step here, in seconds; 0 if none counts."""
        return median(self._samples) if self._samples else 0.0

    def decide(self, seconds: float) -> None:
        """Begin the next window, given the time of a step that all ranks agreed on, in seconds."""
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
        """Record the measured time of a window's way, and the time that the window cost."""
        self.measured[self.chosen] = seconds
        self._measured_at[self.chosen] = self._steps
        self._spent += seconds * steps
        if self.chosen != self.best:
            # The first step after the switch is not measured; it is assumed to be like the others.
            self._lost += max(0.0, seconds - self._expected(self.best)) * (steps + 1)

    def _fastest_measured(self) -> str:
        """Return the best way so far, or another one if that is clearly faster."""
        if not self.measured:
            return self.best
        fastest = min(self.measured, key=self.measured.__getitem__)
        stays = self.measured[fastest] > WORTHWHILE * self._expected(self.best)
        return self.best if stays else fastest

    def _trial(self) -> str | None:
        """Return the due way whose trial should lose the least time, if there is time to lose."""
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
        """Return seconds a step: as measured, or as predicted times the worst error so far."""
        if way in self.measured:
            return self.measured[way]
        ratios = [self.measured[other] / self.predicted[other] for other in self.measured]
        return self.predicted[way] * max(ratios, default=1.0)
