"""``sparcel linear``: linear models on sparse rows, fitted by one process or many."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from sparcel._files import replacing
from sparcel.cli.options import check_output
from sparcel.errors import InputError, known

if TYPE_CHECKING:
    from sparcel.rows import HashedNGrams, Rows, SvmLight, Text

linear = typer.Typer(no_args_is_help=True, rich_markup_mode=None)

LAYOUTS = ("svmlight", "lines", "tsv", "jsonl")

_Data = Annotated[
    list[Path],
    typer.Argument(help="Files: plain, .gz, .xz or .zst.", show_default=False),
]
_Layout = Annotated[
    str | None,
    typer.Option(
        help="What the files hold: svmlight, lines (a document a line), tsv (columns that the first"
        " line names) or jsonl (a JSON object a line). By default their names tell: .tsv, .jsonl,"
        " .txt; all else is svmlight."
    ),
]
_Label = Annotated[str, typer.Option(help="Name of the column or field with the label.")]
_TextName = Annotated[str, typer.Option(help="Name of the column or field with the text.")]


@linear.callback()
def _linear() -> None:
    """Fit linear models to sparse rows, on one machine or, under torchrun or mpiexec, on many."""


@linear.command()
def fit(
    context: typer.Context,
    data: _Data,
    out: Annotated[Path, typer.Option(help="File for the model.")] = Path("model.npz"),
    loss: Annotated[
        str, typer.Option(help="logistic, hinge, squared_hinge, or squared for regression.")
    ] = "logistic",
    solver: Annotated[
        str,
        typer.Option(
            help="sgd, mini-batch stochastic gradient descent; or scd, block coordinate descent:"
            " more exact and slower, for losses other than hinge."
        ),
    ] = "sgd",
    l2: Annotated[float, typer.Option(min=0, help="Weight of half the squared norm.")] = 1e-6,
    l1: Annotated[float, typer.Option(min=0, help="Weight of the sum of magnitudes.")] = 0.0,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the data.")] = 5,
    batch_size: Annotated[
        int, typer.Option(min=1, max=32768, help="Rows that each process takes a step with.")
    ] = 1000,
    step: Annotated[
        str,
        typer.Option(help="Size of steps: adagrad, constant, inverse, inverse_sqrt, bold_driver."),
    ] = "adagrad",
    eta0: Annotated[float, typer.Option(min=0, help="Size of the first step.")] = 0.5,
    average: Annotated[
        bool,
        typer.Option("--average", help="Average the models after all steps; adagrad needs --l2 0."),
    ] = False,
    block: Annotated[
        int, typer.Option(min=1, help="With scd, coordinates of each process that a step changes.")
    ] = 100,
    gather: Annotated[
        str,
        typer.Option(
            help="With scd, what processes send of new values: nothing, as each computes all; or"
            " sparse, those that changed."
        ),
    ] = "nothing",
    layout: _Layout = None,
    label: _Label = "label",
    text: _TextName = "text",
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
    algorithm: Annotated[
        str,
        typer.Option(
            help="How processes share gradients: sharded gives each coordinate one owner; auto,"
            " dense, split_allgather and their like sum them on all."
        ),
    ] = "sharded",
    format: Annotated[
        str, typer.Option(help="How summed gradients are laid out in messages: packed or coo.")
    ] = "packed",
    density: Annotated[
        float | None,
        typer.Option(
            help="Share of the coordinates, such as 0.001, that a process sends in a step: the"
            " largest; it keeps the rest for later steps. For algorithms that sum. By default all."
        ),
    ] = None,
    bits: Annotated[
        int | None,
        typer.Option(
            help="Send the values of gradients in 8 or 4 bits, rounded without bias. For"
            " sharded, auto and split_allgather. By default as they are."
        ),
    ] = None,
    asynchronous: Annotated[
        bool,
        typer.Option("--asynchronous", help="Sum a gradient while the next one is computed."),
    ] = False,
    plot: Annotated[Path | None, typer.Option(help="Picture of the loss against time.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Decides the order of the rows.")] = 0,
) -> None:
    """Fit a model to labelled rows.

    Shows the mean loss of each epoch: with sgd, of every row before the step that used it, which in
    the first epoch is the loss on rows not seen yet; with scd, at the epoch's end. Several
    processes share the rows; start them with torchrun, mpiexec or `sparcel lab run`.
    """
    from sparcel.linear.fit import Job, run
    from sparcel.linear.settings import Settings

    outputs = {"--out": out, "--cache": cache, "--checkpoint": checkpoint, "--plot": plot}
    for file in outputs.values():
        check_output(file)
    _check_apart(outputs, data)
    if plot is not None and plot.suffix not in (".pdf", ".png", ".svg"):
        raise InputError(f"--plot must end in .pdf, .png or .svg, got {plot}")
    if resume and checkpoint is None:
        raise InputError("--resume needs --checkpoint FILE, the state to go on from")
    _check_solver(solver, context)
    settings = Settings(
        loss=loss,
        solver=solver,
        l1=l1,
        l2=l2,
        epochs=epochs,
        tol=None,
        batch_size=batch_size,
        step=step,
        eta0=eta0,
        average=average,
        block=block,
        gather=gather,
        asynchronous=asynchronous,
        algorithm=algorithm,
        format=format,
        density=density,
        bits=bits,
        seed=seed,
    )
    source = _source(data, layout, label, text, ngrams, dimensions, index_from)
    job = Job(data, source, settings, out, cache, checkpoint, resume, plot)
    run(job, Console(highlight=False))


@linear.command()
def predict(
    model: Annotated[Path, typer.Argument(help="What `fit` wrote.", show_default=False)],
    data: _Data,
    out: Annotated[Path | None, typer.Option(help="File for the labels; else the output.")] = None,
    probabilities: Annotated[
        bool, typer.Option("--probabilities", help="Add the probability of each class.")
    ] = False,
    layout: _Layout = None,
    text: _TextName = "text",
) -> None:
    """Write the label of each row, one a line, as the model predicts it."""
    from sparcel.linear.model import LinearModel

    check_output(out)
    _check_apart({"--out": out}, [model, *data])
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
    model: Annotated[Path, typer.Argument(help="What `fit` wrote.", show_default=False)],
    data: _Data,
    layout: _Layout = None,
    label: _Label = "label",
    text: _TextName = "text",
) -> None:
    """Compare a model with labelled rows: accuracy, log loss and area under the ROC curve."""
    from sparcel.linear.evaluation import evaluate
    from sparcel.linear.model import LinearModel

    fitted = LinearModel.load(model)
    for name, value in evaluate(fitted, _blocks(fitted, data, layout, label, text)).items():
        typer.echo(f"{name:10} {value:.6g}")


_OWN_OPTIONS = {
    "sgd": ("batch_size", "step", "eta0", "average", "algorithm", "format", "density", "bits"),
    "scd": ("block", "gather"),
}
"""The options of each solver that the other has not."""


def _check_solver(solver: str, context: typer.Context) -> None:
    """Refuse options that were given and that the solver would not use."""
    known(solver, _OWN_OPTIONS, "--solver")
    for other in _OWN_OPTIONS.keys() - {solver}:
        for name in _OWN_OPTIONS[other]:
            source = context.get_parameter_source(name)
            if source is not None and source.name != "DEFAULT":
                raise InputError(
                    f"--{name.replace('_', '-')} is a setting of --solver {other}, and the solver"
                    f" is {solver}; leave it out, or give --solver {other}"
                )


def _check_apart(outputs: Mapping[str, Path | None], inputs: Sequence[Path]) -> None:
    """Refuse an output that would take the place of another one or of an input."""
    taken = {path.resolve(): "is read from" for path in inputs}
    for option, path in outputs.items():
        if path is None or (path.exists() and not path.is_file()):  # such as /dev/null
            continue
        if path.resolve() in taken:
            raise InputError(f"{option} {path} {taken[path.resolve()]} too; give another file")
        taken[path.resolve()] = f"is given to {option}"


def _predicted(model: Any, blocks: Iterator[Rows], probabilities: bool) -> Iterator[str]:
    for rows in blocks:
        margins = model.margins(rows)
        shares = model.probabilities(margins) if probabilities else [()] * len(rows)
        for label, own in zip(model.predict(margins), shares, strict=True):
            yield "\t".join([str(label), *(f"{share:.6g}" for share in own)])


def _blocks(
    model: Any, data: list[Path], layout: str | None, label: str | None, text: str
) -> Iterator[Rows]:
    """Yield the rows of files as the model's own were made."""
    from dataclasses import replace

    from sparcel.rows import SvmLight, Text, described

    source = described(model.about["source"])
    found = _layout(data, layout)
    if (found == "svmlight") != isinstance(source, SvmLight):
        made_of = "svmlight files" if isinstance(source, SvmLight) else "text"
        raise InputError(
            f"the model was fitted to {made_of}, and these files are {found}; --layout says what"
            " they hold"
        )
    if isinstance(source, Text):
        named = None if found == "lines" else label
        source = replace(source, layout=found, label=named, text=text)  # type: ignore[arg-type]
    # Without a name for labels, they are not looked at.
    return source.blocks(data, "texts" if label is None or _has_texts(model) else "numbers")


