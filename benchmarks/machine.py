"""Where and when a benchmark ran, for the head of its results."""

from __future__ import annotations

import subprocess
import sys
from datetime import UTC, datetime
from typing import Any

from sparcel.bench import results


def machine() -> dict[str, Any]:
    """Describe the machine, the commit and the date."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return {
        **results.machine(),
        "commit": commit.stdout.strip(),
        "command": " ".join(["python", *sys.argv]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
