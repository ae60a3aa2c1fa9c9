"""What worker processes have imported when they start: see `tests.workers`."""

import gc

import hypothesis.strategies  # noqa: F401
import pytest  # noqa: F401
import torch._dynamo  # noqa: F401

import sparcel.core.attaching  # noqa: F401

# It stays: no garbage collector need look at it, which would copy its pages in every process.
gc.freeze()
