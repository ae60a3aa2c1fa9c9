"""What is published is what a cast makes, and so is what subscribers get."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from sparcel.core.comm import Communicator
from sparcel.errors import InputError
from sparcel.products.delta import (
    Folder,
    Publisher,
    ShardedPublisher,
    Subscriber,
    read_index,
    version_of,
)
from tests.delta.pairs import same


def rows(name: str, weight: Tensor) -> dict[str, Tensor]:
    """Eight bits, with a scale for each row."""
    if weight.dim() < 2:
        return {name: weight}
    scale = weight.float().abs().amax(1, keepdim=True) / 127
    return {name: (weight / scale).round().to(torch.int8), f"{name}_scale": scale}


def model(tied: bool = False) -> nn.Module:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(40, 40), nn.LayerNorm(40), nn.Linear(40, 40, bias=False))
    if tied:
        made[2].weight = made[0].weight
    return made.bfloat16()


def moved(trained: nn.Module) -> None:
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.mul_(1 + 1e-3 * torch.randn_like(parameter))


@pytest.mark.parametrize("tied", [False, True])
def test_servers_get_what_the_cast_makes(tmp_path: Path, tied: bool) -> None:
    trained, calls = model(tied), []

    def cast(name: str, weight: Tensor) -> dict[str, Tensor]:
        calls.append(name)
        assert not torch.is_grad_enabled()
        return rows(name, weight)

    publisher, subscriber = Publisher(tmp_path, cast=cast, anchor_every=2), Subscriber(tmp_path)
    for number in range(5):
        moved(trained)
        version = publisher.publish(trained)
        subscriber.update()
        state = trained.state_dict()
        expected = {k: v for name, one in state.items() for k, v in rows(name, one).items()}
        assert same(subscriber.tensors, expected)
        subscriber.verify()
        assert len(calls) == (number + 1) * len(state), "each tensor is cast once a version"
        assert subscriber.version == version
        assert (version == version_of(expected, number)) is not tied
    weights = [subscriber.tensors[f"{i}.weight{what}"] for i in (0, 2) for what in ("", "_scale")]
    assert (weights[0] is weights[2], weights[1] is weights[3]) == (tied, tied)
    entries = read_index(tmp_path).entries
    assert all(entry.changed < entry.elements for entry in entries if entry.kind == "delta")


def test_a_publisher_that_restarts_goes_on(tmp_path: Path) -> None:
    trained = model()
    Publisher(tmp_path, cast=rows).publish(trained)
    moved(trained)
    Publisher(tmp_path, cast=rows).publish(trained)
    assert [entry.kind for entry in read_index(tmp_path).entries] == ["anchor", "delta"]


def test_what_a_cast_may_not_return(tmp_path: Path) -> None:
    weights = {"a": torch.ones(3), "b": torch.ones(3)}
    for cast, match in (
        (lambda _, weight: weight, r"by name, and returned for 'a' tensor\("),
        (lambda _, weight: {0: weight}, r"by name, and returned for 'a' \{0: tensor"),
        (lambda _, weight: {"w": weight}, "the cast of 'b' makes 'w', which that of another"),
        (lambda _, weight: {}, "there are no tensors to publish"),
    ):
        with pytest.raises(InputError, match=match):
            Publisher(tmp_path, cast=cast).publish(weights)
    with pytest.raises(InputError, match=r"^cast must be a function, got dtype$"):
        Publisher(tmp_path, cast=torch.float16)  # type: ignore[arg-type]
    tied = {"a": weights["a"], "b": weights["a"]}
    for cast in (
        lambda name, weight: {name: weight + (name == "b")},
        lambda name, weight: {name: weight} if name == "a" else {},
    ):
        with pytest.raises(InputError, match="'b' makes other tensors than that of another one"):
            Publisher(tmp_path, cast=cast).publish(tied)
    with pytest.raises(InputError, match="leave one of them out"):
        Publisher(tmp_path, cast=rows, bracketed=True)
    assert not read_index(tmp_path).entries


def sharded(comm: Communicator, folder: str) -> None:
    """Shards of rows have scales of their own, so each rank casts its shard."""
    whole, trained = model(), model()
    for layer in (*trained, trained):
        fully_shard(layer, mesh=init_device_mesh("cpu", (comm.size,)))
    publisher = ShardedPublisher(Folder(folder), cast=rows)
    subscriber = Subscriber(Folder(folder))
    for step in range(3):
        for full, part in zip(whole.parameters(), trained.parameters(), strict=True):
            with torch.no_grad():
                full.mul_(1 + 2**-7 * (step + 1))
                part.mul_(1 + 2**-7 * (step + 1))
        publisher.publish(trained)
        subscriber.update()
        state = whole.state_dict()
        expected = {k: v for name, one in state.items() for k, v in rows(name, one).items()}
        assert same(subscriber.tensors, expected)


@pytest.mark.processes
def test_each_rank_casts_its_shard(run_on: Any, tmp_path: Path) -> None:
    run_on(3, sharded, str(tmp_path))
