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
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        if line.startswith("MemAvailable:"):
            yield int(line.split()[1]) << 10


def _of_cgroups(root: Path) -> Iterator[int]:
    """Yield what each cgroup leaves that this process is in; a container may not show all."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, name = line.split(":", 2)
        for folder, *files in _CGROUPS:
            if folder in controllers.split(","):
                top = root / "sys/fs/cgroup" / folder
                path = top / name.lstrip("/")
                for place in (path, *path.parents):
                    if place.is_relative_to(top):
                        yield from _left(place, *files)


def _left(place: Path, limit: str, use: str, cached: str) -> Iterator[int]:
    try:
        most, used = ((place / file).read_text().strip() for file in (limit, use))
        stat = dict(line.split() for line in (place / "memory.stat").read_text().splitlines())
    except OSError:  # not in this container's view, or the root, which has no limit
        return
    if most != "max":
        yield int(most) - int(used) + int(stat.get(cached, 0))
