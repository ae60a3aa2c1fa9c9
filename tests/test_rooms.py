"""Imports follow the map of docs/explanation/design.md: downwards, and into no private module."""

import ast
import inspect
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import sparcel
from sparcel import _cpu
from sparcel.core.comm import Communicator
from sparcel.core.comm.jobs import JobQueue

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "sparcel"
FOLDERS = ("tools", "products", "core")
BESIDE = ("__main__", "integrations", "errors")
"""Rooms beside the folders. What else is there only hands on the public names of a room."""
DESIGN = (ROOT / "docs/explanation/design.md").read_text()
MAP = re.search(r"## Rooms.*?```text\n(.*?)```", DESIGN, re.DOTALL)

COMPILED = "_cpu"
"""The extension, which counts as `kernels`. It also holds the mesh of connections for `comm`, what
parses and hashes for `rows`, the steps of linear models, and the coder of `delta`."""
COMPILED_FOR = {"kernels", "comm", "rows", "linear", "delta"}

SUB_ROOMS = {"torch", "mpi", "simulated"}
"""The rooms inside `comm`."""


def levels() -> dict[str, int]:
    """Each room's line on the map, counted from the top."""
    assert MAP is not None
    lines = [line for line in MAP.group(1).splitlines() if not line.startswith("#")]
    rooms = [re.split(r"  +", line)[0].split() for line in lines]
    return {room: level for level, line in enumerate(rooms) for room in line}


def listed_in(folder: str) -> set[str]:
    """Return the rooms that the map has below the heading of a folder."""
    assert MAP is not None
    section = re.search(rf"^# {folder}/.*\n((?:[^#].*\n)+)", MAP.group(1), re.MULTILINE)
    assert section is not None
    return {room for line in section[1].splitlines() for room in re.split("  +", line)[0].split()}


def is_module(name: str) -> bool:
    path = PACKAGE.joinpath(*name.split("."))
    return name == COMPILED or path.is_dir() or path.with_suffix(".py").is_file()


@cache
def imported(source: Path) -> Sequence[str]:
    """Return the modules of sparcel that a file imports, as names below ``sparcel``."""
    found = []
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
            found += [name.split(".", 1)[1] for name in names if name.startswith("sparcel.")]
        elif isinstance(node, ast.ImportFrom):
            assert node.module and node.level == 0, f"{source} has a relative import"
            package, *inner = node.module.split(".")
            if package == "sparcel":
                for alias in node.names:
                    name = ".".join([*inner, alias.name])
                    found.append(name if is_module(name) else ".".join(inner))
    return found


def inner_files() -> Iterator[Path]:
    """Yield the files of all rooms, as paths below the package."""
    for source in sorted(PACKAGE.rglob("*.py")):
        file = source.relative_to(PACKAGE)
        if file.with_suffix("").parts[0] in FOLDERS + BESIDE:
            yield file


def below(parts: Sequence[str]) -> list[str]:
    """Return a module's parts from its room on."""
    return list(parts[parts[0] in FOLDERS :])


def imports() -> Iterator[tuple[str, list[str], list[str]]]:
    """Yield each import as the file, the file's module and the imported module, from rooms on."""
    for file in inner_files():
        for name in imported(PACKAGE / file):
            module, target = below(file.with_suffix("").parts), below(name.split("."))
            if module and target and name:
                yield file.as_posix(), module, target


def test_every_room_is_on_the_map_in_its_folder() -> None:
    rooms = set(BESIDE)
    for folder in FOLDERS:
        inside = {path.stem for path in (PACKAGE / folder).iterdir() if path.suffix in ("", ".py")}
        inside -= {"__init__", "__pycache__"}
        assert listed_in(folder) - set(BESIDE) == inside
        rooms |= inside
    assert rooms == set(levels())


def test_rooms_import_rooms_and_not_what_hands_on_their_names() -> None:
    for file in inner_files():
        for name in imported(PACKAGE / file):
            assert not name or name.split(".")[0] in (*FOLDERS, *BESIDE, COMPILED), (
                f"{file}: {name}"
            )


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


