"""Checkpoints, deltas and stores as they are typed, and numbers as they are shown."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer
from rich.console import Console

from sparcel.core._files import mapped
from sparcel.errors import FormatError, InputError, optional, public_url, shown

if TYPE_CHECKING:
    from torch import Tensor

    from sparcel.products.delta import Index, Store, Version
    from sparcel.products.delta.files import File

_INDEX = "model.safetensors.index.json"
OldCheckpoint: TypeAlias = Annotated[
    Path,
    typer.Argument(
        help="The checkpoint before: a safetensors file, or a folder of them.", show_default=False
    ),
]
StorePlace: TypeAlias = Annotated[
    str,
    typer.Argument(
        help="The store: a folder, or a URL such as s3://bucket/folder or https://host/folder.",
        show_default=False,
    ),
]


@dataclass(frozen=True)
class Checkpoint:
    """Tensors by name, in the memory of their files, which is read when they are.

    Attributes
    ----------
    files
        What they are read from.
    stated
        The version that the file says it is, if it does.
    """

    files: tuple[Path, ...]
    tensors: Mapping[str, Tensor]
    stated: Version | None

    @property
    def elements(self) -> int:
        """The number of elements."""
        return sum(tensor.numel() for tensor in self.tensors.values())

    @property
    def number(self) -> int:
        """The number of the version that the file says it is, or 0."""
        return self.stated.number if self.stated else 0

    def version(self) -> Version:
        """Read all elements, and return the version that they are."""
        from sparcel.products.delta import version_of

        return version_of(self.tensors, self.number)


def is_delta(path: Path) -> bool:
    """Tell whether a safetensors file is a delta."""
    return _kind(_opened(path)) == "delta"


def open_delta(path: Path) -> File:
    """Return a delta, mapped."""
    from sparcel.products.delta.files import File

    if not is_delta(path):
        raise InputError(f"{path} is no delta; give a file of `sparcel delta diff` or of a store")
    return File(mapped(path), str(path))


def open_checkpoint(path: Path) -> Checkpoint:
    """Return the checkpoint that is a safetensors file, or a folder of several.

    Raises
    ------
    InputError
        If there are no such files, or two of them hold a tensor of the same name.
    FormatError
        If one is torn, or no safetensors file.
    """
    paths = _paths(path) if path.is_dir() else (path,)
    tensors: dict[str, Tensor] = {}
    stated = None
    for one in paths:
        held, stated = _read(one)
        if twice := sorted(tensors.keys() & held.keys()):
            raise InputError(
                f"{shown(twice[0])} is in several files of {path}; name the file instead"
            )
        tensors |= held
    return Checkpoint(paths, tensors, stated if len(paths) == 1 else None)


def _read(path: Path) -> tuple[dict[str, Tensor], Version | None]:
    """Return the tensors of a file, and the version that it states if sparcel has written it."""
    from sparcel.products.delta.files import File

    opened = _opened(path)
    match _kind(opened):
        case "anchor":
            file = File(mapped(path), str(path))
            return file.tensors(), file.version()
        case "delta":
            raise InputError(f"{path} is a delta; give a checkpoint")
        case _:
            names = opened.keys()
            return {name: opened.get_tensor(name) for name in names}, None


def _opened(path: Path) -> Any:  # whose methods have no annotations
    with optional("reading checkpoints", "delta"):
        from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise InputError(f"can't read {path}: there is no such file")
    try:
        return safe_open(path, "pt")
    except SafetensorError as error:
        raise FormatError(f"{path} is torn, or no safetensors file: {shown(error)}") from error


def _kind(opened: Any) -> str | None:
    """Return what sparcel calls the file, if it has written it."""
    metadata: dict[str, str] = opened.metadata() or {}
    return metadata.get("kind")


def _paths(folder: Path) -> tuple[Path, ...]:
    index = folder / _INDEX
    if not index.exists():
        found = tuple(sorted(folder.glob("*.safetensors")))
        if not found:
            raise InputError(f"can't read {folder}: it holds no *.safetensors")
        return found
    try:
        names = set(json.loads(index.read_bytes())["weight_map"].values())
        return tuple(folder / name for name in sorted(names))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise FormatError(f"{index} is no index of a checkpoint: {shown(repr(error))}") from error


def open_store(place: str) -> Store:
    """Return the store at a path or URL; a folder need not be there yet.

    Raises
    ------
    InputError
        If it is a file.
    """
    from sparcel.products.delta import store_at

    if "://" not in place and Path(place).exists() and not Path(place).is_dir():
        raise InputError(f"{place} is a file; a store is a folder or a URL")
    return store_at(place)


def lacks_folder(place: str) -> bool:
    """Tell whether a store is a folder that is not there."""
    return "://" not in place and not Path(place).exists()


def index_of(place: str, store: Store) -> Index:
    """Return the index of a store.

    Raises
    ------
    FormatError, OSError
        If it is wrong, or cannot be read.
    InputError
        If there is none.
    """
    from sparcel.products.delta import read_index

    if lacks_folder(place):
        raise InputError(f"there is no folder {place}")
    try:
        index = read_index(store)
    except OSError as error:
        raise OSError(f"can't read {public_url(place)}: {error.strerror or error}") from error
    if not index.entries:
        raise InputError(f"nothing was published to {public_url(place)} yet: it has no index.json")
    return index


@contextmanager
def writing(output: Path | None) -> Iterator[None]:
    """Turn an OSError about a temporary file into one that names the output."""
    try:
        yield
    except OSError as error:
        if output is None:
            raise
        raise OSError(f"can't write {output}: {error.strerror or error}") from error


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
