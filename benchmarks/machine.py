"""Where and when a benchmark ran, for the head of its results."""

from __future__ import annotations

import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import sparcel
from sparcel.tools.bench import results


def machine() -> dict[str, Any]:
    """Describe the machine, the commit of the package that is measured, and the date."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=Path(sparcel.__file__).parent,  # not the script's, which may be of another checkout
        capture_output=True,
        text=True,
        check=False,
    )
    return {
        **results.machine(),
        "commit": commit.stdout.strip(),
        "command": " ".join(["python", *itself(), *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def itself() -> list[str]:
    """Return what Python is called with to run this program again, without its arguments."""
    return ["-m", sys.modules["__main__"].__spec__.name]
