"""Imports go downwards on the map of docs/design.md."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "sparcel"
MAP = re.search(r"## Rooms.*?```\n(.*?)```", (ROOT / "docs/design.md").read_text(), re.DOTALL)


def levels() -> dict[str, int]:
    """Each room's line on the map, counted from the top."""
    assert MAP is not None
    rooms = [re.split(r"  +", line)[0].split() for line in MAP.group(1).splitlines()]
    return {room: level for level, line in enumerate(rooms) for room in line}


def imported_rooms(source: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Import):
            yield from (n.name.split(".")[1] for n in node.names if n.name.startswith("sparcel."))
        elif isinstance(node, ast.ImportFrom) and node.module:
            package, *inner = node.module.split(".")
            if package == "sparcel":
                yield from inner[:1] or (name.name for name in node.names)


def test_every_room_is_on_the_map() -> None:
    rooms = {path.stem for path in PACKAGE.iterdir() if path.suffix in ("", ".py")}
    assert rooms - {"__init__", "__pycache__"} == set(levels())


def test_imports_go_downwards() -> None:
    level = levels()
    upwards = []
    for source in PACKAGE.rglob("*.py"):
        room = source.relative_to(PACKAGE).parts[0].removesuffix(".py")
        for other in imported_rooms(source):
            if room in level and other in level and room != other and level[other] <= level[room]:
                upwards.append(f"{source.relative_to(PACKAGE)} imports {other}")
    assert not upwards
