"""``sparcel delta apply``: deltas on a checkpoint make another checkpoint."""

from __future__ import annotations

import mmap
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated

import typer

from sparcel.core._files import replacing
from sparcel.errors import FormatError, InputError, VersionError
from sparcel.tools.cli.delta.places import (
    Checkpoint,
    OldCheckpoint,
    console,
    open_checkpoint,
    open_delta,
    share,
    writing,
)
from sparcel.tools.cli.options import check_apart, check_output

if TYPE_CHECKING:
    from torch import Tensor

    from sparcel.products.delta import Version
    from sparcel.products.delta.chunk import Chunk


def apply(
    old: OldCheckpoint,
    deltas: Annotated[
        list[Path],
        typer.Argument(
            help="Files of `sparcel delta diff` or of a store, each for what the one before makes.",
            show_default=False,
        ),
    ],
    output: Annotated[
        Path, typer.Option(help="File for the checkpoint after.", show_default=False)
    ],
) -> None:
    """Write the checkpoint that deltas make of an older one.

    All weights are checked by the sums that the deltas state: if something does not fit, or the
    command is interrupted, no file is written. The older checkpoint stays as it is.
    """
    check_output(output)
    if output.exists() and not output.is_file():
        raise InputError(f"can't write {output}: a checkpoint goes to a file")
    before = open_checkpoint(old)
    check_apart({"--output": output}, [*before.files, *deltas])
    steps = _steps(deltas)
    shown = console()
    with shown.status(f"applying to {old}"):
        _check(old, before, steps)
        changed = _write(output, before, steps)
    version = steps[-1].version
    shown.print(
        f"{output} is version {version}: {changed:,} changes on {before.elements:,} elements"
        f" ({share(changed, before.elements)})."
    )


@dataclass(frozen=True)
class _Step:
    """A delta: a file, or one from each process that has published a part of it."""

    path: Path
    base: Version
    version: Version
    chunks: list[Chunk]


def _steps(deltas: list[Path]) -> list[_Step]:
    from sparcel.products.delta.chunk import read_chunk

    steps: list[_Step] = []
    for path in deltas:
        file = open_delta(path)
        base, version = file.version("base"), file.version()
        if not steps or (steps[-1].base, steps[-1].version) != (base, version):
            steps.append(_Step(path, base, version, []))
        steps[-1].chunks.extend(map(read_chunk, file.chunks()))
    return steps


def _check(old: Path, before: Checkpoint, steps: list[_Step]) -> None:
    """Refuse deltas that do not follow one another from the checkpoint on.

    Sums tell; numbers are those of a store, and checkpoints of elsewhere have none.
    """
    now, where = before.version(), str(old)
    for step in steps:
        if step.base.sum != now.sum:
            raise VersionError(
                f"{step.path} is a delta from version {step.base}, but {where} is version {now};"
                " give the deltas in order, from the one for this checkpoint on"
            )
        now, where = step.version, f"what {step.path} makes"


def _write(output: Path, before: Checkpoint, steps: list[_Step]) -> int:
    from sparcel.products.delta.files import anchor_file

    with writing(output), replacing(output) as file:
        if _keep_layout(before, steps):
            return _patched(file, before, steps)[1]
        with tempfile.TemporaryFile(dir=output.parent) as scratch:
            tensors, changed = _patched(scratch, before, steps)
            file.writelines(anchor_file(tensors, steps[-1].version))
        return changed


def _keep_layout(before: Checkpoint, steps: list[_Step]) -> bool:
    """Tell whether no tensor appears, vanishes or is tied anew, so that a copy keeps its header."""
    from sparcel.products.delta.parts import parts_of, ties_of

    tied = ties_of(parts_of(before.tensors)).items()
    return not any(
        chunk.new
        or (chunk.code == "removed" and chunk.pieces)
        or chunk.untied
        or chunk.ties.items() - tied
        for step in steps
        for chunk in step.chunks
    )


def _patched(
    file: IO[bytes], before: Checkpoint, steps: list[_Step]
) -> tuple[dict[str, Tensor], int]:
    """Copy a checkpoint to a file, and apply deltas there, where the system writes them to disk."""
    from sparcel.products.delta import apply_
    from sparcel.products.delta.files import File, anchor_file

    file.writelines(anchor_file(before.tensors, steps[-1].version))
    file.flush()
    memory = mmap.mmap(file.fileno(), 0)
    tensors = File(memoryview(memory), file.name).tensors()
    changed = 0
    for step in steps:
        made = apply_(tensors, step.chunks)
        if made.version.sum != step.version.sum:
            raise FormatError(f"{step.path} makes version {made.version}, not {step.version}")
        changed += made.changed
    memory.flush()
    return tensors, changed
