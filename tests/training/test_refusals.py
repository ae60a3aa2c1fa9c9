"""Inputs that an averager refuses, and the error messages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from sparcel import simulate
from sparcel.core.comm import Communicator
from sparcel.core.schemes import Dense, TopK
from sparcel.errors import CommunicationError, InputError, MismatchError, SparcelWarning
from tests.evenly import even_averager
from tests.training.tensors import TENSORS, Named, gradients_of


def changed(name: str, gradient: Tensor) -> Named:
    return gradients_of(0, 0) | {name: gradient}


@pytest.mark.parametrize(
    ("gradients", "said"),
    [
        ({"first": torch.zeros(40, 30)}, r"missing \['bias', 'second', 'third'\], unknown \[\]"),
        (changed("fourth", torch.zeros(2)), r"missing \[\], unknown \['fourth'\]"),
        (changed("bias", torch.zeros(41)), r"'bias' must be .* of shape \(40,\) .* \(41,\)"),
        (
            changed("bias", torch.zeros(40).half()),
            r"'bias' must be .*float32 .* got dense .*float16",
        ),
        (
            changed("bias", torch.zeros(40).to_sparse()),
            r"got sparse .*; name sparse gradients in rows",
        ),
    ],
    ids=["missing", "unknown", "shape", "dtype", "sparse"],
)
def test_gradients_that_do_not_fit_are_named(gradients: Named, said: str) -> None:
    def on_rank(comm: Communicator) -> None:
        averager = even_averager(TENSORS, TopK(), group=comm)
        with pytest.raises(InputError, match=said):
            averager.average(gradients)
        averager.average(gradients_of(0, 0))

    simulate(1, on_rank)


@pytest.mark.parametrize(
    ("vector", "places", "said"),
    [
        (torch.zeros(40, 30), {"first": (0, 1200)}, r"one-dimensional .* shape \(40, 30\)"),
        (torch.zeros(80)[::2], {"bias": (0, 40)}, r"contiguous, .* strides \(2,\)"),
        (torch.zeros(40), {"bia": (0, 40)}, "not made for a tensor named 'bia'"),
        (torch.zeros(90), {"bias": (0, 50)}, r"'bias' has 40 .* \[0, 50\) of a vector of 90"),
        (torch.zeros(90), {"bias": (60, 100)}, r"do not fit in \[60, 100\)"),
        (torch.zeros(40).to_sparse(), {"bias": (0, 40)}, "must be dense, .* torch.sparse_coo"),
        (torch.zeros(40, device="meta"), {"bias": (0, 40)}, "on cpu, got a vector on meta"),
        *[
            (torch.zeros(40).to(dtype), {"bias": (0, 40)}, f"must be dense, .* got {dtype}")
            for dtype in (torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn)
        ],
    ],
    ids=str,
)
def test_vectors_and_places_that_do_not_fit_are_named(
    vector: Tensor, places: Any, said: str
) -> None:
    def on_rank(comm: Communicator) -> None:
        averager = even_averager(TENSORS, TopK(), group=comm)
        with pytest.raises(InputError, match=said):
            averager.queue(vector, places)
        averager.average(gradients_of(0, 0))


def test_a_vector_that_requires_a_gradient_is_averaged_as_others_are() -> None:
    def on_rank(comm: Communicator) -> None:
        averager = even_averager(TENSORS, TopK(), group=comm)
        vector = torch.full((40,), 1.0 + comm.rank, requires_grad=True)
        averager.queue(vector, {"bias": (0, 40)})
        averager.finish()
        assert vector.is_leaf and torch.equal(vector, torch.full((40,), 1.5))

    simulate(2, on_rank)


def test_averagers_of_floats_of_8_bits_are_refused() -> None:
    def on_rank(comm: Communicator) -> None:
        with pytest.raises(InputError, match="of 16 bits or more, 'tiny' has torch"):
            even_averager({"tiny": torch.zeros(3).to(torch.float8_e5m2)}, TopK(), group=comm)

    simulate(1, on_rank)


def test_tensors_that_cannot_be_averaged_are_refused() -> None:
    def on_rank(comm: Communicator) -> None:
        with pytest.raises(InputError, match="one device, got no tensors"):
            even_averager({}, TopK(), group=comm)
        with pytest.raises(InputError, match=r"one device, got .*cpu.*meta"):
            even_averager(TENSORS | {"far": torch.zeros(3, device="meta")}, TopK(), group=comm)
        with pytest.raises(InputError, match="on meta, the group communicates from cpu"):
            even_averager({"far": torch.zeros(3, device="meta")}, TopK(), group=comm)
        with pytest.warns(SparcelWarning, match="densities are for schemes that select"):
            even_averager(TENSORS, Dense(), group=comm, densities={"first": 0.1})
        averager = even_averager(TENSORS, TopK(), group=comm)
        with pytest.raises(InputError, match=r"call queue\(\) before finish\(\)"):
            averager.finish()
        averager.handle.close()
        with pytest.raises(CommunicationError, match="the averager was closed"):
            averager.average(gradients_of(comm.rank, 0))
        comm.gather_numbers(1)  # the group stays open

    simulate(1, on_rank)


def test_ranks_that_average_different_tensors_are_refused() -> None:
    def on_rank(comm: Communicator) -> None:
        even_averager(TENSORS, TopK(0.1 if comm.rank == 1 else 0.2), group=comm)

    with pytest.raises(MismatchError, match="average something else than rank"):
        simulate(3, on_rank)
