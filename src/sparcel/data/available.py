"""How much memory programs can still get, on this machine and in this container."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_CGROUPS = (
    ("", "memory.max", "memory.current", "inactive_file"),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""By version of cgroups: the folder, its files of limit and use, and what can be taken back."""


def available(root: Path = Path("/")) -> int:
    """Return the bytes that this process can still get without swapping or being killed."""
    return min([*_of_machine(root), *_of_cgroups(root)], default=1 << 62)


def _of_machine(root: Path) -> Iterator[int]:
    for line in _lines(root / "proc/meminfo"):
        if line.startswith("MemAvailable:"):
            yield int(line.split()[1]) << 10


def _of_cgroups(root: Path) -> Iterator[int]:
    """Yield what each cgroup leaves that this process is in; a container may not show all."""
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, name = line.split(":", 2)
        for folder, *files in _CGROUPS:
            if folder in controllers.split(","):
                top = root / "sys/fs/cgroup" / folder
                path = top / name.lstrip("/")
                for place in (path, *path.parents):
                    if place.is_relative_to(top):
                        yield from _left_in(place, *files)


def _left_in(place: Path, limit: str, use: str, cached: str) -> Iterator[int]:
    """Yield what one cgroup leaves; nothing for the root, which has no limit."""
    most, used = _lines(place / limit), _lines(place / use)
    stat = dict(line.split() for line in _lines(place / "memory.stat"))
    if most and used and most != ["max"]:
        yield int(most[0]) - int(used[0]) + int(stat.get(cached, 0))


def _lines(file: Path) -> list[str]:
    """Return the lines of a file; none if it is not there, or not in this container's view."""
    try:
        return file.read_text().splitlines()
    except OSError:
        return []
