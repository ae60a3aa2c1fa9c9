"""Where and when a benchmark ran, for the head of its results."""

from __future__ import annotations

import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch


def machine() -> dict[str, Any]:
    """Describe where this runs."""
    info = Path("/proc/cpuinfo")
    models = [
        line.split(":", 1)[1].strip()
        for line in (info.read_text().splitlines() if info.exists() else [])
        if line.startswith("model name")
    ]
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return {
        "processor": models[0] if models else platform.processor(),
        "cores": len(models),
        "system": platform.platform(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": commit.stdout.strip(),
        "command": " ".join(["python", *sys.argv]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
