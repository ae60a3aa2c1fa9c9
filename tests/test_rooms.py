"""Imports follow the map of docs/design.md: they go downwards and avoid private modules."""

import ast
import inspect
import re
from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby
from pathlib import Path

import pytest
import torch

from sparcel import kernels, scheme, simulate
from sparcel.comm import Communicator
from sparcel.training import Averager
from sparcel.wire import Wire

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "sparcel"
DESIGN = (ROOT / "docs/design.md").read_text()
MAP = re.search(r"## Rooms.*?```\n(.*?)```", DESIGN, re.DOTALL)

COMPILED = "_cpu"
"""The extension, which counts as `kernels`. It also holds the mesh of connections for `comm` and
what joins and merges `COO`'s messages for `formats`, what parses and hashes for `rows`, and the
steps of linear models."""
COMPILED_FOR = {"kernels", "comm", "formats", "rows", "linear"}

SUB_ROOMS = {"torch", "mpi", "simulated"}
"""The rooms inside `comm`."""


def levels() -> dict[str, int]:
    """Each room's line on the map, counted from the top."""
    assert MAP is not None
    rooms = [re.split(r"  +", line)[0].split() for line in MAP.group(1).splitlines()]
    return {room: level for level, line in enumerate(rooms) for room in line}


def is_module(name: str) -> bool:
    path = PACKAGE.joinpath(*name.split("."))
    return name == COMPILED or path.is_dir() or path.with_suffix(".py").is_file()


def imported(source: Path) -> Iterator[str]:
    """Yield the modules of sparcel that a file imports, as names below ``sparcel``."""
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Import):
            yield from (
                n.name.split(".", 1)[1] for n in node.names if n.name.startswith("sparcel.")
            )
        elif isinstance(node, ast.ImportFrom):
            assert node.module and node.level == 0, f"{source} has a relative import"
            package, *inner = node.module.split(".")
            if package == "sparcel":
                for alias in node.names:
                    name = ".".join([*inner, alias.name])
                    yield name if is_module(name) else ".".join(inner)


def imports() -> Iterator[tuple[str, list[str], list[str]]]:
    """Yield each import as the file, the file's module and the imported module, both in parts."""
    for source in sorted(PACKAGE.rglob("*.py")):
        file = source.relative_to(PACKAGE)
        for name in imported(source):
            if name:
                yield file.as_posix(), list(file.with_suffix("").parts), name.split(".")


def test_every_room_is_on_the_map() -> None:
    rooms = {path.stem for path in PACKAGE.iterdir() if path.suffix in ("", ".py")}
    assert rooms - {"__init__", "__pycache__"} == set(levels())


def test_imports_go_downwards() -> None:
    level = levels()
    upwards = [
        f"{file} imports {'.'.join(target)}"
        for file, (room, *_), (other, *_rest) in imports()
        for target in [[other, *_rest]]
        if room in level and other in level and room != other and level[other] <= level[room]
    ]
    assert not upwards


def test_private_modules_are_imported_in_their_own_room_only() -> None:
    private = set()
    for file, (room, *_), target in imports():
        if target == [COMPILED]:
            inside = room in COMPILED_FOR
        else:
            inside = room == target[0] or not any(name.startswith("_") for name in target[1:])
        if not inside:
            private.add((file, ".".join(target)))
    assert not private


def test_rooms_in_comm_do_not_import_one_another() -> None:
    for file, module, target in imports():
        if module[0] == "comm" and target[0] == "comm" and target[1:2] and target[1] in SUB_ROOMS:
            # The package itself resolves `group=`, so it imports all of them.
            assert module[1] in (target[1], "__init__"), f"{file} imports {'.'.join(target)}"


def test_others_import_the_packages_of_comm_and_not_their_modules() -> None:
    for file, module, target in imports():
        if module[0] != "comm" and target[0] == "comm":
            inner = target[1:]
            assert not inner or (len(inner) == 1 and inner[0] in SUB_ROOMS), (
                f"{file} imports {'.'.join(target)}"
            )


def calls_to(owner: object, name: str, run: Callable[[], object]) -> set[tuple[str, ...]]:
    """Return the files that calls of a function came through, the caller's callers first."""
    chains = set()

    def noted(*args: object, **kwargs: object) -> object:
        files = [Path(frame.filename) for frame in reversed(inspect.stack()[1:])]
        inside = [file.relative_to(PACKAGE) for file in files if file.is_relative_to(PACKAGE)]
        called = [str(file.with_suffix("")) for file in inside if file.parts[0] != "comm"]
        chains.add(tuple(file for file, _ in groupby(called)))
        return own(*args, **kwargs)

    own = getattr(owner, name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, noted)
        run()
    return chains


def test_the_way_of_a_gradient_is_as_drawn() -> None:
    drawing = re.search(r"### The way of a gradient.*?```\n(.*?)```", DESIGN, re.DOTALL)
    assert drawing is not None
    selecting, exchanging = (tuple(line.split(" > ")) for line in drawing.group(1).splitlines())
    assert len({*selecting, *exchanging}) <= 10

    def step(comm: Communicator) -> None:
        averager = Averager(
            {"weight": torch.zeros(5000)}, scheme("gtopk"), group=comm, policy=lambda *_: False
        )
        averager.queue(torch.arange(5000.0), {"weight": (0, 5000)})
        averager.finish()

    # DDP calls the hook, which calls the averager.
    assert selecting[0] == exchanging[0] == "ddp/hook"
    assert "averager.queue(" in (PACKAGE / "ddp/hook.py").read_text()
    run = partial(simulate, 2, step)
    for owner, name, drawn in (
        (kernels, "accumulate_topk", selecting[1:]),
        (Wire, "encode", exchanging[1:]),
    ):
        ends = {way[-len(drawn) :] for way in calls_to(owner, name, run)}
        assert drawn in ends, ends
