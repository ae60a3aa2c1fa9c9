"""Jobs whose communicator fails before they end, and when connections close, without any ranks."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch.distributed as dist

from sparcel.core.comm.executor import Executor, _check_all
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


def test_connections_close_when_nothing_is_under_way_and_all_ranks_have_let_go() -> None:
    store, engine = dist.HashStore(), Mock(waiting=True)
    executor = Executor(0, Failure(dist.HashStore(), 1))
    executor.engines += [Mock(waiting=False), engine]
    executor.release(engine, Failure(store, 2))
    _check_all()
    assert store.add("done", 0) == 0
    engine.waiting = False
    for _ in range(3):
        _check_all()
        assert engine in executor.engines
    assert Failure(store, 2).finish(0.0)
    _check_all()
    assert engine not in executor.engines
    executor.close(None)