def _has_texts(model: Any) -> bool:
    return model.classes is not None and model.classes.dtype.kind == "U"


def _layout(data: list[Path], layout: str | None) -> str:
    """Return what files hold, as told or by their names."""
    if layout is not None:
        return known(layout, LAYOUTS, "--layout")
    by_suffix = {".tsv": "tsv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".txt": "lines"}
    plain = [
        path.with_suffix("") if path.suffix in (".gz", ".xz", ".zst") else path for path in data
    ]
    kinds = {by_suffix.get(path.suffix, "svmlight") for path in plain}
    if len(kinds) > 1:
        raise InputError(f"the files hold {' and '.join(sorted(kinds))}; give files of one kind")
    return kinds.pop()


def _source(
    data: list[Path],
    layout: str | None,
    label: str,
    text: str,
    ngrams: str,
    dimensions: int | None,
    index_from: int,
) -> SvmLight | Text:
    from sparcel.rows import SvmLight, Text

    found = _layout(data, layout)
    if found == "svmlight":
        return SvmLight(dimensions, index_from)
    if found == "lines":
        raise InputError("a document a line has no label to fit to; use .tsv or .jsonl files")
    return Text(found, _ngrams(ngrams, dimensions), label, text)  # type: ignore[arg-type]


def _ngrams(text: str, dimensions: int | None) -> HashedNGrams:
    from sparcel.rows import HashedNGrams

    parts = re.fullmatch(r"(word|char|char_wb):(\d+)(?:-(\d+))?", text)
    if parts is None:
        raise InputError(
            f"--ngrams must be word, char or char_wb, a colon and lengths, such as word:1-2 or"
            f" char:3, got {text!r}"
        )
    analyzer, low, high = parts.groups()
    return HashedNGrams(
        analyzer,  # type: ignore[arg-type]
        (int(low), int(high or low)),
        dimensions or 2**20,
    )
