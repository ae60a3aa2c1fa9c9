"""Versions from several ranks, and chunks from one rank to the others."""

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from sparcel.core.comm import Communicator
from sparcel.errors import InputError, MismatchError, SparcelError, VersionError
from sparcel.products import delta
from sparcel.products.delta import publisher as publisher_module
from sparcel.products.delta import sharded
from sparcel.products.delta.elements import CHUNK_BYTES, Piece, piece_of_slice
from sparcel.products.delta.parts import Part
from sparcel.products.delta.sharded import Held
from tests.delta.pairs import wholes

pytestmark = pytest.mark.processes

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
    told = late.update()
    assert told is not None
    with pytest.raises(delta.InputError, match=r"'one'.*change and are not in the weights"):
        delta.assign_(other, told.changes())
    delta.assign_(other, told.changes(), partial=True)
    full = whole(tensors)
    equal(whole(dict(other)), {name: full[name] for name in names})


@pytest.mark.parametrize(
    ("sizes", "code"),
    [
        ((1, 2), "exponents"),
        ((2, 1), "values"),
        ((2, 2), "exponents"),
        ((1, 4), "values"),
    ],
)
def test_shards_make_whole_versions(
    run_on: Any, tmp_path: Path, sizes: tuple[int, int], code: str
) -> None:
    run_on(sizes[0] * sizes[1], history, str(tmp_path), sizes, code)


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


class Counted(delta.Folder):
    """A folder that counts the bytes of whole models that are written."""

    written = 0

    def write(self, name: str, parts: Any) -> int:
        size = super().write(name, parts)
        self.written += size * name.startswith("anchor")
        return size


