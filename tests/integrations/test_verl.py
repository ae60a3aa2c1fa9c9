"""verl: rollout workers get the actor's weights of each step, and only deltas travel."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.integrations.engines import verl as stand_ins
from tests.integrations.engines.installing import assert_alike, fresh, install

Engines = Callable[..., tuple[list[Any], list[Any]]]


@pytest.fixture(params=["stand-in", "real"])
def engines(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Engines:
    """Return what makes the engines of actors and rollout workers as verl does."""
    if request.param == "real":
        verl = pytest.importorskip("verl.checkpoint_engine", reason="without verl")
    else:
        install(monkeypatch, "verl", stand_ins.MODULES)
        verl = stand_ins
    fresh(monkeypatch, "sparcel.integrations.verl")  # as custom_backend_module does

    def make(store: Path, **settings: Any) -> tuple[list[Any], list[Any]]:
        told = {"bucket_size": 1 << 20, "store": str(store), **settings}
        new = verl.CheckpointEngineRegistry.new
        actors = [new("sparcel", is_master=rank == 0, **told) for rank in range(2)]
        return actors, [new("sparcel", **told) for _ in range(3)]

    return make


def synchronised(
    actors: list[Any], rollouts: list[Any], model: nn.Module
) -> tuple[list[dict[str, float]], list[dict[str, Tensor]]]:
    """Do what verl's manager does, and return the metrics and what each rollout worker got."""
    told = [engine.prepare() for engine in [*actors, *rollouts]]
    for workers, kwargs in zip(
        (actors, rollouts),
        type(actors[0]).build_topology(len(actors), len(rollouts), told),
        strict=True,
    ):
        for rank, engine in enumerate(workers):
            engine.init_process_group(**{key: values[rank] for key, values in kwargs.items()})
    walked = []

    def weights() -> Iterator[tuple[str, Tensor]]:
        yield from model.named_parameters()
        walked.append(True)

    async def received(engine: Any) -> dict[str, Tensor]:
        weights = engine.receive_weights(global_steps=1)
        return {name: tensor.clone() async for name, tensor in weights}

    async def run() -> list[Any]:
        got = [received(engine) for engine in rollouts]  # some look before there is a version
        return await asyncio.gather(*got, *(a.send_weights(weights(), 1) for a in actors))

    results = asyncio.run(run())
    assert len(walked) == len(actors), "each actor gathers all weights"
    for engine in [*actors, *rollouts]:
        engine.finalize()
    return results[len(rollouts) :], results[: len(rollouts)]


def assert_same(got: dict[str, Tensor], model: nn.Module) -> None:
    wanted = {name: one.detach().bfloat16() for name, one in model.named_parameters()}
    assert got.keys() == wanted.keys()
    assert all(torch.equal(got[name].cpu(), wanted[name]) for name in wanted)


def test_rollout_workers_get_each_step_and_later_ones_join(
    engines: Engines, tmp_path: Path
) -> None:
    torch.manual_seed(3)
    model = nn.Linear(100, 100)
    actors, rollouts = engines(tmp_path)
    for step in range(4):
        if step == 2:
            rollouts += engines(tmp_path)[1][:1]  # a replica joins
        metrics, got = synchronised(actors, rollouts, model)
        for weights in got:
            assert_same(weights, model)
        assert metrics[1] == {}
        changed = metrics[0]["checkpoint_engine/changed_ratio"]
        megabytes = metrics[0]["checkpoint_engine/payload_mbytes"]
        assert changed == 1 if step == 0 else 0 < changed < 0.05
        assert megabytes > 0.019 if step == 0 else 0 < megabytes < 0.002
        with torch.no_grad():
            model.weight[step, :50] += 1


def test_a_trainer_that_starts_anew_goes_on(engines: Engines, tmp_path: Path) -> None:
    model = nn.Linear(10, 10)
    actors, rollouts = engines(tmp_path)
    synchronised(actors, rollouts, model)
    with torch.no_grad():
        model.weight += 1
    _, got = synchronised(engines(tmp_path)[0], rollouts, model)
    assert_same(got[0], model)


def test_weights_may_keep_their_dtype(engines: Engines, tmp_path: Path) -> None:
    model = nn.Linear(10, 10)
    _, (got, *_) = synchronised(*engines(tmp_path, dtype=None), model)
    assert torch.equal(got["weight"].cpu(), model.weight)


def test_the_workers_of_verl_drive_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verl = pytest.importorskip("verl.checkpoint_engine", reason="without verl")
    actor_type = pytest.importorskip("verl.workers.engine_workers").ActorRolloutRefWorker
    fresh(monkeypatch, "sparcel.integrations.verl")
    new, told = verl.CheckpointEngineRegistry.new, {"bucket_size": 1, "store": str(tmp_path)}
    model = nn.Linear(8, 8)
    actor = actor_type.__new__(actor_type)
    actor.checkpoint_engine = new("sparcel", is_master=True, **told)
    parameters = lambda: (model.named_parameters(), None)  # noqa: E731
    actor.actor = SimpleNamespace(engine=SimpleNamespace(get_per_tensor_param=parameters))
    worker = verl.CheckpointEngineWorker.__new__(verl.CheckpointEngineWorker)
    worker.checkpoint_engine = new("sparcel", **told)
    got: dict[str, Tensor] = {}

    async def update(weights: Any, global_steps: int, wire_format: str) -> None:
        assert wire_format == "named_tensors"
        got.update({name: tensor.clone() async for name, tensor in weights})

    worker.server_adapter = SimpleNamespace(update_weights=update)
    for step in range(3):
        with torch.no_grad():
            model.weight[0, step] += 1
        number = actor.checkpoint_engine.prepare()["version"]
        actor.checkpoint_engine.init_process_group(version=number)
        worker.checkpoint_engine.init_process_group(version=number)
        asyncio.run(actor_type.update_weights.__wrapped__(actor, global_steps=step, mode="sparcel"))
        asyncio.run(verl.CheckpointEngineWorker.update_weights.__wrapped__(worker, step))
        assert_same(got, model)


@pytest.mark.parametrize("name", ["CheckpointEngine", "CheckpointEngineRegistry"])
def test_the_stand_ins_are_like_verl(name: str) -> None:
    real = pytest.importorskip("verl.checkpoint_engine", reason="without verl")
    assert_alike(getattr(stand_ins, name), getattr(real, name))
