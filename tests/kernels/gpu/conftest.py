"""What all tests of the kernels for GPUs share."""

from collections.abc import Iterator

import pytest
import torch

from tests.card import interpreted


@pytest.fixture(scope="package", autouse=True)
def interpreter() -> Iterator[None]:
    """Let Triton's interpreter, where it takes the place of a GPU, round as a GPU does."""
    if torch.cuda.is_available():
        yield
    else:
        with interpreted():
            yield