def files_of(stack: list[inspect.FrameInfo]) -> list[str]:
    """Return the files of the package that a call came through, the caller's callers first."""
    files = [Path(frame.filename) for frame in reversed(stack)]
    inside = [file.relative_to(PACKAGE) for file in files if file.is_relative_to(PACKAGE)]
    return ["/".join(below(file.with_suffix("").parts)) for file in inside]


def ways_to(targets: dict[str, object], run: Callable[[], object]) -> dict[str, set[str]]:
    """Return the files that calls of functions came through, as the design draws them.

    What a job calls came through whoever submitted the job.
    """
    ways: dict[str, set[str]] = {name: set() for name in targets}
    job = threading.local()

    def noted(name: str, own: Callable[..., object]) -> Callable[..., object]:
        def note(*args: object) -> object:
            files = [*getattr(job, "came", ()), *files_of(inspect.stack()[1:])]
            ways[name].add(" > ".join(file for file, _ in groupby(files)))
            return own(*args)

        return note

    def submit(queue: JobQueue, work: Callable[[], object]) -> object:
        came = files_of(inspect.stack()[1:])

        def follow() -> object:
            job.came = came
            return work()

        return own_submit(queue, follow)

    own_submit = JobQueue.submit
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JobQueue, "submit", submit)
        for name, owner in targets.items():
            patch.setattr(owner, name, noted(name, getattr(owner, name)))
        run()
    return ways


PASSES = ("enter", "collect", "deliver")
"""The compiled passes of the default scheme."""


MOST_CALLS, MOST_FILES = 130, 23
"""Of the package, from DDP's hook to the step's end, for one bucket, in a step after the first."""


class Counted:
    """Counts the package's functions that this thread calls, and threads that begin later."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self._counting = False
        threading.setprofile(self._note)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        if self._counting and event == "call":
            file = Path(frame.f_code.co_filename)
            if file.is_relative_to(PACKAGE):
                self.calls.append(str(file))

    def during(self, run: Callable[[], object]) -> tuple[int, int]:
        """Return how many functions are called meanwhile, in how many files."""
        sys.setprofile(self._note)
        self._counting = True
        run()
        self._counting = False
        sys.setprofile(None)
        return len(self.calls), len(set(self.calls))


def step_of_ddp(_: Communicator) -> tuple[dict[str, set[str]], tuple[int, int]]:
    """Return the ways of a gradient in a step of DDP, and how many calls and files a step takes."""
    counted = Counted()
    ddp = DistributedDataParallel(torch.nn.Linear(100, 50, bias=False))
    handle = sparcel.attach(ddp, policy=lambda *_: False, frontload=False)
    threading.setprofile(None)  # type: ignore[arg-type]  # typeshed does not know of None

    def backward() -> Callable[[], None]:
        return ddp(torch.ones(2, 100)).sum().backward  # type: ignore[no-any-return]

    ways = ways_to(dict.fromkeys(PASSES, _cpu) | {"exchange": _cpu.Mesh}, backward())
    for _step in range(3):
        backward()()
    counts = counted.during(backward())
    handle.close()
    return ways, counts


def drawn(lines: dict[str, list[str]], *names: str) -> str:
    """Join lines of the drawing to a way; each begins where the one before ends."""
    files: list[str] = []
    for name in names:
        assert not files or files[-1] == lines[name][0]
        files += lines[name][bool(files) :]
    return " > ".join(files)


@pytest.mark.processes
def test_the_way_of_a_gradient_is_as_drawn(run_on: Any) -> None:
    drawing = re.search(r"### The way of a gradient.*?```text\n(.*?)```", DESIGN, re.DOTALL)
    assert drawing is not None
    named = [line.split(maxsplit=1) for line in drawing.group(1).splitlines()]
    lines = {name: files.split(" > ") for name, files in named}
    assert " ".join(lines) == "queue run step passes send"
    passing = drawn(lines, "queue", "run", "step", "passes")
    sending = drawn(lines, "queue", "run", "step", "send")
    (first, counts), (second, others) = run_on(2, step_of_ddp)
    for name in PASSES:
        assert first[name] == second[name] == {passing}
    assert sending in first["exchange"] & second["exchange"]
    for calls, files in (counts, others):
        assert MOST_CALLS / 2 < calls <= MOST_CALLS
        assert len(PASSES) < files <= MOST_FILES
