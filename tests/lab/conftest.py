"""Fixtures of the lab's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparcel.tools.lab import EmulatedNetwork, LabUnavailableError, Link


@pytest.fixture(scope="session")
def emulation() -> None:
    """Skip a test if this system permits no emulated network."""
    try:
        EmulatedNetwork(1, Link()).close()
    except LabUnavailableError as error:
        pytest.skip(f"no emulated network: {error}")


@pytest.fixture
def programs() -> str:
    """Return the path of the file with the programs to run as processes."""
    return str(Path(__file__).with_name("programs.py"))
