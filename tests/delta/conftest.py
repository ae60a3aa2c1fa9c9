"""What all tests of deltas have in common."""

from collections.abc import Iterator
from unittest.mock import patch

import pytest


@pytest.fixture(scope="package", autouse=True)
def _no_waiting_for_disks() -> Iterator[None]:
    with patch("os.fsync"):
        yield
