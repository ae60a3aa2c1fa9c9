"""All algorithms over MPI, one on each world size that the tests of all engines leave out."""

from itertools import cycle

import pytest
import torch

from sparcel.core.collectives import ALGORITHMS
from tests.collectives.test_processes import all_cases, reduce_cases
from tests.strategies import dense_reference, full

pytestmark = pytest.mark.processes


@pytest.mark.parametrize(
    ("name", "world_size"), list(zip([*ALGORITHMS, "auto"], cycle([1, 5, 6, 7])))
)
def test_all_reduce_equals_the_dense_reference(run_on_mpi, world_size, name):
    cases = [case for case in all_cases(world_size, name) for _ in range(2)]
    for case, *results in zip(cases, *run_on_mpi(world_size, reduce_cases, name), strict=True):
        expected = dense_reference(case.streams, case.op)
        assert all(torch.equal(full(result, case.op), expected) for result in results)
