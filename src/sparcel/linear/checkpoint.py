"""Files that hold arrays and what belongs to them: models, and trainings to go on with."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from sparcel._files import open_regular, replacing
from sparcel.errors import InputError
from sparcel.rows.rows import Array

_BROKEN = (OSError, ValueError, KeyError, EOFError, RuntimeError, zipfile.BadZipFile)
"""What comes of a file that is something else; `zipfile` raises a RuntimeError where flags are."""


def write(path: Path, kind: str, about: Mapping[str, Any], arrays: Mapping[str, Array]) -> None:
    """Write arrays, and ``about`` as JSON; the file is there completely or as it was before.

    Raises
    ------
    InputError
        When the file cannot be written, as on a full disk.
    """
    told = {"kind": kind, "arrays": list(arrays), **about}
    text = np.frombuffer(json.dumps(told).encode(), np.uint8)
    content: dict[str, Any] = {"about": text, **arrays}
    try:
        with replacing(path) as file:
            np.savez(file, **content)
    except OSError as error:
        raise InputError(f"{path} can't be written: {error.strerror}") from error


def read(path: Path, kind: str) -> tuple[dict[str, Any], dict[str, Array]]:
    """Return what `write` wrote.

    Raises
    ------
    InputError
        When the file is not there, is broken, or holds something else.
    """
    try:
        with open_regular(path) as opened, np.load(opened, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        about = json.loads(bytes(arrays.pop("about")))
    except FileNotFoundError:
        raise InputError(f"there is no file {path}") from None
    except _BROKEN as error:
        raise InputError(f"{path} is no {kind} of sparcel linear, or it is broken") from error
    if about.pop("kind", None) != kind:
        raise InputError(f"{path} is no {kind} of sparcel linear")
    # The checksums of a zip file are of contents, and not of names.
    if list(about.pop("arrays", arrays)) != list(arrays):
        raise InputError(f"{path} is broken: it has the arrays {', '.join(arrays)}")
    return about, arrays
