"""What files of rows hold, as the commands take it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sparcel.errors import InputError, checked_name

LAYOUTS = ("svmlight", "lines", "tsv", "jsonl")

Data = Annotated[
    list[Path],
    typer.Argument(help="Files: plain, .gz, .bz2, .xz or .zst.", show_default=False),
]
Model = Annotated[Path, typer.Argument(help="What `fit` wrote.", show_default=False)]
Layout = Annotated[
    str | None,
    typer.Option(
        help="What the files hold: svmlight, lines (a document a line), tsv (columns that the first"
        " line names) or jsonl (a JSON object a line). By default their names tell: .tsv, .jsonl,"
        " .txt; all else is svmlight."
    ),
]
Label = Annotated[str, typer.Option(help="Name of the column or field with the label.")]
TextName = Annotated[str, typer.Option(help="Name of the column or field with the text.")]


def layout_of(data: list[Path], layout: str | None) -> str:
    """Return what files hold, as told or by their names."""
    if layout is not None:
        return checked_name(layout, LAYOUTS, "--layout")
    from sparcel.rows.pieces import is_compressed

    by_suffix = {".tsv": "tsv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".txt": "lines"}
    plain = [path.with_suffix("") if is_compressed(path) else path for path in data]
    kinds = {by_suffix.get(path.suffix, "svmlight") for path in plain}
    if len(kinds) > 1:
        raise InputError(f"the files hold {' and '.join(sorted(kinds))}; give files of one kind")
    return kinds.pop()
