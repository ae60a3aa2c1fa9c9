"""``sparcel delta``: what changes between versions of a model's weights, in files and in stores.

Its commands on checkpoints are here, `diff` and `apply`; those on stores are in `stores`.
"""

from __future__ import annotations

import mmap
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from sparcel.core._files import replacing
from sparcel.errors import FormatError, InputError, VersionError, checked_name
from sparcel.tools.cli.delta.places import (
    Checkpoint,
    OldCheckpoint,
    bits_each,
    console,
    open_checkpoint,
    open_delta,
    share,
    size,
    writing,
)
from sparcel.tools.cli.delta.stores import log, verify, watch
from sparcel.tools.cli.options import check_apart, check_output

if TYPE_CHECKING:
    from torch import Tensor

    from sparcel.products.delta import Version
    from sparcel.products.delta.chunk import Chunk


delta = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@delta.callback()
def _delta() -> None:
    """Tell what changes between versions of a model's weights, apply it, and follow a store of it.

    A delta holds the elements that changed from one version to the next, without loss. A store is
    the folder, or the URL, to which a training publishes its versions: whole models now and then,
    and deltas in between.
    """


@delta.command()
def diff(
    old: OldCheckpoint,
    new: Annotated[
        Path, typer.Argument(help="The checkpoint after, of the same kind.", show_default=False)
    ],
    output: Annotated[
        Path | None,
        typer.Option(help="File for the delta, which `sparcel delta apply` takes."),
    ] = None,
    code: Annotated[
        str,
        typer.Option(
            help="How changes are written. exponents: the shortest; whoever applies the delta "
            "needs the old weights. steps: longer; which elements change can be read without the "
            "old weights. values: the new values, for readers that do not have the old ones."
        ),
    ] = "exponents",
) -> None:
    """Tell how much two checkpoints differ, and how small a delta between them is.

    Tensors are compared bit by bit, so nothing is lost. Checkpoints may be larger than memory.
    """
    from sparcel.products.delta.encoding import CODES
    from sparcel.products.delta.parts import tensors_of

    checked_name(code, CODES, "code")
    check_output(output)
    opened = map(open_checkpoint, (old, new))
    before, after = (replace(one, tensors=tensors_of(one.tensors)) for one in opened)
    check_apart({"--output": output}, [*before.files, *after.files])
    shown = console()
    with shown.status(f"comparing {old} with {new}"):
        found = _found(before, after, code, output)
    shown.print(_table(found, before, after))
    for remark in _remarks(before.tensors, after.tensors):
        shown.print(remark)
    if output is not None:
        shown.print(f"{output} makes version {found.version} of version {found.base}.")


@dataclass
class _Counts:
    elements: int = 0
    changed: int = 0
    bytes: int = 0


@dataclass
class _Found:
    """What differs, by dtype, and the delta's length."""

    by_dtype: dict[str, _Counts]
    bytes: int
    base: Version
    version: Version

    @property
    def changed(self) -> int:
        return sum(counts.changed for counts in self.by_dtype.values())


def _found(before: Checkpoint, after: Checkpoint, code: str, output: Path | None) -> _Found:
    """Encode a delta, a chunk at a time, and write it if there is an output."""
    from sparcel.products.delta import Version, encode
    from sparcel.products.delta.chunk import read_chunk
    from sparcel.products.delta.files import delta_file

    counts: dict[str, _Counts] = defaultdict(_Counts)
    for tensor in after.tensors.values():
        counts[_dtype(tensor)].elements += tensor.numel()
    # The sum of the old weights takes a pass over them; it is what `apply` checks them by.
    base = Version(before.number, 0) if output is None else before.version()
    target = after.number if after.number > base.number else base.number + 1
    total = 0
    # The header comes first and tells the lengths of all chunks, so these wait in a file.
    with writing(output), tempfile.TemporaryFile(dir=output.parent if output else None) as waiting:
        lengths = []
        for data in encode(after.tensors, before.tensors, code=code, since=base, target=target):
            chunk = read_chunk(data)
            if chunk.pieces:
                one = counts[chunk.layout.name]
                one.changed += _changed(chunk, before.tensors)
                one.bytes += len(data)
            total += chunk.sum
            lengths.append(len(data))
            if output is not None:
                waiting.write(data)
        version = base.after(target, total)
        if output is None:
            written = sum(lengths)
        else:
            waiting.seek(0)
            chunks = (waiting.read(length) for length in lengths)
            parts = delta_file(chunks, base, version, sizes=lengths)
            with replacing(output) as file:
                written = sum(map(file.write, parts))
    return _Found(counts, written, base, version)


def _changed(chunk: Chunk, before: Mapping[str, Tensor]) -> int:
    """Count the elements that differ; a chunk of all elements does not say how many these are."""
    from sparcel.products.delta import decode
    from sparcel.products.delta.elements import bits_of

    if chunk.code != "dense" or chunk.new:
        return chunk.changed
    changed = 0
    for change in decode(chunk):
        assert change.values is not None, "the tensor is there"
        old = bits_of(before[change.name].reshape(-1)[change.indices])
        changed += int((old != bits_of(change.values)).sum())
    return changed


def _table(found: _Found, before: Checkpoint, after: Checkpoint) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column()
    table.add_row("elements", f"{after.elements:,}", f"in {len(after.tensors):,} tensors")
    table.add_row("changed", f"{found.changed:,}", share(found.changed, after.elements))
    there = {name: counts for name, counts in found.by_dtype.items() if counts.elements}
    for name, counts in sorted(there.items()) if len(there) > 1 else ():
        of = f"of {counts.elements:,}: {share(counts.changed, counts.elements)}"
        each = f", {bits_each(counts.bytes, counts.changed)} bits each" if counts.changed else ""
        table.add_row(f"  {name}", f"{counts.changed:,}", of + each)
    if before.tensors.keys() != after.tensors.keys():
        appeared = len(after.tensors.keys() - before.tensors.keys())
        gone = len(before.tensors.keys() - after.tensors.keys())
        table.add_row("tensors", f"{appeared:,} new", f"{gone:,} gone")
    table.add_row("bits a changed element", bits_each(found.bytes, found.changed))
    table.add_row("delta", size(found.bytes), f"{found.bytes:,} bytes")
    full = sum(tensor.nbytes for tensor in after.tensors.values())
    table.add_row("of the checkpoint", share(found.bytes, full), f"of {size(full)}")
    half = 2 * after.elements
    if size(half) != size(full):
        table.add_row("of a copy in bfloat16", share(found.bytes, half), f"of {size(half)}")
    return table


def _remarks(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> Iterator[str]:
    """Say what makes deltas long that are not of one model, or not of one dtype."""
    both = before.keys() & after.keys()
    if before and after and not both:
        yield "The checkpoints have no tensor in common; are they of the same model?"
    dtypes = Counter((_dtype(before[name]), _dtype(after[name])) for name in both)
    for (old, new), count in sorted(dtypes.items()):
        if old != new:
            yield f"Tensors whose dtype changes from {old} to {new}, sent whole: {count:,}."
    if shapes := sum(before[name].shape != after[name].shape for name in both):
        yield f"Tensors whose shape changes, sent whole: {shapes:,}."


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


@delta.command()
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


for command in (log, verify, watch):
    delta.command()(command)
