"""Parsing and checks of options that several subcommands share."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

import typer

from sparcel.errors import InputError


def check_output(file: Path | None) -> None:
    """Check that an output file, if one is given, can be written, before anything else is done.

    Raises
    ------
    InputError
        When its folder does not exist, it is a folder, or may not be written.
    """
    if file is None:
        return
    if not file.parent.is_dir():
        raise InputError(f"can't write {file}: there is no folder {file.parent}")
    if file.is_dir():
        raise InputError(f"can't write {file}: it is a folder")
    if os.path.islink(os.path.realpath(file)):
        raise InputError(f"can't write {file}: it is a link that leads back to itself")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise InputError(f"can't write {file}: permission denied")


def check_apart(outputs: Mapping[str, Path | None], inputs: Sequence[Path]) -> None:
    """Refuse an output that would take the place of another one or of an input."""
    taken = {os.path.realpath(path): "is read from" for path in inputs}
    for option, path in outputs.items():
        if path is None or (path.exists() and not path.is_file()):  # such as /dev/null
            continue
        real = os.path.realpath(path)
        if real in taken:
            raise InputError(f"{option} {path} {taken[real]} too; give another file")
        taken[real] = f"is given to {option}"


def refuse_ignored(context: typer.Context, instead: Mapping[str, Sequence[str]]) -> None:
    """Refuse options that were typed but would be ignored.

    Parameters
    ----------
    instead
        For the name of a parameter, the names of the parameters that it replaces.

    Raises
    ------
    InputError
        When both were typed.
    """
    for name, ignored in instead.items():
        for other in ignored:
            if is_typed(context, name) and is_typed(context, other):
                raise InputError(
                    f"{_option(name)} takes the place of {_option(other)}: leave one of them out"
                )


def refuse_typed(context: typer.Context, names: Sequence[str], why: str) -> None:
    """Refuse options that were given and would not be used; ``why`` goes on after the name."""
    for name in names:
        if is_typed(context, name):
            raise InputError(f"{_option(name)} {why}")


def is_typed(context: typer.Context, name: str) -> bool:
    """Tell whether an option was given."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def takes_options(options: type[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a command of a function that takes options as a dataclass, ``options``, a field each."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(function, eval_str=True).parameters.values()
        given = inspect.signature(options, eval_str=True).parameters.values()

        @wraps(function)
        def command(**values: Any) -> None:
            taken = options(**{one.name: values.pop(one.name) for one in given})
            function(**values, options=taken)

        kept = [one for one in own if one.name != "options"]
        command.__signature__ = inspect.Signature([*kept, *given])  # type: ignore[attr-defined]
        return command

    return decorate
