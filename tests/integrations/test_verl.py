"""verl: rollout workers get the actor's weights of each step, and only deltas travel."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sparcel.core.comm import Communicator
from sparcel.errors import InputError, VersionError
from sparcel.products.delta import Folder, Publisher, read_index
from tests.integrations.stand_ins import verl as stand_ins
from tests.integrations.stand_ins.installing import assert_alike, fresh, install

pytestmark = pytest.mark.processes

New = Callable[..., Any]


@pytest.fixture(params=["stand-in", "real"])
def kind(request: pytest.FixtureRequest) -> Any:
    if request.param == "real":
        pytest.importorskip("verl.checkpoint_engine", reason="without verl")
    return request.param


@contextmanager
def engines(kind: str, folder: str, **settings: Any) -> Iterator[New]:
    """Yield what makes an engine as verl does."""
    with pytest.MonkeyPatch.context() as patch:
        if kind == "stand-in":
            install(patch, "verl", stand_ins.MODULES)
        fresh(patch, "sparcel.integrations.verl")  # as custom_backend_module does
        patch.setattr("sparcel.integrations._deltas._SECONDS", 1e-3)
        new = import_module("verl.checkpoint_engine").CheckpointEngineRegistry.new
        told = {"bucket_size": 1 << 20, "store": f"{folder}/store", **settings}
        yield lambda **more: new("sparcel", **told, **more)


def as_actor(new: New, comm: Communicator) -> Any:
    return new(is_master=comm.rank == 0)


def synchronised(
    comm: Communicator, actor: Any, rollouts: list[Any], model: nn.Module
) -> tuple[dict[str, float], list[dict[str, Tensor]]]:
    """Do what verl's manager does, and return the metrics and what each rollout worker got.

    Each process is an actor's rank, and has some rollout workers.
    """
    numbers = comm.gather_numbers(actor.prepare().get("version", -1))
    assert numbers[1:] == [-1] * (comm.size - 1)
    told = [{"version": numbers[0]}, *[{}] * (comm.size - 1), *(e.prepare() for e in rollouts)]
    of_actors, of_rollouts = type(actor).build_topology(comm.size, len(rollouts), told)
    actor.init_process_group(**{key: values[comm.rank] for key, values in of_actors.items()})
    for rank, engine in enumerate(rollouts):
        engine.init_process_group(**{key: values[rank] for key, values in of_rollouts.items()})

    async def received(engine: Any) -> dict[str, Tensor]:
        weights = engine.receive_weights(global_steps=1)
        return {name: tensor.clone() async for name, tensor in weights}

    async def run() -> list[Any]:
        got = [received(engine) for engine in rollouts]  # they look before there is a version
        return await asyncio.gather(*got, actor.send_weights(model.named_parameters(), 1))

    *results, metrics = asyncio.run(run())
    for engine in [actor, *rollouts]:
        engine.finalize()
    return metrics, results


def assert_same(got: dict[str, Tensor], model: nn.Module) -> None:
    wanted = {name: one.detach().bfloat16() for name, one in model.named_parameters()}
    assert got.keys() == wanted.keys()
    assert all(torch.equal(got[name].cpu(), wanted[name]) for name in wanted)


def made() -> nn.Module:
    """A model that is alike on all ranks."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 100))


def following(comm: Communicator, kind: str, folder: str, mirror: str | None) -> None:
    model = made()
    with engines(kind, folder, mirror=mirror) as new:
        actor, rollouts = as_actor(new, comm), [new()]
        for step in range(4):
            if step == 2:
                rollouts.append(new())  # a replica joins
            metrics, got = synchronised(comm, actor, rollouts, model)
            for weights in got:
                assert_same(weights, model)
            assert bool(metrics) == (comm.rank == 0)
            if metrics:
                changed = metrics["checkpoint_engine/changed_ratio"]
                megabytes = metrics["checkpoint_engine/payload_mbytes"]
                assert changed == 1 if step == 0 else 0 < changed < 0.05
                assert megabytes > 0.038 if step == 0 else 0 < megabytes < 0.003
            with torch.no_grad():
                for layer in model:
                    layer.weight[step, :50] += 1
    kept = actor._passage._publisher._base  # a share of the weights, on each rank
    shares = comm.gather_numbers(sum(part.local.nbytes for part in kept.values()))
    assert sum(shares) == 2 * 2 * 100 * 101
    assert max(shares) < 0.6 * sum(shares)


@pytest.mark.parametrize("mirror", [None, "mirror"])
def test_rollout_workers_get_each_step_and_later_ones_join(
    run_on: Any, kind: str, tmp_path: Path, mirror: str | None
) -> None:
    place = mirror and f"{tmp_path}/{mirror}"
    run_on(2, following, kind, str(tmp_path), place)
    names = {path.name for path in tmp_path.rglob("model.safetensors")}
    assert bool(names) == bool(mirror)


