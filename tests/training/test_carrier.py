"""Tensors on a GPU are averaged over any group; the host carries them, or NCCL."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from sparcel import simulate
from sparcel.core.comm import Communicator, TorchCommunicator, carry
from sparcel.core.comm import torch as over_torch
from sparcel.core.schemes import TopK
from sparcel.core.training.ranks import Carrier, check_carrier, connected
from sparcel.errors import InputError, MismatchError
from tests.card import moved, on_card, seen
from tests.evenly import even_averager
from tests.training.tensors import SCHEMES, TENSORS, Named, gradients_of

pytest.importorskip("triton")


def train(comm: Communicator | None, scheme: str, gpu: bool, **settings: Any) -> list[Named]:
    """Return the updates of some steps, on the card or on the CPU."""
    there = moved if gpu else torch.clone
    tensors = {name: there(tensor) for name, tensor in TENSORS.items()}
    averager = even_averager(tensors, SCHEMES[scheme](), group=comm, **settings)
    rank = averager._session.ranks.comm.rank
    updates = []
    for step in range(3):
        gradients = gradients_of(rank, step)
        if step == 1:
            gradients["second"].zero_()
        averaged = averager.average({name: there(one) for name, one in gradients.items()})
        updates.append({name: seen(update).tolist() for name, update in averaged.items()})
    carried = " by way of the host" in repr(averager.handle)
    assert carried == gpu
    averager.handle.close()
    return updates


@pytest.mark.parametrize(("scheme", "scope"), [("topk", "bucket"), ("filtered", "model")])
def test_gradients_that_are_zero_are_withheld_on_the_card(scheme: str, scope: str) -> None:
    """`tests.training.test_on_card` has other schemes, without such gradients."""
    settings = {"scope": scope, "withhold_zeros": True}
    expected = simulate(2, lambda comm: train(comm, scheme, False, **settings)).results
    with on_card():
        assert simulate(2, lambda comm: train(comm, scheme, True, **settings)).results == expected


def train_in_process(comm: Communicator) -> list[Named]:
    with on_card():
        return train(None, "topk", True)


@pytest.mark.processes
def test_a_group_of_the_host_carries_tensors_of_the_card(run_on: Any) -> None:
    expected = simulate(2, lambda comm: train(comm, "topk", False)).results
    assert run_on(2, train_in_process) == expected


def refusal(carrier: Any, gpu: bool) -> str:
    def on_rank(comm: Communicator) -> str:
        tensors = {"weight": moved(torch.zeros(40, 30)) if gpu else torch.zeros(40, 30)}
        with pytest.raises(InputError) as caught:
            even_averager(tensors, TopK(), group=comm, carrier=carrier)
        return str(caught.value)

    with on_card():
        return simulate(1, on_rank).results[0]


def test_carriers_that_do_not_fit_are_refused() -> None:
    assert "carrier cannot be 'hots'; did you mean 'host'? It must be one of host, nccl" in refusal(
        "hots", True
    )
    assert "carrier='nccl' is for tensors on a GPU of CUDA, and these are on cpu" in refusal(
        "nccl", False
    )
    said = "needs a process group with NCCL, and the ranks are connected by a simulated cluster by"
    assert said in refusal("nccl", True)
    over_nccl: Any = SimpleNamespace(carrier="NCCL")
    check_carrier("nccl", over_nccl)
    with pytest.raises(InputError, match="or its process group as group="):
        check_carrier("host", over_nccl)


def test_ranks_that_were_told_different_carriers_are_refused() -> None:
    def on_rank(comm: Communicator) -> None:
        told: Carrier = "host" if comm.rank else "nccl"
        even_averager({"weight": moved(torch.zeros(40, 30))}, TopK(), group=comm, carrier=told)

    with on_card(), pytest.raises(MismatchError, match="scope, carrier and tensors"):
        simulate(2, on_rank)


def asked(comm: Communicator) -> list[str | None]:
    """Return the type of device that each case asks the group to communicate from."""
    places = []
    own = TorchCommunicator.of

    def of(group: dist.ProcessGroup, place: torch.device | None) -> TorchCommunicator:
        places.append(None if place is None else place.type)
        return own(group)

    with on_card() as card, patch.object(TorchCommunicator, "of", of):
        cases: list[tuple[torch.device, Carrier]]
        cases = [(card, "host"), (card, "nccl"), (torch.device("cpu"), "host")]
        for device, carrier in cases:
            _, owned = connected(None, device, carrier)
            assert owned is not None
            owned.close()
    return places


@pytest.mark.processes
def test_tensors_of_a_gpu_leave_by_the_host_unless_nccl_is_asked_for(run_on: Any) -> None:
    assert run_on(1, asked) == [["cpu", "card", None]]


def over_the_mesh(comm: Communicator) -> list[tuple[str, str, list[int]]]:
    """Connect ranks by a group as if it had NCCL, when rank 0 alone is told to use the host."""
    with (
        patch.object(over_torch, "_backend", lambda _: "nccl"),
        patch.object(torch.cuda, "current_device", lambda: 0),
        patch.object(torch.cuda, "device", lambda _: nullcontext()),
    ):
        place = torch.device("cpu") if comm.rank == 0 else None
        made = TorchCommunicator.of(dist.group.WORLD, place)
    found = made.device.type, made.carrier, made.gather_numbers(comm.rank)
    made.close()
    return [found]


@pytest.mark.processes
def test_a_group_with_nccl_can_use_the_mesh_and_rank_0_decides(run_on: Any) -> None:
    assert run_on(2, over_the_mesh) == [[("cpu", "Gloo", [0, 1])]] * 2


def test_a_communicator_that_is_passed_stays_open() -> None:
    def on_rank(comm: Communicator) -> None:
        staged = carry(comm, torch.device("card", 0))
        averager = even_averager({"weight": moved(torch.zeros(40, 30))}, TopK(), group=comm)
        assert averager._session.ranks.comm is staged
        assert averager._session.ranks.owned is None

    with on_card():
        simulate(1, on_rank)
