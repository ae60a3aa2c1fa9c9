"""Rates of a machine and its network: tables of measured times."""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Self

from sparcel.core._checks import checked_flag, checked_number, checked_whole
from sparcel.errors import InputError, checked_name


@dataclass(frozen=True)
class Curve:
    """Seconds as a function of an amount, interpolated linearly between measured points.

    Attributes
    ----------
    points
        ``(amount, seconds)`` at growing amounts, at least one point. Below the first point the
        time is that of the first. Beyond the last it grows with the slope of the last two points,
        or in proportion to the amount if there is only one.
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        for point in self.points:
            for given in point:
                checked_number(given, "an amount or a time of a curve")
        amounts = [amount for amount, _ in self.points]
        if not amounts or sorted(set(amounts)) != amounts or amounts[0] < 0:
            raise InputError(f"a curve needs points at growing amounts, got amounts {amounts}")
        if any(not 0 <= seconds < float("inf") for _, seconds in self.points):
            raise InputError(f"a curve's times must be finite and not negative: {self.points}")
        times = _rising([seconds for _, seconds in self.points])
        object.__setattr__(self, "points", tuple(zip(amounts, times, strict=True)))

    @classmethod
    def line(cls, start: float, per_unit: float) -> Self:
        """Return the curve ``start + per_unit · amount``."""
        return cls(((0.0, start), (1e9, start + 1e9 * per_unit)))

    def slower(self, factor: float) -> Curve:
        """Return the curve of a link with ``1 / factor`` of the bandwidth and the same latency."""
        start = self.points[0][1]
        return Curve(tuple((a, start + factor * (s - start)) for a, s in self.points))

    def __call__(self, amount: float) -> float:
        """Return the seconds that ``amount`` takes."""
        points = self.points
        if amount <= points[0][0]:
            return points[0][1]
        if len(points) == 1:
            return points[0][1] * amount / max(points[0][0], 1e-300)
        place = min(bisect_right(points, (amount, float("inf"))), len(points) - 1)
        (low, start), (high, stop) = points[place - 1 : place + 1]
        return start + (stop - start) * (amount - low) / (high - low)


def _rising(times: list[float]) -> list[float]:
    """Return the non-decreasing times that are nearest to ``times`` by least squares.

    Noise can make a larger amount look faster than a smaller one; no choice should rest on that.
    """
    blocks: list[tuple[float, int]] = []  # mean and length
    for seconds in times:
        blocks.append((seconds, 1))
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (mean, length), (other, more) = blocks.pop(-2), blocks.pop()
            blocks.append(((mean * length + other * more) / (length + more), length + more))
    return [mean for mean, length in blocks for _ in range(length)]


TRANSFERS = ("shift", "tree", "rotate", "gather")
"""Patterns of exchange. The amount of their curves is the bytes of a message.

``shift``: each rank sends to one rank and receives from another or the same one. ``tree``: half of
the ranks send to the other half. ``rotate``: each rank sends a message to every other rank, all at
once; the time is that of all P−1 messages divided by P−1. ``gather``: like ``rotate``, but with the
same message to all ranks; the communicator may implement this differently.
"""

DENSE = ("dense.float32", "dense.bfloat16")
"""The engine's all-reduce. The amount of its curves is the bytes of the vector."""

WORK = ("select", "merge", "add", "encode", "small")
"""Kinds of work on a rank, which `KINDS` of `sparcel.core.cost.defaults` describes."""

_FORMER = (
    *("topk", "largest", "merge.many", "split", "join", "scatter", "fill"),
    *("decode", "without", "histogram", "pair", "node.pair"),
)
"""Curves that recorded rates hold beside those of today."""


@dataclass(frozen=True, eq=False)
class Rates:
    """Curves by name, the same on all ranks, and the cluster that they were measured on.

    Attributes
    ----------
    curves
        One for each name in `TRANSFERS`, `DENSE` and `WORK`. Transfers inside a node may have
        their own curves, named ``"node." + name``.
    ranks, ranks_per_node
        How many ranks measured. All measured at once, so the times include the effect of shared
        cores and links.
    crowding
        The time that work takes while all ranks work, divided by its processor time.
    measured
        False for stated rates and for the defaults.
    description
        Free text: the cluster that was measured.
    """

    curves: Mapping[str, Curve]
    ranks: int
    ranks_per_node: int = 1
    crowding: float = 1.0
    measured: bool = True
    description: str = ""

    def __post_init__(self) -> None:
        for name in (*TRANSFERS, *DENSE, *WORK):
            if name not in self.curves:
                raise InputError(f"rates need a curve {name!r}, got {sorted(self.curves)}")
        for name in self.curves:
            checked_name(name.removeprefix("node."), [*TRANSFERS, *DENSE, *WORK], "curve")
        checked_whole(self.ranks, "ranks", at_least=1)
        checked_whole(self.ranks_per_node, "ranks_per_node", at_least=1, at_most=self.ranks)
        checked_number(self.crowding, "crowding", above=0)
        checked_flag(self.measured, "measured")
        object.__setattr__(self, "curves", MappingProxyType(dict(self.curves)))

    def across_nodes(self) -> Rates:
        """Return the rates of groups with one rank of each node, which all work at the same time.

        Measured exchanges are those of such groups already. The engine's sums were measured for all
        ranks together; those of the groups share the nodes' links.
        """
        sums = {
            name: Curve(tuple((a / self.ranks_per_node, s) for a, s in self.curves[name].points))
            for name in DENSE
        }
        return replace(self, curves={**self.curves, **sums}, ranks_per_node=1)

    def __getitem__(self, name: str) -> Curve:
        return self.curves[name]

    def slower(self, factor: float) -> Rates:
        """Return the rates of a network with ``1 / factor`` of the bandwidth."""
        network = (*TRANSFERS, *DENSE)
        curves = {
            name: curve.slower(factor) if name in network else curve
            for name, curve in self.curves.items()
        }
        return replace(self, curves=curves)

    @property
    def bandwidth(self) -> float:
        """Bytes a second that a node sends and receives, in long messages between neighbours."""
        few, many = 1e6, 4e6
        here = 1 if self.ranks == self.ranks_per_node else self.ranks_per_node
        seconds = self["shift"](many) - self["shift"](few)
        return here * (many - few) / seconds if seconds > 0 else math.inf

    def to_json(self) -> str:
        """Return the rates as JSON, from which `from_json` makes the same ones."""
        curves = {name: curve.points for name, curve in self.curves.items()}
        return json.dumps({**vars(self), "curves": curves}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what `to_json` wrote; curves that are no more are left out.

        Raises
        ------
        InputError
            When the text was not written by `to_json`.
        """
        try:
            fields = json.loads(text)
            curves = {
                name: Curve(tuple((float(a), float(s)) for a, s in points))
                for name, points in fields.pop("curves").items()
                if name not in _FORMER
            }
            return cls(curves=curves, **fields)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise InputError(
                f"not rates as `sparcel plan --measure --save FILE` writes them: {error!r}"
            ) from error
