"""Pages that pytest is given are run: ``pytest README.md CONTRIBUTING.md docs``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent
DOCS = ROOT / "docs"
TESTS = ROOT / "tests"


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> Any:
    """Collect the blocks of a page of the root or of the site; `tests.printed` needs sybil."""
    asked = any(one in (file_path, *file_path.parents) for one in _asked(parent.config))
    page = file_path.parent == ROOT or DOCS in file_path.parents
    if asked and page and file_path.suffix == ".md":
        from tests.printed import collect

        return collect(file_path, parent)
    return None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Run the blocks of a page in one process, in their order."""
    if all(TESTS in (path, *path.parents) for path in _asked(config)):
        return None
    from xdist.scheduler import LoadFileScheduling

    return LoadFileScheduling(config, log)


def _asked(config: pytest.Config) -> list[Path]:
    """Return the files and folders that pytest is given."""
    return [Path(one.partition("::")[0]).resolve() for one in config.args]
