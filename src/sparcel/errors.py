"""The exceptions that sparcel raises, all derived from `SparcelError`, and its warning."""

from __future__ import annotations

import difflib
import re
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class SparcelError(Exception):
    """Base class of all exceptions that sparcel raises on purpose."""


class InputError(SparcelError, ValueError):
    """An argument is wrong; nothing was sent and nothing was changed."""


class MismatchError(SparcelError, ValueError):
    """Ranks made different calls, or one call with different arguments; all ranks raise it."""


class FormatError(SparcelError, ValueError):
    """A message is truncated or corrupt, or was not written by sparcel."""


class VersionError(SparcelError, ValueError):
    """A delta was made for other weights than those at hand, or does not make what it should."""


class CommunicationError(SparcelError, RuntimeError):
    """A peer disconnected, did not answer within the timeout, or reported a failure."""


class MissingDependencyError(SparcelError, ModuleNotFoundError):
    """A package is missing that one of sparcel's extras installs."""


@contextmanager
def optional(what: str, extra: str | None = None) -> Iterator[None]:
    """Turn a failed import in the block into an error that says what to install.

    That is an extra of sparcel, or without one a package that its own project tells how to install.
    """
    try:
        yield
    except ModuleNotFoundError as missing:
        package = (missing.name or "").partition(".")[0]
        how = (
            "install it as its project says" if extra is None else f"pip install 'sparcel[{extra}]'"
        )
        raise MissingDependencyError(f"{what} needs {package}: {how}", name=package) from missing


class SparcelWarning(UserWarning):
    """What was asked for works, but is probably not what was meant."""


def warn(message: str) -> None:
    """Give a `SparcelWarning` at the line that called sparcel."""
    level, frame = 1, sys._getframe()
    inside = "sparcel.", "torch."  # which calls hooks
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(inside):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, SparcelWarning, stacklevel=level)


def warn_on_rank_0(message: str) -> None:
    """Give a warning that all ranks give alike, which only rank 0 of torch's default group prints.

    A filter that makes warnings errors applies on all ranks, which must not differ.
    """
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_initialized() or dist.get_rank() == 0:
        warn(message)
    else:
        with warnings.catch_warnings(record=True):
            warn(message)


_MOST_SHOWN, _FEW = 200, 3
"""How many characters a message quotes of foreign text, and how many names of a list."""


def shown(text: object) -> str:
    """Return text that others wrote, such as a name in a file, as a message may show it.

    What is no printable character, such as an escape or the end of a line, is told by its number,
    and of a long text only the beginning. What was shown once stays as it is.
    """
    head = str(text)[: _MOST_SHOWN + 1]
    plain = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in head)
    return plain if len(plain) <= _MOST_SHOWN else plain[: _MOST_SHOWN - 1] + "…"


def few(names: Iterable[object]) -> list[str]:
    """Return the first of several names in their order, as a message may show them."""
    return [shown(name) for _, name in zip(range(_FEW), names, strict=False)]


def public_url(place: object) -> str:
    """Return a URL without user, password, query and fragment, or what is no URL as it is."""
    scheme, mark, rest = str(place).partition("://")
    if not mark:
        return str(place)
    rest = re.split("[?#]", rest, maxsplit=1)[0]
    authority = rest.partition("/")[0]
    # Keys of object stores hold slashes.
    broken = not re.fullmatch(r"(\[.*\]|[^:]*)(:\d+)?", authority)
    host = authority.rpartition("@")[2] + rest[len(authority) :]
    return f"{scheme}://{rest.rpartition('@')[2] if broken and '@' not in authority else host}"


_MANY, _LISTED = 12, 40
"""More names than the former are not listed beside a suggestion, and never more than the latter."""


def checked_name(name: str, names: Iterable[str], what: str) -> str:
    """Return ``name``, or raise an `InputError` that suggests the nearest of ``names``."""
    names = list(names)
    if isinstance(name, str) and name in names:
        return name
    near = difflib.get_close_matches(name, names, n=2) if isinstance(name, str) else []
    listed = ", ".join(names[:_LISTED]) + (", …" if len(names) > _LISTED else "")
    if near:
        expected = f"did you mean {' or '.join(map(repr, near))}?"
        expected += f" It must be one of {listed}" if len(names) <= _MANY else ""
    else:
        expected = f"it must be one of {listed}" if names else "there are none"
    given = repr(name) if isinstance(name, str | int | float | None) else type(name).__name__
    raise InputError(f"{what} cannot be {given}; {expected}")
