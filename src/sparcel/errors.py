"""The exceptions that sparcel raises; all derive from `SparcelError`."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class SparcelError(Exception):
    """Base class of all exceptions that sparcel raises on purpose."""


class InputError(SparcelError, ValueError):
    """An argument is wrong; nothing was sent and nothing was changed."""


class MismatchError(SparcelError, ValueError):
    """Ranks made different calls, or one call with different arguments; all ranks raise it."""


class FormatError(SparcelError, ValueError):
    """A message is truncated or corrupt, or was not written by sparcel."""


class CommunicationError(SparcelError, RuntimeError):
    """A peer disconnected, did not answer within the timeout, or reported a failure."""


def known(name: str, names: Iterable[str], what: str) -> str:
    """Return ``name``, or raise an `InputError` that suggests the nearest of ``names``."""
    names = list(names)
    if name in names:
        return name
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise InputError(f"{what} must be one of {', '.join(names)}, got {name!r}{hint}")
