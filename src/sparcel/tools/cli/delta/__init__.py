"""``sparcel delta``: what changes between versions of a model's weights, in files and in stores."""

from __future__ import annotations

import typer

from sparcel.tools.cli.delta.checkpoints import apply, diff
from sparcel.tools.cli.delta.stores import log, verify, watch

delta = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
for command in (diff, apply, log, verify, watch):
    delta.command()(command)


@delta.callback()
def _delta() -> None:
    """Tell what changes between versions of a model's weights, apply it, and follow a store of it.

    A delta holds the elements that changed from one version to the next, without loss. A store is
    the folder, or the URL, to which a training publishes its versions: whole models now and then,
    and deltas in between.
    """
