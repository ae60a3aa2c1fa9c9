"""The page of messages: every message on it is one that the sources can give."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from itertools import takewhile
from pathlib import Path

import pytest

from sparcel import errors
from sparcel.tools import lab

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "reference" / "errors.md").read_text()
CLASSES, *GROUPS = re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]
OTHERS = "Messages of torch, Python and others"
SECTIONS = [
    section
    for group in GROUPS
    if not group.startswith(OTHERS)
    for section in re.split(r"^### ", group, flags=re.MULTILINE)[1:]
]

QUOTING = ("rank 1 failed: KeyError: 17", "samples are not kept on disk")
"""Messages that consist for the most part of another one."""

FIXED = 12
"""A shorter text is in too many messages to tell anything."""


CLASS = r"^([\w.]+(Error|Warning)|sparcel): "


def heading(section: str) -> str:
    """Return the message, or the part of it, that a section is about, without its class."""
    return re.sub(CLASS, "", section.partition("\n")[0].strip("`"))


def printed(section: str) -> str:
    """Return the message of a section, without its class or the command's name."""
    block = re.search(r"^```text\n(.*?)\n```$", section, re.MULTILINE | re.DOTALL)
    return re.sub(CLASS, "", " ".join(block[1].splitlines())) if block else heading(section)


def texts_of(node: ast.AST) -> Iterator[list[str]]:
    """Yield the texts below a node; Python has joined those that follow one another."""
    if isinstance(node, ast.JoinedStr):
        yield [part.value for part in node.values if isinstance(part, ast.Constant)]
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield [node.value]
    else:
        for child in ast.iter_child_nodes(node):
            yield from texts_of(child)


@cache
def templates() -> list[list[str]]:
    """Return the texts of the sources, each as the parts between what is filled in."""
    found = []
    for path in (ROOT / "src").rglob("*.py"):
        found += texts_of(ast.parse(path.read_text()))
    for path in (ROOT / "csrc").rglob("*.hpp"):
        found += [[text] for text in re.findall(r'"([^"\n]*)"', path.read_text())]
    return [parts for parts in found if sum(map(len, parts)) >= FIXED]


def shown(parts: list[str], message: str) -> list[str]:
    """Return the parts of a template that a message has; it may end before the template does."""
    found = list(takewhile(message.__contains__, parts))
    if len(found) < len(parts):
        cut, text = parts[len(found)], message.removesuffix("…")
        least = max(FIXED - sum(map(len, found)), 1)
        if cut[:least] in text:
            sizes = range(len(cut), least - 1, -1)
            found += [cut[:size] for size in sizes if text.endswith(cut[:size])][:1]
    return found if sum(map(len, found)) >= FIXED else []


def share_of_sources(message: str) -> float:
    """Return the share of a message that comes from texts that are whole in it, or cut by it."""
    covered: set[int] = set()
    for template in templates():
        if parts := shown(template, message):
            pattern = ".*?".join(f"({re.escape(part)})" for part in parts)
            if match := re.search(pattern, message):
                for group in range(1, len(parts) + 1):
                    covered.update(range(*match.span(group)))
    return len(covered) / len(message)


@pytest.mark.parametrize("section", SECTIONS, ids=heading)
def test_messages_on_the_page_are_those_of_the_sources(section: str) -> None:
    message = printed(section)
    assert heading(section) in message
    assert share_of_sources(message) > (0.3 if heading(section) in QUOTING else 0.55), message


def test_a_message_that_has_changed_is_found() -> None:
    message = "rank 0 lost its connection to rank 1, whose process or network failed"
    assert share_of_sources(message) > 0.8
    assert share_of_sources(message.replace("lost its", "lost the")) < 0.2


def test_classes_are_what_the_page_says() -> None:
    rows = re.findall(r"^\| `([\w.]+)` \(`(\w+)`\) \|", CLASSES, re.MULTILINE)
    found = {name.rpartition(".")[2]: base for name, base in rows}
    public = {
        name: kind
        for module in (errors, lab)
        for name, kind in vars(module).items()
        if isinstance(kind, type) and issubclass(kind, (errors.SparcelError, Warning))
    }
    assert found.keys() == public.keys()
    for name, base in found.items():
        assert base in [kind.__name__ for kind in public[name].__mro__[1:]]
