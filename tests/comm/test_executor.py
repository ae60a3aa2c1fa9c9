"""What becomes of a job whose communicator fails before it ends, without any ranks."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch.distributed as dist

from sparcel.core.comm.executor import Executor
from sparcel.core.comm.failure import Cause, Failure
from sparcel.errors import CommunicationError


@pytest.mark.parametrize("hides_aborts", [False, True])
def test_a_job_that_has_ended_returns_unless_its_transfers_may_have_been_aborted(
    hides_aborts: bool,
) -> None:
    """A rank that is slow to end must not lose a step that the others have, because they left."""
    executor = Executor(0, Failure(dist.HashStore(), 2))
    executor.engines.append(Mock(hides_aborts=hides_aborts, waiting=False))

    def job() -> int:
        executor.abort(Cause("rank 1 closed its communicator before the others"))  # as the monitor
        return 7

    if hides_aborts:
        with pytest.raises(CommunicationError, match="rank 1 closed"):
            executor.run(job)
    else:
        assert executor.run(job) == 7
    with pytest.raises(CommunicationError, match="the communicator is dead: rank 1 closed"):
        executor.run(job)
    executor.close(None)
