"""Versions from several ranks, and chunks from one rank to the others."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from sparcel import delta
from sparcel.comm import Communicator
from sparcel.delta.parts import Part, piece_of_slice
from sparcel.errors import SparcelError, VersionError
from tests.workers import run_apart

pytestmark = pytest.mark.processes

MESHES = {
    2: [(1, 2), (2, 1)],
    4: [(2, 2), (1, 4)],
}
CUTS = [
    (Shard(0), Shard(1)),
    (Replicate(), Shard(1)),
    (Shard(0), Replicate()),
    (Shard(1), Shard(0)),
]


def whole(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()
        for name, tensor in tensors.items()
    }


def equal(some: Any, others: dict[str, Tensor]) -> None:
    assert set(some) == set(others)
    for name, tensor in others.items():
        assert torch.equal(some[name], tensor), name


def cut(full: Tensor, mesh: Any, how: Any) -> DTensor:
    return distribute_tensor(full.clone(), mesh, how, src_data_rank=None)


def state(mesh: Any, seed: int) -> dict[str, Tensor]:
    """A model of shards in all ways, uneven ones and empty ones too."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    tensors = {f"cut{i}": cut(random(10, 7, 3), mesh, how) for i, how in enumerate(CUTS)}
    one: Tensor = cut(random(1, 5), mesh, (Replicate(), Shard(0)))
    return {**tensors, "one": one, "plain": random(6)}


def moved(tensors: dict[str, Tensor], step: int) -> None:
    for name, tensor in tensors.items():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if name != "still":
            local.view(torch.int16).view(-1)[step % 3 :: 3] += step + 1


def history(comm: Communicator, folder: str, sizes: tuple[int, int], code: str) -> None:
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("outer", "inner"))
    store = delta.Folder(folder)
    publisher = delta.ShardedPublisher(store, anchor_every=3, lag=2, code=code)
    tensors = state(mesh, seed=1)
    follower = delta.Subscriber(store) if comm.rank == 0 else None
    for step in range(5):
        moved(tensors, step)
        if step == 2:
            tensors["new"] = cut(torch.ones(9, 2), mesh, (Shard(0), Replicate()))
            del tensors["cut0"]
        version = publisher.publish(tensors)
        full = whole(tensors)
        assert version == delta.version_of(full, step)
        if follower is not None:
            follower.update()
            equal(follower.tensors, full)
    late = delta.Subscriber(store)
    update = late.update()
    assert update is not None
    equal(late.tensors, full)
    # The same changes for shards that are cut otherwise.
    names = [name for name in full if name.startswith("cut")]
    other = {name: cut(late.tensors[name], mesh, (Shard(2), Shard(0))) for name in names}
    moved(tensors, 5)
    publisher.publish(tensors)
    delta.assign_(other, step.changes() if (step := late.update()) else ())
    full = whole(tensors)
    equal(whole(dict(other)), {name: full[name] for name in names})


@pytest.mark.parametrize(
    ("world_size", "sizes"), [(p, sizes) for p, all_ in MESHES.items() for sizes in all_]
)
@pytest.mark.parametrize("code", ["exponents", "values"])
def test_shards_make_whole_versions(
    run_on: Any, tmp_path: Path, world_size: int, sizes: tuple[int, int], code: str
) -> None:
    run_on(world_size, history, str(tmp_path), sizes, code)


def trained(comm: Communicator, folder: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(11, 7), nn.Linear(7, 5)).bfloat16()
    model[1].weight.data[0] = 0
    for part in (*model, model):
        fully_shard(part)
    store = delta.Folder(folder)
    publisher = delta.ShardedPublisher(store)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    served = nn.Sequential(nn.Linear(11, 7), nn.Linear(7, 5)).bfloat16()
    subscriber = delta.Subscriber(store, served)
    for _ in range(3):
        model(torch.ones(2, 11).bfloat16()).float().square().mean().backward()
        optimiser.step()
        publisher.publish(model)
        full = whole(model.state_dict())
        if comm.rank == 0:
            subscriber.update()
            equal(served.state_dict(), full)


