"""Sums of short dense arrays, which travel as they are."""

import numpy as np
import pytest
import torch

from sparcel import simulate
from sparcel.core.collectives.doubling import plain_sum


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("shape", [(), (0, 2), (4, 2)])
def test_all_ranks_get_the_sum_with_the_same_bits(ranks, shape):
    own = [np.random.default_rng(rank).standard_normal(shape) for rank in range(ranks)]

    def run(comm):
        given = torch.tensor(own[comm.rank])
        found = comm.run(lambda: plain_sum(given, comm))
        assert (given.numpy() == own[comm.rank]).all()
        assert (found.shape, found.dtype) == (given.shape, given.dtype)
        return found.numpy().tobytes()

    found = simulate(ranks, run).results
    assert found == [found[0]] * ranks
    total = np.frombuffer(found[0]).reshape(shape)
    assert total == pytest.approx(np.sum(own, axis=0))
