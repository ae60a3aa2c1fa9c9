"""What frameworks find around the ranks of the pool, and what tests of all of them compare."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from sparcel.core.comm import Communicator
from sparcel.core.training import Stats
from sparcel.errors import SparcelWarning


@dataclass
class Trained:
    """What a rank has after a training: ``memory`` is a state, its own or that of all ranks."""

    parameters: list[Tensor]
    memory: dict[str, Tensor]
    stats: Stats | None


def needs(*frameworks: str) -> list[pytest.MarkDecorator]:
    """Return the marks of a module whose workers import frameworks, which takes seconds each."""
    missing = [name for name in frameworks if find_spec(name) is None]
    return [
        pytest.mark.skipif(bool(missing), reason=f"without {', '.join(missing)}"),
        pytest.mark.slow,
        pytest.mark.processes,
    ]


@contextmanager
def as_by_torchrun(comm: Communicator) -> Iterator[None]:
    """Set what torchrun tells its processes; the process group is there already."""
    told = {"RANK": comm.rank, "LOCAL_RANK": comm.rank, "GROUP_RANK": 0}
    told |= {"WORLD_SIZE": comm.size, "LOCAL_WORLD_SIZE": comm.size}
    told |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1, "TORCHELASTIC_RUN_ID": "test"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in told.items():
            patch.setenv(name, str(value))
        yield


@contextmanager
def as_by_accelerate(comm: Communicator) -> Iterator[None]:
    """Let Accelerate, which keeps what it has found, find the ranks, and forget them."""
    from accelerate.state import AcceleratorState, GradientState

    with as_by_torchrun(comm):
        try:
            yield
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()


def said(warned: Iterable[object]) -> list[str]:
    """Return the messages of sparcel's own warnings."""
    found = [getattr(one, "message", None) for one in warned]
    return [str(message) for message in found if isinstance(message, SparcelWarning)]


def assert_not_interrupted(ranks: list[tuple[Trained, Trained]], steps: int, saved: int) -> None:
    """Check that each rank's second training ends as its first, which saved after some steps."""
    (first, _), *_ = ranks
    for through, resumed in ranks:
        assert through.stats is not None
        assert resumed.stats is not None
        assert through.stats.steps == steps
        assert through.stats.compression > 5
        assert resumed.stats.steps == steps - saved
        assert resumed.stats.training_steps == through.stats.training_steps
        for others in (resumed, first):
            assert len(through.parameters) == len(others.parameters)
            assert all(map(torch.equal, through.parameters, others.parameters))
        assert through.memory.keys() == resumed.memory.keys()
        assert all(torch.equal(part, resumed.memory[key]) for key, part in through.memory.items())


def largest(memory: dict[str, Tensor], rank: int) -> float:
    """Return the largest magnitude of what a rank remembers."""
    parts = [part for key, part in memory.items() if key.startswith(f"rank{rank}.")]
    return max(part.abs().max().item() for part in parts)