def test_fsdp_publishes_to_a_module(run_on: Any, tmp_path: Path) -> None:
    run_on(3, trained, str(tmp_path))


class Broken(delta.Folder):
    """A folder that one rank cannot write to while it is broken."""

    broken = False

    def write(self, name: str, parts: Any) -> int:
        if self.broken:
            raise OSError("no space left")
        return super().write(name, parts)


def failing(comm: Communicator, folder: str, rank: int) -> list[str]:
    mesh = init_device_mesh("cpu", (1, comm.size))
    store = Broken(folder)
    publisher = delta.ShardedPublisher(store)
    tensors = state(mesh, seed=2)
    publisher.publish(tensors)
    before = delta.read_index(store)
    moved(tensors, 1)
    store.broken = comm.rank == rank
    with pytest.raises((VersionError, OSError)) as told:
        publisher.publish(tensors)
    store.broken = False
    assert delta.read_index(store) == before
    assert publisher.version is None
    full = whole(tensors)
    version = publisher.publish(tensors)
    if comm.rank == 0:
        reader = delta.Subscriber(store)
        reader.update()
        assert reader.version == version
        equal(reader.tensors, full)
    return [type(told.value).__name__]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_version_is_there_from_all_ranks_or_not_at_all(
    run_on: Any, tmp_path: Path, rank: int
) -> None:
    errors = run_on(2, failing, str(tmp_path), rank)
    assert errors[rank] == ["OSError"]
    assert errors[1 - rank] == ["VersionError"]


def given(comm: Communicator, root: int, sizes: list[int]) -> list[int]:
    """Broadcast chunks of these sizes, and return the sizes that came."""
    chunks = [bytes([i % 251]) * size for i, size in enumerate(sizes)]
    mine = chunks if comm.rank == root else None
    blocking = delta.broadcast(mine, root=root)
    arriving = delta.broadcast(mine, root=root, async_op=True)
    assert blocking == arriving.wait() == chunks
    return [len(chunk) for chunk in blocking]


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("sizes", [[], [0], [1, 0, 7], [100_000, 3, 20_001]])
def test_broadcast_gives_all_ranks_the_chunks(
    run_on: Any, world_size: int, sizes: list[int]
) -> None:
    assert run_on(world_size, given, world_size - 1, sizes) == [sizes] * world_size


def nothing_to_send(comm: Communicator) -> str:
    with pytest.raises(SparcelError) as told:
        delta.broadcast(None)
    return str(told.value)


def test_broadcast_needs_chunks_at_the_root() -> None:
    outcomes = run_apart(2, nothing_to_send, timeout=20)
    assert "root" in outcomes[0].result


@pytest.mark.parametrize(
    ("shape", "starts", "lengths"),
    [
        ((6, 4), (2, 0), (3, 4)),
        ((6, 4), (0, 1), (6, 2)),
        ((6, 4, 5), (1, 2, 0), (3, 2, 5)),
        ((6, 4, 5), (2, 1, 3), (1, 2, 2)),
        ((6, 4), (6, 0), (0, 4)),
        ((), (), ()),
    ],
)
def test_a_slice_counts_as_the_whole_does(
    shape: tuple[int, ...], starts: tuple[int, ...], lengths: tuple[int, ...]
) -> None:
    numbers = torch.arange(torch.Size(shape).numel()).view(shape)
    slices = tuple(slice(s, s + n) for s, n in zip(starts, lengths, strict=True))
    local = numbers[slices].clone()
    piece = piece_of_slice("x", numbers.dtype, shape, starts, lengths)
    assert torch.equal(piece.numbers(torch.arange(piece.count)), local.view(-1))
    part = Part(piece, local)
    for begin, one in part.pieces():
        assert torch.equal(
            one.numbers(torch.arange(one.count)), part.elements(begin, begin + one.count)
        )
        assert part.begin_of(one) == begin
    here, places = part.here(numbers.view(-1))
    assert torch.equal(numbers.view(-1)[here], local.view(-1)[places])
