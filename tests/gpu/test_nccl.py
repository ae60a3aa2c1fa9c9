"""Exchanges over NCCL, with several ranks on one GPU, have the bits of those by way of the host.

It has not run yet: see the README beside it for the NCCL that it needs.
"""

from __future__ import annotations

import ctypes
import signal
from functools import partial
from typing import Any

import pytest

from tests import nccl
from tests.gpu.cuda import needs_gpu
from tests.gpu.models import methods
from tests.workers import run_apart

SHARING = (2, 30)
"""The first version of NCCL that lets ranks share a GPU."""


def loaded_version() -> tuple[int, int]:
    """Return the version of the NCCL that this process uses; (0, 0) if there is none.

    torch tells the one that it was built with, although another may be preloaded.
    """
    number = ctypes.c_int()
    try:
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number))
    except OSError:
        return 0, 0
    return divmod(number.value // 100, 100)


FOUND = loaded_version()

pytestmark = [
    *needs_gpu,
    pytest.mark.processes,
    pytest.mark.skipif(
        FOUND < SHARING,
        reason=f"ranks share a GPU from NCCL {SHARING} on, and this one is {FOUND}",
    ),
]

worlds = pytest.mark.parametrize("world_size", [2, 4])


@worlds
@pytest.mark.parametrize("in_rows", [True, False])
def test_rows_are_swapped_and_spread_without_a_wait(
    run_on: Any, world_size: int, in_rows: bool
) -> None:
    nccl.check_rows(run_on(world_size, nccl.rows_of, in_rows), in_rows)


@worlds
def test_every_scheme_has_the_bits_of_gloo(run_on: Any, world_size: int) -> None:
    run_on(world_size, nccl.steps_in_both_ways, list(nccl.EVERY))


@worlds
@pytest.mark.parametrize("name", ["bidirectional 4 bits", "topk"])
@pytest.mark.parametrize("sharded", [False, True])
def test_averages_have_the_bits_of_gloo(
    run_on: Any, world_size: int, name: str, sharded: bool
) -> None:
    run_on(world_size, nccl.average_in_both_ways, name, sharded)


@worlds
def test_ranks_that_queue_others_find_it_before_anything_commits(
    run_on: Any, world_size: int
) -> None:
    nccl.check_others(run_on(world_size, nccl.queue_others))


@worlds
@methods
def test_training_in_ddp_has_the_bits_of_gloo(
    run_on: Any, world_size: int, method: dict[str, Any]
) -> None:
    run_on(world_size, partial(nccl.train_in_both_ways, **method), "cuda")


@worlds
@pytest.mark.parametrize("program", list(nccl.ENDS))
def test_all_ranks_end_when_one_dies_disagrees_or_is_late(world_size: int, program: str) -> None:
    ends = run_apart(world_size, nccl.end_in, program, timeout=nccl.TIMEOUT)
    if program == "die":
        assert ends.pop(nccl.CULPRIT).died == -signal.SIGKILL
    nccl.check_ends([end.result for end in ends], program)
