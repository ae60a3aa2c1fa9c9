"""Ok-Topk's own rules: thresholds and boundaries of earlier steps serve for several."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from sparcel._checks import check_type, checked_number, checked_whole
from sparcel.collectives.gtopk import GlobalTopk
from sparcel.collectives.oktopk import Estimates, oktopk_reuse
from sparcel.errors import InputError
from sparcel.schemes._state import STATE_HINT
from sparcel.schemes.ledger import Ledger
from sparcel.wire import Wire


class Reuse:
    """Estimates that serve several steps.

    Parameters
    ----------
    threshold_steps, boundary_steps
        How many steps the threshold serves, and the boundaries of regions.
    """

    def __init__(self, threshold_steps: int, boundary_steps: int) -> None:
        self._threshold_steps, self._boundary_steps = threshold_steps, boundary_steps
        self._estimates = self._renewed = Estimates()

    def exchange(self, ledger: Ledger, wire: Wire, step: int) -> GlobalTopk:
        """Sum the ranks' selections and keep about k, by the estimates; see `oktopk_reuse`."""
        outcome, self._renewed = oktopk_reuse(
            ledger.sent,
            wire,
            ledger.k,
            self._estimates,
            renew_boundaries=step % self._boundary_steps == 0,
            renew_threshold=step % self._threshold_steps == 0,
            max_nnz=ledger.most,
        )
        return outcome

    def commit(self) -> None:
        """Go on with the estimates of the last exchange."""
        self._estimates = self._renewed

    def state_dict(self) -> dict[str, Any]:
        """Return the estimates, for `load`."""
        return asdict(self._estimates)

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from the ``"estimates"`` of a scheme's state."""
        self._estimates = self._renewed = checked_estimates(state)


def checked_estimates(state: Mapping[str, Any]) -> Estimates:
    """Return the estimates of a state, or raise `InputError`."""
    found, name = state.get("estimates", {}), "the state's 'estimates'"
    check_type(found, Mapping, name, STATE_HINT)
    if unknown := found.keys() - {one.name for one in fields(Estimates)}:
        raise InputError(f"{name} must not have {sorted(map(str, unknown))}; {STATE_HINT}")
    boundaries, threshold = found.get("boundaries"), found.get("threshold")
    if boundaries is not None:  # some formats of checkpoints know lists only
        if not isinstance(boundaries, list | tuple):
            raise InputError(
                f"{name} must have a list of boundaries, got {boundaries!r}; {STATE_HINT}"
            )
        boundaries = tuple(
            checked_whole(one, f"a boundary in {name}", at_least=0, hint=STATE_HINT)
            for one in boundaries
        )
        if boundaries[:1] != (0,) or list(boundaries) != sorted(boundaries):
            raise InputError(f"{name} must have boundaries that rise from 0; {STATE_HINT}")
    if threshold is not None:
        threshold = checked_number(
            threshold, f"the threshold in {name}", at_least=0, below=math.inf, hint=STATE_HINT
        )
    k = checked_whole(found.get("k", 0), f"k in {name}", at_least=0, hint=STATE_HINT)
    return Estimates(boundaries, threshold, k)