def going_on(comm: Communicator, folder: str) -> None:
    model = made()
    with engines("stand-in", folder) as new:
        rollouts = [new()]
        for _ in range(2):
            _, got = synchronised(comm, as_actor(new, comm), rollouts, model)
            assert_same(got[0], model)
            with torch.no_grad():
                model[0].weight += 1


def test_a_trainer_that_starts_anew_goes_on(run_on: Any, tmp_path: Path) -> None:
    run_on(2, going_on, str(tmp_path))


def keeping(comm: Communicator, folder: str) -> None:
    model = made()
    with engines("stand-in", folder, dtype=None) as new:
        _, (got,) = synchronised(comm, as_actor(new, comm), [new()], model)
    assert all(torch.equal(got[name].cpu(), one) for name, one in model.named_parameters())


@pytest.mark.parametrize("wrong", ["bf16", "int8", "nn"])
def test_a_dtype_is_one_of_floats(wrong: str, tmp_path: Path) -> None:
    with (
        engines("stand-in", str(tmp_path), dtype=wrong) as new,
        pytest.raises(InputError, match=f"dtype is one of .* got '{wrong}'"),
    ):
        new()


def test_weights_may_keep_their_dtype(run_on: Any, tmp_path: Path) -> None:
    run_on(2, keeping, str(tmp_path))


def failing(comm: Communicator, folder: str) -> None:
    """One rank gets something that is no tensor, and then another trainer takes the number."""
    seen = []

    def weights(fails: bool) -> Iterator[tuple[str, Any]]:
        for number, (name, tensor) in enumerate(made().named_parameters()):
            seen.append(name)
            yield name, None if fails and number == 1 else tensor

    with engines("stand-in", folder) as new:
        actor = as_actor(new, comm)
        actor.init_process_group(version=0)
        with pytest.raises(AttributeError if comm.rank else VersionError):
            asyncio.run(actor.send_weights(weights(fails=comm.rank == 1)))
        assert len(seen) == 4, "each rank gathers all weights"
        assert read_index(Folder(f"{folder}/store")).newest is None
        comm.gather_numbers(0)
        if comm.rank == 0:
            Publisher(Folder(f"{folder}/store")).publish({"x": torch.ones(3)})
        comm.gather_numbers(0)
        other = as_actor(new, comm)
        other.init_process_group(version=0)
        with pytest.raises(VersionError, match=r"rollout workers wait for 0: another trainer"):
            asyncio.run(other.send_weights(weights(fails=False)))


def test_errors_are_those_of_all_ranks(run_on: Any, tmp_path: Path) -> None:
    run_on(2, failing, str(tmp_path))


def driven(comm: Communicator, folder: str) -> None:
    """Let the methods of verl's own workers call the engines."""
    verl = import_module("verl.checkpoint_engine")
    actor_type = import_module("verl.workers.engine_workers").ActorRolloutRefWorker
    model = made()
    with engines("real", folder) as new:
        actor = actor_type.__new__(actor_type)
        actor.checkpoint_engine = as_actor(new, comm)
        parameters = lambda: (model.named_parameters(), None)  # noqa: E731
        actor.actor = SimpleNamespace(engine=SimpleNamespace(get_per_tensor_param=parameters))
        worker = verl.CheckpointEngineWorker.__new__(verl.CheckpointEngineWorker)
        worker.checkpoint_engine = new()
        got: dict[str, Tensor] = {}

        async def update(weights: Any, global_steps: int, wire_format: str) -> None:
            assert wire_format == "named_tensors"
            got.update({name: tensor.clone() async for name, tensor in weights})

        worker.server_adapter = SimpleNamespace(update_weights=update)
        for step in range(3):
            with torch.no_grad():
                model[0].weight[0, step] += 1
            told = actor.checkpoint_engine.prepare().get("version", -1)
            number = comm.gather_numbers(told)[0]
            actor.checkpoint_engine.init_process_group(version=number)
            worker.checkpoint_engine.init_process_group(version=number)
            update_weights = actor_type.update_weights.__wrapped__
            asyncio.run(update_weights(actor, global_steps=step, mode="sparcel"))
            asyncio.run(verl.CheckpointEngineWorker.update_weights.__wrapped__(worker, step))
            assert_same(got, model)


def test_the_workers_of_verl_drive_it(run_on: Any, tmp_path: Path) -> None:
    pytest.importorskip("verl.workers.engine_workers", reason="without verl")
    run_on(2, driven, str(tmp_path))


@pytest.mark.parametrize("name", ["CheckpointEngine", "CheckpointEngineRegistry"])
def test_the_stand_ins_are_like_verl(name: str) -> None:
    real = pytest.importorskip("verl.checkpoint_engine", reason="without verl")
    assert_alike(getattr(stand_ins, name), getattr(real, name))
