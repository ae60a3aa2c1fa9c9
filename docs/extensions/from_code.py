"""What the site prints from the code: tables of settings, and the commands with their options.

``settings-table`` and ``attach-table`` are directives. Methods and defaults come from the methods'
signatures, and meanings from their docstrings, so no page can differ from them.
"""

from __future__ import annotations

import inspect
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import import_module
from typing import Any

import typer
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.pycode import ModuleAnalyzer
from sphinx.util.docutils import SphinxDirective
from sphinx.util.logging import getLogger
from typer.cli import get_docs_for_click

import sparcel
from sparcel.core.schemes import DEFAULT, RECOMMENDED, SCHEMES, Hierarchical, Settings
from sparcel.core.schemes.selecting import Selecting
from sparcel.core.schemes.sparsifier import Sparsifier
from sparcel.core.training import Averager
from sparcel.tools.cli import app as commands

Row = tuple[str, str, str]

ROOMS = [
    "sparcel",
    *("sparcel.analysis", "sparcel.data", "sparcel.delta", "sparcel.linear"),
    *("sparcel.optim", "sparcel.outer", "sparcel.rows", "sparcel.training"),
]
"""The rooms whose exported names are all public."""

logger = getLogger(__name__)


def linked(text: str) -> str:
    """Return a docstring's text with links to the pages that it names."""
    return re.sub(r"docs/([\w/-]+)\.md", r":doc:`/\1`", text)


def meanings(*documented: Callable[..., Any]) -> dict[str, str]:
    """Return what the sections "Parameters" say of each name; the first that has it counts."""
    found: dict[str, str] = {}
    for one in documented:
        section = (inspect.getdoc(one) or "").partition("Parameters\n----------\n")[2]
        section = re.split(r"\n\n(?=\S)", section)[0]
        for names, words in re.findall(r"^(\S.*)\n((?:[ ]+.*\n?|\n)+)", section, re.MULTILINE):
            for name in names.split(", "):
                found.setdefault(name, linked(" ".join(words.split())))
    return found


def settings_of_methods() -> Iterator[Row]:
    """Yield each setting of a method, its defaults by method, and what it means."""
    said = meanings(Sparsifier, Selecting, *SCHEMES.values(), Hierarchical)
    defaults = {name: inspect.signature(method).parameters for name, method in SCHEMES.items()}
    for setting in sorted(Settings.__annotations__):
        methods = defaultdict(list)
        for name, parameters in defaults.items():
            if setting in parameters:
                methods[code(parameters[setting].default)].append(f"``{name}``")
        if setting in RECOMMENDED:
            default = code(RECOMMENDED[setting])  # type: ignore[literal-required]
            methods[default].insert(0, f"without a name (``{DEFAULT}``)")
        each = (f"{default}: {', '.join(names)}" for default, names in methods.items())
        yield setting, "; ".join(each), said[setting]


def settings_of_attach() -> Iterator[Row]:
    """Yield each argument of `sparcel.attach` but the settings, its default, and what it means."""
    said = meanings(Averager, sparcel.attach)
    for name, parameter in inspect.signature(sparcel.attach).parameters.items():
        if name in ("model", "settings"):
            continue
        yield name, code(parameter.default), said[name]


def code(default: object) -> str:
    """Return a default as it is written in Python."""
    name = getattr(default, "__name__", None)  # of a function
    return f"``{name or repr(default)}``"


def table(head: Row, rows: Iterable[Row]) -> Iterator[str]:
    """Yield the lines of a table in reStructuredText."""
    yield from (".. list-table::", "   :header-rows: 1", "   :widths: 18 32 50", "")
    for row in (head, *((f"``{name}``", default, meaning) for name, default, meaning in rows)):
        for number, cell in enumerate(row):
            yield f"   {'  -' if number else '* -'} {cell}"


class SettingsTable(SphinxDirective):
    """All settings of all methods."""

    head: Row = ("setting", "default: methods that take it", "meaning")
    rows: Sequence[Row] = (*settings_of_methods(),)
    """Read before autodoc changes the signatures that it prints."""

    def run(self) -> list[nodes.Node]:
        """Return the table's nodes."""
        text = "\n".join(table(self.head, self.rows))
        return self.parse_text_to_nodes(text)


class AttachTable(SettingsTable):
    """All arguments of `sparcel.attach` but the methods' settings."""

    head = ("argument", "default", "meaning")
    rows = (*settings_of_attach(),)


def link_docstring(
    app: Sphinx, kind: str, name: str, documented: Any, options: Any, lines: list[str]
) -> None:
    """Make links of the pages that a docstring names."""
    lines[:] = map(linked, lines)


def list_commands(app: Sphinx, page: str, source: list[str]) -> None:
    """Append all commands, as they describe themselves, to the page of the command."""
    if page == "reference/command":
        command = typer.main.get_command(commands)
        context = command.make_context("sparcel", [], resilient_parsing=True)
        text = get_docs_for_click(obj=command, ctx=context, name="sparcel").partition("\n")[2]
        # Its lists of subcommands cut their sentences off; each has its own section.
        source[0] += re.sub(r"\*\*Commands\*\*:\n\n(\* .*\n)+", "", text)


def check_names(app: Sphinx, environment: BuildEnvironment) -> None:
    """Warn of each public name that has no place in the reference."""
    documented = {name for name, *_ in environment.domains["py"].get_objects()}
    for room in ROOMS:
        for name in import_module(room).__all__:
            places = {f"{room}.{name}", f"sparcel.{name}", f"sparcel.errors.{name}"}
            if not name.startswith("__") and not places & documented:
                logger.warning("%s.%s is not in the reference", room, name)


def setup(app: Sphinx) -> dict[str, bool]:
    """Register what is above."""
    # A function's own signature says more than its overloads, which are for type checkers.
    ModuleAnalyzer.overloads = property(lambda _: {}, lambda _, overloads: None)
    app.add_directive("settings-table", SettingsTable)
    app.add_directive("attach-table", AttachTable)
    app.connect("source-read", list_commands)
    app.connect("autodoc-process-docstring", link_docstring)
    app.connect("env-check-consistency", check_names)
    return {"parallel_read_safe": True}
