"""Every block that a page prints is run, by sybil; the conftest in the root collects them.

A page has a temporary folder and one namespace, in which its blocks are run one after the other:

- ``python`` is executed, in a process that launchers would call the only rank. Hidden blocks,
  ``<!--- invisible-code-block: python``, do what a reader has done before, and check results; in
  them ``patch`` is pytest's MonkeyPatch, undone at the end of the page.
- ``console`` has commands, after ``$``, and below them what they print. A line ``...`` stands for
  any lines. ``text`` right below ``python`` is what that prints.
- ``sh`` has a command a line, without output. ``make`` and ``pip`` are checked, and not run.
  What a command leaves running is ended, but for processes with a session of their own.
- ``diff`` says by its first lines what it changes; without them, its outcome is compiled.

A comment on the line before a block changes this:

- ``<!-- file: NAME -->``: the Python is saved in the folder, and not executed;
  ``<!-- continues: NAME -->`` appends it to that file.
- ``<!-- not run: REASON -->``: Python is compiled; of commands, scripts and options must exist.
- ``<!-- numbers vary -->``: numbers, sums in hex and widths are not compared.

Commands that sentences name, in backticks, are checked too: ``make``, ``python``, ``sparcel``.
"""

from __future__ import annotations

import ast
import difflib
import io
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import tomllib
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, redirect_stdout, suppress
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any

import pytest
import torch
import torch.distributed as dist
import typer
from sybil import Document, Example, Region, Sybil
from sybil.evaluators.python import PythonEvaluator, pad
from sybil.parsers.markdown import CodeBlockParser
from sybil.parsers.markdown.lexers import FencedCodeBlockLexer
from typer.testing import CliRunner

from sparcel import Handle
from sparcel.tools.cli import app

ROOT = Path(__file__).parents[1]
PAGE = ExitStack()
"""What ends with the page that is run: there is one at a time."""

SPARCEL: Any = typer.main.get_command(app)

LAUNCHED = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
LAUNCHED |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # any port: no other rank asks for it

execute = PythonEvaluator()


def python(example: Example, note: str, about: str) -> None:
    if not note:
        printed = io.StringIO()
        try:
            with redirect_stdout(printed):
                execute(example)
        finally:
            print(printed.getvalue())
        example.namespace["_printed"] = example.end, printed.getvalue()
        return
    compile(pad(example.parsed, example.line), example.path, "exec")
    if note != "not run":
        with open(about, "w" if note == "file" else "a") as file:
            file.write(example.parsed)


def text(example: Example, note: str, _: str) -> str | None:
    end, printed = example.namespace.get("_printed", (0, ""))
    between = example.document.text[end : example.start].replace("<!-- numbers vary -->", "")
    return None if between.strip() else difference(example.parsed, printed, bool(note))


def console(example: Example, note: str, _: str) -> str | None:
    first, *sessions = re.split(r"^\$ ", joined(example), flags=re.MULTILINE)
    if first or not sessions:
        return "a console begins with $ and a command"
    parted = (session.partition("\n") for session in sessions)
    return next(filter(None, (fault(command, shown, note) for command, _, shown in parted)), None)


def sh(example: Example, note: str, _: str) -> str | None:
    commands = joined(example).splitlines()
    return next(filter(None, (fault(command, None, note) for command in commands)), None)


def joined(example: Example) -> str:
    """Return the text of a block, with its continued lines joined."""
    return re.sub(r"\\\n\s*", "", example.parsed)


def fault(command: str, shown: str | None, note: str) -> str:
    """Run or check a command; return what is wrong, if anything is."""
    words = shlex.split(command, comments=True)
    if note == "not run" or not words or words[0] in ("make", "pip"):
        wrong = "\n".join(faults(words))
    else:
        status, told = run(command)
        wrong = f"ended with status {status}:\n{told}" if status and not shown else ""
        if shown is not None:
            wrong = wrong or difference(shown, told, bool(note))
    return wrong and f"{command}\n{wrong}"


