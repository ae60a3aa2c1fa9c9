"""What CONTRIBUTING.md sends newcomers to exists, and a release's papers name its version."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def section(title: str) -> str:
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_files_of_the_first_changes_exist_and_new_ones_do_not() -> None:
    paths = re.findall(
        r"(new )?`((?:src|tests|docs|examples)/[\w./-]+)`", section("Good first changes")
    )
    assert len(paths) > 15
    for new, path in paths:
        assert (ROOT / path).is_file() != bool(new), path


def test_all_make_targets_are_in_the_table() -> None:
    targets = re.findall(r"^([a-z]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE)
    named = re.findall(r"^\| `make ?([a-z]*)` \|", section("Setting up"), re.MULTILINE)
    assert sorted(name or "help" for name in named) == sorted(targets)


def test_the_version_is_the_same_in_all_papers_of_the_release() -> None:
    release = f"## [{PROJECT['version']}] - "
    (heading,) = [
        line
        for line in (ROOT / "CHANGELOG.md").read_text().splitlines()
        if line.startswith(release)
    ]
    citation = (ROOT / "CITATION.cff").read_text().splitlines()
    assert f"version: {PROJECT['version']}" in citation
    assert f"date-released: {heading.removeprefix(release)}" in citation
    assert f"license: {PROJECT['license']}" in citation
