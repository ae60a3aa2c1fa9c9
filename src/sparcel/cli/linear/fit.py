"""``sparcel linear fit``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparcel.cli.linear.files import Data, Label, Layout, TextName, layout_of
from sparcel.cli.linear.settings import refuse_typed, with_parameters
from sparcel.cli.options import check_apart, check_output
from sparcel.errors import InputError
from sparcel.linear.parameters import LOSSES

if TYPE_CHECKING:
    from sparcel.rows import Source


@with_parameters
def fit(
    context: typer.Context,
    data: Data,
    out: Annotated[Path, typer.Option(help="File for the model.")] = Path("model.npz"),
    loss: Annotated[
        str, typer.Option(help="logistic, hinge, squared_hinge, or squared for regression.")
    ] = LOSSES[0],
    weights: Annotated[
        Path | None,
        typer.Option(help="File with the weight of each row, not negative: a number a line."),
    ] = None,
    layout: Layout = None,
    label: Label = "label",
    text: TextName = "text",
    ngrams: Annotated[
        str,
        typer.Option(
            help="What text becomes: word:1-2 stands for single words and pairs, char:3 for every"
            " three characters, char_wb:2-4 for characters inside words."
        ),
    ] = "word:1-2",
    dimensions: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Number of coordinates. For text the default is 1048576; for svmlight, what the"
            " highest index needs.",
        ),
    ] = None,
    index_from: Annotated[
        int, typer.Option(min=0, max=1, help="The first index of svmlight files.")
    ] = 1,
    cache: Annotated[
        Path | None,
        typer.Option(
            help="File to keep the parsed rows in, made anew when the data change. All processes of"
            " a machine share it, each its own part."
        ),
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="File to keep the state in after each epoch.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the checkpoint, if it is there.")
    ] = False,
    plot: Annotated[Path | None, typer.Option(help="Picture of the loss against time.")] = None,
    *,
    parameters: Mapping[str, Any],
) -> None:
    """Fit a model to labelled rows.

    Shows the mean loss of each epoch: with sgd, of every row before the step that used it, which in
    the first epoch is the loss on rows not seen yet; with scd, at the epoch's end. Several
    processes share the rows; start them with torchrun, mpiexec or `sparcel lab run`.
    """
    from sparcel.linear.fit import Fit
    from sparcel.linear.settings import Settings

    outputs = {"--out": out, "--cache": cache, "--checkpoint": checkpoint, "--plot": plot}
    for file in outputs.values():
        check_output(file)
    check_apart(outputs, [*data, *([] if weights is None else [weights])])
    if plot is not None and plot.suffix not in (".pdf", ".png", ".svg"):
        raise InputError(f"--plot must end in .pdf, .png or .svg, got {plot}")
    if resume and checkpoint is None:
        raise InputError("--resume needs --checkpoint FILE, the state to go on from")
    settings = Settings(loss=loss, **parameters)
    found = layout_of(data, layout)
    is_svmlight = found == "svmlight"
    others = "text, such as .tsv or .jsonl" if is_svmlight else "svmlight"
    refuse_typed(
        context,
        ("label", "text", "ngrams") if is_svmlight else ("index_from",),
        f"is for files of {others}, and these are {found}; leave it out, or tell with --layout"
        " what the files hold",
    )
    source = _source(found, label, text, ngrams, dimensions, index_from)
    Fit(data, source, settings, out, weights, cache, checkpoint, resume, plot).run()


def _source(
    layout: str, label: str, text: str, ngrams: str, dimensions: int | None, index_from: int
) -> Source:
    from sparcel.rows import HashedNGrams, SvmLight, Text

    if layout == "svmlight":
        return SvmLight(dimensions, index_from)
    if layout == "lines":
        raise InputError("a document a line has no label to fit to; use .tsv or .jsonl files")
    parts = re.fullmatch(r"(word|char|char_wb):(\d+)(?:-(\d+))?", ngrams)
    if parts is None:
        raise InputError(
            f"--ngrams must be word, char or char_wb, a colon and lengths, such as word:1-2 or"
            f" char:3, got {ngrams!r}"
        )
    analyzer, low, high = parts.groups()
    lengths = int(low), int(high or low)
    hashed = HashedNGrams(analyzer, lengths, dimensions or 2**20)  # type: ignore[arg-type]
    return Text(layout, hashed, label, text)  # type: ignore[arg-type]