def run(command: str) -> tuple[int, str]:
    """Run a command in the page's folder; return its status and what it prints."""
    if re.fullmatch(r"sparcel plan [\w .:-]+", command):  # a process takes seconds to start
        result = CliRunner().invoke(app, command.split()[1:], catch_exceptions=False)
        return result.exit_code, result.output
    there = {name: value for name, value in os.environ.items() if name not in LAUNCHED}
    with TemporaryFile("w+") as out:
        process = subprocess.Popen(
            ["bash", "-o", "pipefail", "-c", command],
            env=there | {"PYTHONFAULTHANDLER": "1"},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(600)
        except subprocess.TimeoutExpired:
            status = 124  # as of timeout(1)
            os.killpg(process.pid, signal.SIGABRT)  # Python tells where it waits
            time.sleep(1.0)
        finally:
            with suppress(ProcessLookupError):  # what it has left running, too
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        out.seek(0)
        told = out.read()
    if told.startswith("sparcel: cannot emulate"):  # this system permits no namespaces
        pytest.skip(told)
    return status, told


def difference(shown: str, told: str, numbers_vary: bool) -> str:
    """Return how a page differs from what was printed, if it does."""

    def lines(text: str) -> list[str]:
        if numbers_vary:
            text = re.sub(r"[-+]?(\b[0-9a-f]{16}\b|\d[\d.,]*(e[-+]\d+)?)", "#", text)
            text = re.sub(r"[ \t]+|─+", " ", text)
        return [line.rstrip() for line in text.rstrip().splitlines()]

    pattern = "".join(
        r"(?:.*\n)*" if line == "..." else f"{re.escape(line)}\n" for line in lines(shown)
    )
    if re.fullmatch(pattern, "".join(f"{line}\n" for line in lines(told))):
        return ""
    return f"prints\n{told}\nand the page shows\n{shown}"


TELLING = "options", "runs_told"
"""Functions of benchmarks that take the options of a script as keywords."""


def told_by_default(source: str) -> Iterator[str]:
    """Yield the options of a script that are keywords of a call."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in TELLING:
            yield from (f"--{one.arg.replace('_', '-')}" for one in node.keywords if one.arg)


def faults(words: list[str]) -> Iterator[str]:
    """Yield what is wrong with a command, as far as it is of this repository."""
    for place, word in enumerate(words):
        rest = words[place + 1 :]
        if word == "make":
            targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
            yield from (f"no target {one}" for one in rest if one not in targets and "=" not in one)
        elif word == "pip":
            project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
            extras = ",".join(re.findall(r"(?:sparcel|\.)\[([\w,]+)\]", " ".join(rest))).split(",")
            yield from (
                f"no extra {one}" for one in {*extras} - {"", *project["optional-dependencies"]}
            )
        elif word == "sparcel":
            end = rest.index("--") if "--" in rest else len(rest)
            yield from faults_of_sparcel(rest[:end])
            yield from faults(rest[end + 1 :])
        elif (word.endswith(".py") and "/" in word) or word.startswith("benchmarks."):
            script = ROOT / (word if "/" in word else f"{word.replace('.', '/')}.py")
            source = script.read_text() if script.exists() else ""
            options = {one.partition("=")[0] for one in rest if re.match("--?[a-z]", one)}
            known = {"--help", *re.findall(r'"(--?[a-z][\w-]*)"', source), *told_by_default(source)}
            yield from (f"{word} has no {one}" for one in options - known)
            if not source:
                yield f"no script {word}"
        else:
            continue
        return


def faults_of_sparcel(words: list[str]) -> Iterator[str]:
    command = SPARCEL
    while words and words[0] in getattr(command, "commands", ()):
        command, words = command.commands[words[0]], words[1:]
    if words and hasattr(command, "commands") and not words[0].startswith("-"):
        yield f"sparcel has no {' '.join(words)}"
    try:
        command.make_parser(command.context_class(command)).parse_args(list(words))
    except Exception as error:  # click's, which typer brings along under another name
        yield f"sparcel {command.name}: {error}"


def diff(example: Example, *_: str) -> str | None:
    if not example.parsed.startswith("--- "):
        new = [line[1:] for line in example.parsed.splitlines() if not line.startswith("-")]
        compile(pad("\n".join(new), example.line), example.path, "exec")
        return None
    for part in re.split(r"^--- ", example.parsed, flags=re.MULTILINE)[1:]:
        old, *lines = part.splitlines()
        if lines[0].startswith("+++ "):
            made = list(difflib.unified_diff(code(old), code(lines[0][4:]), lineterm=""))[2:]
            wrong = [] if [line.rstrip() for line in made] == lines[1:] else made
        else:
            there = (ROOT / old).read_text().splitlines()
            wrong = [line for line in lines if line.startswith("+") and line[1:] not in there]
        if wrong:
            return "\n".join([f"{old} has it otherwise:", *wrong])
    return None


def code(path: str) -> list[str]:
    """Return the lines of a script after its docstring."""
    return (ROOT / path).read_text().partition('"""\n')[2].lstrip("\n").splitlines()


def parser(evaluate: Callable[[Example, str, str], str | None], *notes: str) -> CodeBlockParser:
    """Return what finds the blocks of a language, which may have these notes."""

    def noted(example: Example) -> str | None:
        before = example.document.text[: example.start]
        found = re.search(r"^[ \t]*<!-- (.*) -->\n\Z", before, re.MULTILINE)
        note, _, about = found[1].partition(": ") if found else ("", "", "")
        if note in ("", *notes) and bool(about) == (note not in ("", "numbers vary")):
            try:
                return evaluate(example, note, about)
            except Exception:
                return traceback.format_exc()
        return f"what does the note {note!r} tell about {evaluate.__name__}?"

    return CodeBlockParser(evaluate.__name__, noted)


BLOCKS = [
    parser(python, "file", "continues", "not run"),
    parser(console, "numbers vary", "not run"),
    parser(sh, "not run"),
    parser(text, "numbers vary"),
    parser(diff),
]


def others(document: Document) -> Iterator[Region]:
    """Yield the blocks of other languages, which are failures, but for those of Sphinx."""
    known = [block.language for block in BLOCKS]
    for region in FencedCodeBlockLexer(language=".*")(document):
        language = region.lexemes["language"]
        if language not in known and not re.match(r"\{(?!code)", language):
            region.evaluator = lambda _, language=language: f"nothing runs {language!r}"
            yield region


def inline(document: Document) -> Iterator[Region]:
    """Yield the commands that sentences name, which are checked."""
    blocks = [region for _, region in document.regions]
    sparcel = f"sparcel (?:{'|'.join(SPARCEL.commands)})"
    for found in re.finditer(rf"`((?:make|python|{sparcel}) [^`]+)`", document.text):
        if not any(block.start < found.start() < block.end for block in blocks):
            yield Region(*found.span(), shlex.split(found[1]), check)


def check(example: Example) -> str:
    return "\n".join(faults(example.parsed))


def begin(names: dict[str, Any]) -> None:
    """Give a page a folder, which has the examples, and the environment of a rank."""
    folder = Path(PAGE.enter_context(TemporaryDirectory(ignore_cleanup_errors=True)))
    shutil.copytree(ROOT / "examples", folder / "examples")  # a copy: it may be written to
    patch = PAGE.enter_context(pytest.MonkeyPatch.context())
    patch.chdir(folder)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    for name, value in {**LAUNCHED, "OMP_NUM_THREADS": "1", "COLUMNS": "100", "PATH": path}.items():
        patch.setenv(name, value)
    torch.set_num_threads(1)
    names |= {"__name__": "__main__", "patch": patch}


def end(names: dict[str, Any]) -> None:
    try:
        for value in names.values():
            if isinstance(value, Handle):
                value.close()
        if dist.is_initialized():
            dist.destroy_process_group()
    finally:
        PAGE.close()


collect = Sybil(
    [*BLOCKS, others, inline], path=str(ROOT), pattern="*.md", setup=begin, teardown=end
).pytest()
