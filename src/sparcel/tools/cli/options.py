"""Parsing and checks of options that several subcommands share."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, fields
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

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


def takes_options(
    options: type[Any], **instead: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a command of a function that takes a dataclass, whose fields are options.

    Their help is what the docstring of the dataclass says of them. What is False by default has no
    second name that says no.

    Parameters
    ----------
    instead
        Types of fields, where Typer cannot read those that they have.
    """
    hints, texts = get_type_hints(options, include_extras=True) | instead, descriptions(options)
    taken = [_as_option(one, hints[one.name], texts) for one in fields(options)]

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(function, eval_str=True).parameters.values()
        (whole,) = (one.name for one in own if one.annotation is options)
        typed = [one for kept in own for one in (taken if kept.name == whole else [kept])]

        @wraps(function)
        def command(**given: Any) -> None:
            made = options(**{one.name: given.pop(one.name) for one in taken})
            function(**given, **{whole: made})

        command.__signature__ = inspect.Signature(typed)  # type: ignore[attr-defined]
        return command

    return decorate


def descriptions(described: type[Any]) -> dict[str, str]:
    """Return what the docstring of a dataclass says of each field, as one line of plain text."""
    _, _, section = (inspect.getdoc(described) or "").partition("----------\n")
    parts = re.split(r"^(\w.*)\n", section, flags=re.MULTILINE)[1:]
    plain = [re.sub(r'``"?|"?``', "", " ".join(text.split())) for text in parts[1::2]]
    texts = [re.sub(r"`(\S+)`", r"\1", text) for text in plain]
    return dict(zip(parts[::2], texts, strict=True))


def _as_option(one: Field[Any], hint: Any, texts: Mapping[str, str]) -> inspect.Parameter:
    kind, *given = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    names = [_option(one.name)] if one.default is False else []
    option = given[0] if given else typer.Option(*names)
    option.help = option.help or texts[one.name]
    return inspect.Parameter(
        one.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=one.default,
        annotation=Annotated[kind, option],
    )
