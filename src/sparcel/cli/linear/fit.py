"""``sparcel linear fit``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from sparcel.cli.linear.files import Data, Label, Layout, TextName, layout_of
from sparcel.cli.options import check_apart, check_output
from sparcel.errors import InputError, known

if TYPE_CHECKING:
    from sparcel.rows import HashedNGrams, SvmLight, Text


def fit(
    context: typer.Context,
    data: Data,
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
    check_apart(outputs, data)
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

    found = layout_of(data, layout)
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
