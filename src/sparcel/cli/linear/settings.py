"""Options of the command for the parameters of a training."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import Field, fields
from functools import wraps
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer

from sparcel.cli.options import is_typed
from sparcel.errors import InputError, checked_name
from sparcel.linear.parameters import OF_ONE_SOLVER, Parameters, Rule, descriptions

_NAMES = {"random_state": "--seed", "average": "--average", "asynchronous": "--asynchronous"}
"""Options that are not called as the parameter is, or have no second name that says no."""


def with_parameters(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command an option for each of `Parameters`; it gets these in ``parameters``."""
    own = inspect.signature(command, eval_str=True).parameters
    kept = [one for name, one in own.items() if name != "parameters"]
    texts, hints = descriptions(), get_type_hints(Parameters)
    options = [
        inspect.Parameter(
            one.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=one.default,
            annotation=_annotation(one, hints[one.name], texts[one.name]),
        )
        for one in fields(Parameters)
    ]

    @wraps(command)
    def run(**given: Any) -> None:
        solver = checked_name(given["solver"], OF_ONE_SOLVER, "--solver")
        other = next(name for name in OF_ONE_SOLVER if name != solver)
        refuse_typed(
            given["context"],
            OF_ONE_SOLVER[other],
            f"is a setting of --solver {other}, and the solver is {solver}; leave it out, or give"
            f" --solver {other}",
        )
        parameters = {one.name: given.pop(one.name) for one in options}
        command(**given, parameters=parameters)

    signature = inspect.Signature([*kept, *options])
    run.__signature__ = signature  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in signature.parameters.values()}
    return run


def _annotation(one: Field[Any], hint: Any, text: str) -> Any:
    """Return the type and the option of a parameter, as Typer reads them."""
    names = [_NAMES[one.name]] if one.name in _NAMES else []
    if hint == Rule or get_origin(hint) is Literal:
        hint = str
    more: dict[str, Any] = {}
    if one.default is not None and type(None) in get_args(hint):
        more = {"parser": _number_or_none, "metavar": "FLOAT|none"}
    return Annotated[hint, typer.Option(*names, help=text, **more)]


def _number_or_none(text: str | float) -> float | None:
    return None if str(text).lower() == "none" else float(text)


def refuse_typed(context: typer.Context, names: Sequence[str], why: str) -> None:
    """Refuse options that were given and would not be used; ``why`` goes on after the name."""
    for name in names:
        if is_typed(context, name):
            raise InputError(f"--{name.replace('_', '-')} {why}")