def on_submeshes(comm: Communicator, folder: str) -> None:
    """Each mesh knows some of the ranks that hold a tensor; then others hold it."""
    mesh = init_device_mesh("cpu", (2, comm.size // 2), mesh_dim_names=("outer", "inner"))
    some = DeviceMesh("cpu", [comm.size - 1, 0], _init_backend=False)
    model = nn.Sequential(nn.Linear(80, 70), nn.Linear(70, 5)).bfloat16()
    for tensor in model.state_dict().values():
        comm.run(lambda tensor=tensor: comm.all_reduce(tensor))  # alike on all ranks
    for part in (*model, model):
        fully_shard(part, mesh=mesh["inner"])
    full = torch.randn(90, 7, generator=torch.Generator().manual_seed(0))
    tensors = {
        **model.state_dict(),
        "outer": cut(full, mesh["outer"], (Shard(1),)),
        "replicated": cut(full, mesh["outer"], (Replicate(),)),
        "some": cut(full, some, (Shard(0),)),
        "both": cut(full, mesh, (Shard(0), Shard(1))),
        "plain": full,
        "none": cut(torch.zeros(0, 3), mesh["inner"], (Shard(0),)),
    }
    wholes = {**tensors, **dict.fromkeys(["outer", "replicated", "some", "both", "plain"], full)}
    store = Counted(folder)
    publisher = delta.ShardedPublisher(store)
    reader = delta.Subscriber(store)
    for where in (some, mesh["inner"], mesh["outer"]):
        tensors["some"] = cut(full, where, (Shard(0),))
        publisher.publish(tensors)
        expected = whole(wholes)
        if comm.rank == 0:
            reader.update()
            equal(reader.tensors, expected)
    size = sum(tensor.nbytes for tensor in expected.values())
    assert sum(comm.gather_numbers(store.written)) < 3 * 1.3 * size
    comm.gather_numbers(0)


@pytest.mark.parametrize("world_size", [2, 4])
def test_each_element_is_told_once_on_any_mesh(
    run_on: Any, tmp_path: Path, world_size: int
) -> None:
    run_on(world_size, on_submeshes, str(tmp_path))


def incomplete(comm: Communicator, folder: str) -> None:
    """The first rank of each half holds the same half of the tensor."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    store = delta.Folder(f"{folder}/{comm.rank % 2}")
    publisher = delta.ShardedPublisher(store, comm.split(comm.rank % 2))
    tensors: dict[str, Tensor] = {"x": cut(torch.arange(24.0), mesh["inner"], (Shard(0),))}
    with pytest.raises(
        InputError, match=r"^x has 24 elements, and the ranks .* hold 12 in different"
    ):
        publisher.publish(tensors)
    assert store.names() in ([], [".lock"])


def test_a_part_of_a_tensor_is_not_published(run_on: Any, tmp_path: Path) -> None:
    run_on(4, incomplete, str(tmp_path))


def no_slices(comm: Communicator, folder: str) -> None:
    """Every other rows, and rows that are not those that the placement says."""
    mesh = init_device_mesh("cpu", (2, 2))
    full = torch.arange(32.0).view(8, 4)
    halves = _StridedShard(0, split_factor=2)
    good = cut(full, mesh, (halves, Shard(0)))
    other = full[: 3 if comm.rank % 2 else 5]
    store = delta.Folder(folder)
    publisher = delta.ShardedPublisher(store)
    wrong: list[tuple[Tensor, Any]] = [
        (full[:4], (halves, Replicate())),
        (full[:4], (Replicate(), halves)),
        (other, (Replicate(), Shard(0))),
    ]
    for local, how in wrong:
        kind = {"shape": full.shape, "stride": full.stride()}
        x = DTensor.from_local(local.clone(), mesh, how, run_check=False, **kind)
        with pytest.raises(InputError, match=r"^x holds .* here, which is no slice"):
            publisher.publish({"x": x})
        with pytest.raises(InputError, match=r"^x holds .* here, which is no slice"):
            delta.assign_({"x": x}, wholes(x=full))
        assert torch.equal(x.to_local(), local)
    one = distribute_tensor(torch.ones(1, 1), mesh, (Shard(0), Shard(1)))
    local = one.to_local() if one.to_local().numel() else torch.empty(0, 0)  # as FSDP2 leaves it
    one = DTensor.from_local(
        local, mesh, one.placements, run_check=False, shape=one.shape, stride=one.stride()
    )
    publisher.publish({"x": good, "one": one})
    reader = delta.Subscriber(store)
    reader.update()
    equal(reader.tensors, {"x": full, "one": torch.ones(1, 1)})


def test_shards_that_are_no_slices_are_refused(run_on: Any, tmp_path: Path) -> None:
    run_on(4, no_slices, str(tmp_path))


def of_columns(first: int, columns: int) -> tuple[int, ...]:
    """Describe columns of a matrix with 4 rows of 6 elements."""
    return first, columns, 6, 4 * columns


PIECES: dict[str, tuple[list[tuple[int, ...]], list[int] | None]] = {
    "all": ([(0, 24, 24, 24)] * 3, [0]),
    "rows": ([(12, 12, 12, 12), (0, 0, 0, 0), (0, 12, 12, 12), (12, 12, 12, 12)], [0, 2]),
    "columns": (
        [of_columns(0, 2), of_columns(2, 3), of_columns(0, 2), of_columns(5, 1)],
        [0, 1, 3],
    ),
    "nothing": ([(0, 0, 0, 0)] * 2, None),
    "a gap": ([(0, 12, 12, 12), (13, 11, 11, 11)], None),
    "twice": ([(0, 24, 24, 24), (0, 12, 12, 12)], None),
    "a gap and twice": ([(0, 12, 12, 12), (0, 6, 6, 6), (6, 6, 6, 6)], None),
    "columns twice": ([of_columns(0, 2), of_columns(1, 2), of_columns(4, 2)], None),
}


@pytest.mark.parametrize("what", PIECES)
def test_one_rank_tells_each_piece(what: str) -> None:
    rows, tell = PIECES[what]
    own = [{"x": Held(Piece("x", torch.float32, (4, 6), *row), 1)} for row in rows]
    everywhere = [torch.tensor([one["x"].row()]) for one in own]
    if tell is None:
        with pytest.raises(InputError, match=r"^x has 24 elements"):
            sharded.owned(own[0], everywhere, 0)
        return
    assert [r for r in range(len(rows)) if sharded.owned(own[r], everywhere, r)] == tell


class Broken(delta.Folder):
    """A folder that one rank cannot write to while it is broken."""

    broken = False
    first = ""
    """How the names of files begin that it cannot write."""

    def write(self, name: str, parts: Any) -> int:
        if self.broken and name.startswith(self.first):
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
    assert publisher.version == before.newest
    said = [str(told.value), *getattr(told.value, "__notes__", ())]
    assert any("this version is not published" in text for text in said)
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


def failing_later(comm: Communicator, folder: str) -> list[str]:
    """A delta is committed, but not the whole model after it, and then a whole model fails."""
    mesh = init_device_mesh("cpu", (comm.size,))
    store, tensors = Broken(folder), {"x": cut(torch.arange(64.0).view(8, 8), mesh, (Shard(0),))}
    publisher = delta.ShardedPublisher(store, anchor_every=1)
    publisher.publish(tensors)
    outcomes = []
    for first in ("anchor", "anchor", ""):
        moved(tensors, 1)
        store.first, store.broken = first, bool(first) and comm.rank == 1
        try:
            version = publisher.publish(tensors)
        except (VersionError, OSError) as error:
            outcomes.append(" ".join([str(error), *getattr(error, "__notes__", ())]))
            assert publisher.version == delta.read_index(store).newest
    late = delta.Subscriber(store)
    late.update()
    assert late.version == version == publisher.version
    equal(late.tensors, whole(tensors))
    if comm.rank == 0:
        assert set(store.names()) == {"index.json", *delta.read_index(store).names}
    return outcomes


def test_what_is_published_when_what_follows_fails(run_on: Any, tmp_path: Path) -> None:
    for later, before in run_on(2, failing_later, str(tmp_path)):
        assert "version 1 (" in later and "is published, but" in later
        assert "this version is not published" in before


def on_one_rank(comm: Communicator, folder: str) -> None:
    """What fails on one rank before anything is exchanged is told to the others."""
    mesh = init_device_mesh("cpu", (comm.size,))
    publisher = delta.ShardedPublisher(delta.Folder(folder))
    module = nn.Linear(2, 2)
    module.register_buffer("x", cut(torch.arange(8.0), mesh, (Shard(0),)))
    for named in ((module, "state_dict"), (sharded, "copied"), (publisher_module, "parts_of")):
        expected = VersionError
        with ExitStack() as stack:
            if comm.rank == 1:
                expected = MemoryError
                stack.enter_context(patch.object(*named, side_effect=MemoryError("no room")))
            with pytest.raises(expected):
                publisher.publish(module)
    publisher.publish(module)


def test_a_failure_of_one_rank_is_told(run_on: Any, tmp_path: Path) -> None:
    run_on(2, on_one_rank, str(tmp_path))


def disagreeing(comm: Communicator, folder: str) -> list[str]:
    mesh = init_device_mesh("cpu", (comm.size,))
    full = torch.arange(32.0).view(8, 4)
    plain = torch.ones(3)
    right = {"x": cut(full, mesh, (Shard(0),)), "plain": plain, "tied": plain}
    others: list[dict[str, Any]] = [
        {**right, "x": 3},
        {},
        {**right, "plain": torch.ones(4)},
        {**right, "plain": torch.ones(3).bfloat16()},
        {**right, "x": cut(full[1:], mesh, (Shard(0),))},
        {**right, "x": cut(full, mesh, (Shard(1),))},
        {**right, "x": full},
        {**right, "tied": plain.clone()},
    ]
    store = delta.Folder(folder)
    publisher = delta.ShardedPublisher(store)
    errors = []
    for other in others:
        publisher.publish(right)
        before = delta.read_index(store)
        comm.gather_numbers(0)
        with pytest.raises(SparcelError) as told:
            publisher.publish(other if comm.rank == 1 else right)
        errors.append(type(told.value).__name__)
        assert delta.read_index(store) == before
    return errors


def test_ranks_that_disagree_publish_nothing(run_on: Any, tmp_path: Path) -> None:
    first, second = run_on(2, disagreeing, str(tmp_path))
    assert first == ["VersionError", "InputError"] + ["MismatchError"] * 6
    assert second == ["InputError", "VersionError"] + ["MismatchError"] * 6


def retied(comm: Communicator, folder: str) -> list[str]:
    """Tie, untie and change tensors of which one rank publishes all; return what versions were."""
    publisher, reader = delta.ShardedPublisher(folder), delta.Subscriber(folder)
    embedding, head = torch.arange(12.0).view(4, 3), torch.ones(4, 3)
    for tensors in (
        {"embedding": embedding, "head": head},
        {"embedding": embedding, "head": embedding},
        {"embedding": embedding, "head": embedding + 1},
        {"embedding": embedding + 2, "head": embedding + 1},
    ):
        publisher.publish(tensors)
        if comm.rank == 0:
            reader.update()
            equal(reader.tensors, tensors)
            assert delta.version_of(tensors, 0).sum == delta.version_of(reader.tensors, 0).sum
    return [entry.kind for entry in delta.read_index(folder).entries]


def test_a_version_with_other_ties_is_whole(run_on: Any, tmp_path: Path) -> None:
    for kinds in run_on(2, retied, str(tmp_path)):
        assert kinds == ["anchor", "anchor", "anchor", "delta"]


def in_stages(comm: Communicator, folder: str) -> None:
    """Stages and experts are on some ranks each, one holds nothing, and readers have some."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "inner"))
    generator = torch.Generator().manual_seed(3)
    full = {
        f"layers.{i}.{what}": torch.randn(32, 6, generator=generator).bfloat16()
        for i in range(2)
        for what in ("up", "down")
    }
    full["norm"] = torch.ones(6)
    stage = comm.rank // 2
    tensors: dict[str, Tensor] = {
        "norm": full["norm"],
        f"layers.{stage}.up": cut(full[f"layers.{stage}.up"], mesh["inner"], (Shard(0),)),
    }
    if comm.rank % 2:
        tensors[f"layers.{stage}.down"] = full[f"layers.{stage}.down"].clone()
    if comm.rank == 2:
        tensors = {"layers.1.up": tensors["layers.1.up"]}
    store = delta.Folder(folder)
    publisher = delta.ShardedPublisher(store, apart=True, anchor_every=3)
    only: Any = {"layers.1.up": slice(0, 16), "layers.0.down": ..., "norm": slice(2, 4)}
    some, every = delta.Subscriber(store, only=only), delta.Subscriber(store)
    for step in range(5):
        moved(tensors, step)
        moved(full, step)
        if step == 3:  # an expert goes to another rank
            tensors |= {"layers.0.down": full["layers.0.down"].clone()} if comm.rank == 0 else {}
            if comm.rank == 1:
                del tensors["layers.0.down"]
        publisher.publish(tensors)
        if comm.rank == 0:
            told = every.update()
            assert told is not None
            # Of shards alone each element moves by its place in the shard.
            shards = [one.view(torch.int16) for one in every.tensors.values()]
            assert told.changed <= sum(one.numel() for one in shards)
            some.update()
            equal(some.tensors, {name: every.tensors[name][only[name]] for name in only})
            equal({"a": every.tensors["layers.1.down"]}, {"a": full["layers.1.down"]})
            some.verify()
    with pytest.raises(InputError, match=r"there are no tensors to publish"):
        publisher.publish({})


def test_ranks_may_hold_other_tensors(run_on: Any, tmp_path: Path) -> None:
    run_on(4, in_stages, str(tmp_path))


def gathered(comm: Communicator, folder: str) -> list[int]:
    """All ranks see all tensors, and each writes about as many bytes; one that fails sees all."""
    full = {f"w{i}": torch.randn(50, 40 - i) for i in range(8)}
    for tensor in full.values():
        comm.run(lambda tensor=tensor: comm.all_reduce(tensor))  # alike on all ranks
    store = Counted(folder)
    publisher = delta.ShardedPublisher(store)
    reader = delta.Subscriber(store)
    seen: list[str] = []

    def coming(fails: bool = False) -> Iterator[tuple[str, Any]]:
        for number, (name, tensor) in enumerate(full.items()):
            seen.append(name)
            yield name, None if fails and number == 3 else tensor

    for step in range(3):
        for tensor in full.values():
            tensor[step] += 1
        publisher.publish_gathered(coming())
        if comm.rank == 0:
            reader.update()
            equal(reader.tensors, full)
    del seen[:]
    with pytest.raises(AttributeError if comm.rank else VersionError):
        publisher.publish_gathered(coming(fails=comm.rank == 1))
    assert seen == list(full)
    with pytest.raises(MismatchError, match="or in another order"):
        publisher.publish_gathered(list(full.items())[:: 1 - 2 * comm.rank])
    with pytest.raises(InputError, match="'w0' comes twice"):
        publisher.publish_gathered([*full.items(), ("w0", full["w0"])])
    comm.gather_numbers(0)
    return [store.written]


def test_tensors_that_all_ranks_see_are_shared_out(run_on: Any, tmp_path: Path) -> None:
    (first,), (second,) = run_on(2, gathered, str(tmp_path))
    assert abs(first - second) < 0.2 * first


def taken_for_whole(comm: Communicator, folder: str) -> None:
    mesh = init_device_mesh("cpu", (comm.size,))
    publisher = delta.Publisher(Path(folder) / str(comm.rank))
    with pytest.raises(
        InputError, match=r"holds 4 of 8 elements; publish it by a ShardedPublisher"
    ):
        publisher.publish({"x": cut(torch.arange(8.0), mesh, (Shard(0),))})
    publisher.publish({"x": cut(torch.arange(8.0), mesh, (Replicate(),))})


def test_a_shard_is_not_published_as_the_whole(run_on: Any, tmp_path: Path) -> None:
    run_on(2, taken_for_whole, str(tmp_path))


def numbered(comm: Communicator, folder: str) -> None:
    """A store that another publisher took, lost its index, or is given by its path."""
    tensors = {"x": torch.arange(8.0)}
    publisher = delta.ShardedPublisher(folder)
    publisher.publish(tensors)
    publisher.publish(tensors)
    other = delta.ShardedPublisher(Path(folder))
    assert other.publish(tensors).number == 2
    with pytest.raises(VersionError):
        publisher.publish(tensors)
    comm.gather_numbers(0)
    if comm.rank == 0:
        (Path(folder) / "index.json").unlink()
    comm.gather_numbers(0)
    with pytest.raises(VersionError, match="holds deltas, but not"):
        delta.ShardedPublisher(folder)


def test_ranks_have_a_store_alone(run_on: Any, tmp_path: Path) -> None:
    run_on(2, numbered, str(tmp_path))


def apart(comm: Communicator, folder: str) -> None:
    """Each rank has a folder of its own, as on the disks of two hosts."""
    store = delta.Folder(f"{folder}/{comm.rank}")
    publisher = delta.ShardedPublisher(store)
    with pytest.raises(InputError, match="all ranks and subscribers need the same place"):
        publisher.publish({"x": torch.arange(8.0)})
    assert delta.read_index(store).newest is None


def test_ranks_that_do_not_reach_the_same_place(run_on: Any, tmp_path: Path) -> None:
    run_on(2, apart, str(tmp_path))


def given(comm: Communicator) -> None:
    """Broadcast chunks of several lengths from the last rank."""
    for sizes in ([], [0], [1, 0, 7], [100_000, 3, 20_001]):
        chunks = [bytes([i % 251]) * size for i, size in enumerate(sizes)]
        root = comm.size - 1
        mine = chunks if comm.rank == root else None
        blocking = delta.broadcast(mine, root=root)
        arriving = delta.broadcast(mine, root=root, async_op=True)
        assert blocking == arriving.wait() == chunks


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_broadcast_gives_all_ranks_the_chunks(run_on: Any, world_size: int) -> None:
    run_on(world_size, given)


def nothing_to_send(comm: Communicator) -> list[str]:
    """The group can be used after each error."""

    def chunks() -> Iterator[bytes]:
        yield b"a"
        raise OSError("no chunk")

    def later(wrong: Any) -> list[bytes]:
        return delta.broadcast(wrong, root=1, async_op=True).wait()

    errors = []
    for make in (lambda: None, lambda: 3, lambda: [b"a", 3], chunks):
        for call in (partial(delta.broadcast, root=1), later):
            with pytest.raises((SparcelError, TypeError, OSError)) as told:
                call(make())
            errors.append(f"{type(told.value).__name__} {told.value}")
    assert delta.broadcast([b"ab"] if comm.rank == 1 else None, root=1) == [b"ab"]
    return errors


def test_broadcast_needs_chunks_at_the_root(run_on: Any) -> None:
    others, root = run_on(2, nothing_to_send)
    assert set(others) == {"InputError the root has no chunks to send; its own error says why"}
    assert root[0] == root[1] == "InputError the root must pass chunks, got None"
    assert {error.split()[0] for error in root[2:]} == {"TypeError", "OSError"}


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
    begin = 0
    for one in part.piece.cuts(CHUNK_BYTES):
        assert torch.equal(one.numbers(), part.gathered(one))
        assert part.begin_of(one) == begin
        begin += one.count
    here, places = part.places_of(numbers.view(-1))
    assert torch.equal(numbers.view(-1)[here], local.view(-1)[places])
