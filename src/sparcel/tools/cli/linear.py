"""``sparcel linear``: linear models on sparse rows, fitted by one process or many, and applied."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparcel.core._files import replacing
from sparcel.errors import InputError, checked_name
from sparcel.products.linear.parameters import LOSSES, OF_ONE_SOLVER, Parameters
from sparcel.tools.cli.options import check_apart, check_output, refuse_typed, takes_options

if TYPE_CHECKING:
    from sparcel.products.rows import Rows, Source

linear = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@linear.callback()
def _linear() -> None:
    """Fit linear models to sparse rows, on one machine or, under torchrun or mpiexec, on many."""


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
    from sparcel.products.rows.files import is_compressed

    by_suffix = {".tsv": "tsv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".txt": "lines"}
    plain = [path.with_suffix("") if is_compressed(path) else path for path in data]
    kinds = {by_suffix.get(path.suffix, "svmlight") for path in plain}
    if len(kinds) > 1:
        raise InputError(f"the files hold {' and '.join(sorted(kinds))}; give files of one kind")
    return kinds.pop()


def _number_or_none(text: str | float) -> float | None:
    return None if str(text).lower() == "none" else float(text)


@dataclass(frozen=True)
class _Options:
    """The options of `sparcel linear fit`, besides `Parameters`.

    Attributes
    ----------
    out
        File for the model.
    loss
        logistic, hinge, squared_hinge, or squared for regression.
    weights
        File with the weight of each row, not negative: a number a line.
    ngrams
        What text becomes: word:1-2 stands for single words and pairs, char:3 for every three
        characters, char_wb:2-4 for characters inside words.
    dimensions
        Number of coordinates. For text the default is 1048576; for svmlight, what the highest index
        needs.
    index_from
        The first index of svmlight files.
    cache
        File to keep the parsed rows in, made anew when the data change. All processes of a machine
        share it, each its own part.
    checkpoint
        File to keep the state in after each epoch.
    resume
        Go on from the checkpoint, if it is there.
    plot
        Picture of the loss against time.
    """

    out: Path = Path("model.npz")
    loss: str = LOSSES[0]
    weights: Path | None = None
    layout: Layout = None
    label: Label = "label"
    text: TextName = "text"
    ngrams: str = "word:1-2"
    dimensions: Annotated[int | None, typer.Option(min=2)] = None
    index_from: Annotated[int, typer.Option(min=0, max=1)] = 1
    cache: Path | None = None
    checkpoint: Path | None = None
    resume: bool = False
    plot: Path | None = None


@linear.command()
@takes_options(_Options)
@takes_options(
    Parameters,
    solver=str,
    step=str,
    tol=Annotated[float | None, typer.Option(parser=_number_or_none, metavar="FLOAT|none")],
    random_state=Annotated[int, typer.Option("--seed")],
)
def fit(context: typer.Context, data: Data, options: _Options, parameters: Parameters) -> None:
    """Fit a model to labelled rows.

    Shows the mean loss of each epoch: with sgd, of every row before the step that used it, which in
    the first epoch is the loss on rows not seen yet; with scd, at the epoch's end. Several
    processes share the rows; start them with torchrun, mpiexec or `sparcel lab run`.
    """
    from sparcel.products.linear.fit import Fit
    from sparcel.products.linear.trainer import Settings

    solver = checked_name(parameters.solver, OF_ONE_SOLVER, "--solver")
    other = next(name for name in OF_ONE_SOLVER if name != solver)
    refuse_typed(
        context,
        OF_ONE_SOLVER[other],
        f"is a setting of --solver {other}, and the solver is {solver}; leave it out, or give"
        f" --solver {other}",
    )
    out, weights, cache = options.out, options.weights, options.cache
    checkpoint, plot = options.checkpoint, options.plot
    outputs = {"--out": out, "--cache": cache, "--checkpoint": checkpoint, "--plot": plot}
    for file in outputs.values():
        check_output(file)
    check_apart(outputs, data if weights is None else [*data, weights])
    if plot is not None and plot.suffix not in (".pdf", ".png", ".svg"):
        raise InputError(f"--plot must end in .pdf, .png or .svg, got {plot}")
    if options.resume and checkpoint is None:
        raise InputError("--resume needs --checkpoint FILE, the state to go on from")
    settings = Settings(loss=options.loss, **vars(parameters))
    found = layout_of(data, options.layout)
    is_svmlight = found == "svmlight"
    others = "text, such as .tsv or .jsonl" if is_svmlight else "svmlight"
    refuse_typed(
        context,
        ("label", "text", "ngrams") if is_svmlight else ("index_from",),
        f"is for files of {others}, and these are {found}; leave it out, or tell with --layout"
        " what the files hold",
    )
    source = _source(found, options)
    Fit(data, source, settings, out, weights, cache, checkpoint, options.resume, plot).run()


def _source(layout: str, options: _Options) -> Source:
    from sparcel.products.rows import HashedNGrams, SvmLight, Text

    if layout == "svmlight":
        return SvmLight(options.dimensions, options.index_from)
    if layout == "lines":
        raise InputError("a document a line has no label to fit to; use .tsv or .jsonl files")
    parts = re.fullmatch(r"(word|char|char_wb):(\d+)(?:-(\d+))?", options.ngrams)
    if parts is None:
        raise InputError(
            f"--ngrams must be word, char or char_wb, a colon and lengths, such as word:1-2 or"
            f" char:3, got {options.ngrams!r}"
        )
    analyzer, low, high = parts.groups()
    lengths = int(low), int(high or low)
    hashed = HashedNGrams(analyzer, lengths, options.dimensions or 2**20)  # type: ignore[arg-type]
    return Text(layout, hashed, options.label, options.text)  # type: ignore[arg-type]


@linear.command()
def predict(
    model: Model,
    data: Data,
    out: Annotated[Path | None, typer.Option(help="File for the labels; else the output.")] = None,
    probabilities: Annotated[
        bool,
        typer.Option(
            "--probabilities",
            help="Add the probability of each class, under a first line that names the classes.",
        ),
    ] = False,
    layout: Layout = None,
    text: TextName = "text",
) -> None:
    """Write the label of each row, one a line, as the model predicts it."""
    from sparcel.products.linear.model import LinearModel

    check_output(out)
    check_apart({"--out": out}, [model, *data])
    fitted = LinearModel.load(model)
    lines = _predicted(fitted, _blocks(fitted, data, layout, None, text), probabilities)
    if out is None:
        for line in lines:
            typer.echo(line)
    else:
        with replacing(out) as file:
            file.writelines(f"{line}\n".encode() for line in lines)


@linear.command()
def evaluate(
    model: Model, data: Data, layout: Layout = None, label: Label = "label", text: TextName = "text"
) -> None:
    """Compare a model with labelled rows: accuracy, log loss and area under the ROC curve."""
    from sparcel.products.linear.model import LinearModel

    fitted = LinearModel.load(model)
    for name, value in fitted.evaluate(_blocks(fitted, data, layout, label, text)).items():
        typer.echo(f"{name:10} {value:.6g}")


def _predicted(model: Any, blocks: Iterator[Rows], probabilities: bool) -> Iterator[str]:
    if probabilities:
        model.check_probabilities()
        yield "\t".join(["label", *map(str, model.classes)])
    for rows in blocks:
        margins = model.margins(rows)
        shares = model.probabilities(margins) if probabilities else [()] * len(rows)
        for label, own in zip(model.predict(margins), shares, strict=True):
            yield "\t".join([str(label), *(f"{share:.6g}" for share in own)])


def _blocks(
    model: Any, data: list[Path], layout: str | None, label: str | None, text: str
) -> Iterator[Rows]:
    """Yield the rows of files as the model's own were made."""
    from sparcel.products.rows import SvmLight, Text, described

    source = described(model.about["source"])
    found = layout_of(data, layout)
    if (found == "svmlight") != isinstance(source, SvmLight):
        made_of = "svmlight files" if isinstance(source, SvmLight) else "text"
        raise InputError(
            f"the model was fitted to {made_of}, and these files are {found}; --layout says what"
            " they hold"
        )
    if isinstance(source, Text):
        named = None if found == "lines" else label
        source = replace(source, layout=found, label=named, text=text)  # type: ignore[arg-type]
    has_texts = model.classes is not None and model.classes.dtype.kind == "U"
    # Without a name for labels, they are not looked at.
    return source.blocks(data, "texts" if label is None or has_texts else "numbers")
