"""Bidirectional top-k: ranks send few coordinates to the owners of regions, who return more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sparcel.core._checks import checked_number
from sparcel.core.formats import Format, format_named
from sparcel.core.regions import RETURNED
from sparcel.core.schemes.sparsifier import Sparsifier, Travelling, sends_all
from sparcel.core.schemes.step import Span


@dataclass(eq=False)
class Bidirectional(Sparsifier):
    """Ranks send their largest coordinates to the owners of regions, who return their largest sums.

    Each rank owns a part of the vector, in interleaved blocks. It adds what the other ranks send of
    it to all that it has of it itself, and returns the largest of these sums to all ranks. What a
    rank does not send, what an owner does not return, and what rounding takes stays in its memory.
    Two exchanges do all, whatever the number of ranks.

    Parameters
    ----------
    density
        Share of the coordinates that a rank sends of each region, about: those above a threshold
        that is estimated from a sample. 1 sends all, in the format's bits.
    returned
        Share of its sums that an owner returns, about, at least ``density``: by default three times
        as much. 1 returns all, in the format's bits, so that what any rank has sent is applied.
    answer
        How what owners return travels, by name or as a `Format`; by default as what they are sent.
        It is worth more bits where the ranks' gradients are alike.

    The others are those of `Sparsifier`. Layers with densities of their own return as many times
    as much.
    Source: errors are fed back in both directions as in DoubleSqueeze (Tang et al. 2019), with
    ranks as the servers of regions as in 1-bit Adam (Tang et al. 2021). With ``returned=density``
    it is near Ok-Topk's rule, with a share for each owner in place of the k largest of all.
    """

    returned: float | None = None
    answer: str | Format | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.answer is not None:
            self.answer = format_named(self.answer, "answer")
        if self.returned is not None:
            self.returned = checked_number(
                self.returned, "returned", at_least=self.density, at_most=1, hint="1 returns all"
            )

    def _up_and_down(
        self, spans: Sequence[Span], format: Format
    ) -> tuple[Travelling, Travelling] | None:
        answer = self.answer if isinstance(self.answer, Format) else format
        if sends_all(spans):
            if not (format.loses or answer.loses):
                return None
            everything = ((spans[-1].stop, 1.0),)
            return (everything, format), (everything, answer)
        times = RETURNED if self.returned is None else self.returned / self.density
        up = tuple((span.stop, span.density) for span in spans)
        down = tuple((stop, min(1.0, density * times)) for stop, density in up)
        return (up, format), (down, answer)
