"""``sparcel linear predict`` and ``evaluate``: what a fitted model says of other rows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparcel.core._files import replacing
from sparcel.errors import InputError
from sparcel.tools.cli.linear.fit import Data, Label, Layout, Model, TextName, layout_of
from sparcel.tools.cli.options import check_apart, check_output

if TYPE_CHECKING:
    from sparcel.products.rows import Rows


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
    from dataclasses import replace

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
