"""How numbers of deltas are shown."""

from __future__ import annotations

from rich.console import Console


def console() -> Console:
    """Return a console that shows text as it is, and leaves lines whole."""
    return Console(highlight=False, markup=False, emoji=False, soft_wrap=True)


def size(nbytes: float) -> str:
    """Return a number of bytes with a unit, a power of 1000."""
    for unit in ("B", "kB", "MB"):
        if nbytes < 999.5:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:,.3g} GB" if nbytes < 999.5 else f"{nbytes:,.0f} GB"


def share(part: float, whole: float) -> str:
    """Return a part of a whole in percent, without an exponent."""
    if not whole:
        return "–"
    percent = 100 * part / whole
    if percent >= 999.5:
        return f"{percent:,.0f} %"
    return f"{percent:.3g} %" if percent >= 1e-4 or not part else "< 0.0001 %"


def bits_each(nbytes: int, changed: int) -> str:
    """Return how many bits a changed element takes."""
    return f"{8 * nbytes / changed:.2f}" if changed else "–"


def age(seconds: float) -> str:
    """Return a time since something in its largest unit."""
    seconds = max(seconds, 0)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds:.0f} s"
