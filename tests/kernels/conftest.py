"""What all tests of the kernels share."""

import faulthandler
import sys
from collections.abc import Iterator

import pytest

LIMIT = 240
"""Seconds after which a test is taken to hang."""


@pytest.fixture(autouse=True)
def limited() -> Iterator[None]:
    """End the process of a test that hangs: nothing else interrupts compiled code."""
    faulthandler.dump_traceback_later(LIMIT, exit=True, file=sys.__stderr__)
    yield
    faulthandler.cancel_dump_traceback_later()
