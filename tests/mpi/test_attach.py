"""A scheme's traffic on MPI, while DDP itself stays on Gloo."""

from __future__ import annotations

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from sparcel.core.comm import Communicator
from tests.evenly import attach_evenly
from tests.strategies import same_bits

pytestmark = pytest.mark.processes


def train(comm: Communicator, name: str, on_mpi: bool) -> tuple[list[torch.Tensor], int]:
    """Return the parameters after some steps, and the bytes sent over MPI."""
    torch.manual_seed(3)
    layers = torch.nn.Sequential(torch.nn.Linear(40, 60), torch.nn.ReLU(), torch.nn.Linear(60, 5))
    model = DistributedDataParallel(layers)
    before = comm.traffic.bytes_sent
    handle = attach_evenly(model, name, density=0.1, group=comm if on_mpi else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(comm.rank)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(8, 40, generator=generator)).square().mean().backward()
        optimizer.step()
    handle.close()
    return [p.detach() for p in model.parameters()], comm.traffic.bytes_sent - before


@pytest.mark.parametrize("name", ["oktopk", "gtopk"])
def test_training_over_mpi_equals_training_over_gloo(run_on_mpi, name: str) -> None:
    over_gloo = run_on_mpi(4, train, name, False)
    over_mpi = run_on_mpi(4, train, name, True)
    for (expected, nothing), (parameters, nbytes) in zip(over_gloo, over_mpi, strict=True):
        assert all(map(same_bits, parameters, expected))
        assert nothing == 0 < nbytes
