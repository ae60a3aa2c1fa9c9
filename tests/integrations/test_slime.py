"""slime and Miles: engines load what the pipeline stages of a trainer publish together."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from sparcel.core.comm import Communicator
from sparcel.errors import CommunicationError, InputError
from sparcel.integrations import slime
from tests.integrations.stand_ins import slime as stand_ins
from tests.integrations.stand_ins.installing import assert_alike, install

MODES = {
    "slime": {"update_weight_mode": "delta"},
    "miles": {"update_weight_transfer_mode": "disk-delta", "pause_generation_mode": "retract"},
}


@contextmanager
def framework(package: str) -> Iterator[None]:
    """Let imports find a framework, and not the other one."""
    with pytest.MonkeyPatch.context() as patch:
        for other in stand_ins.PLACES:
            install(patch, other, stand_ins.modules(other) if other == package else {})
        yield


def arguments(package: str, folder: str, **others: Any) -> Namespace:
    places = {
        "update_weight_disk_dir": f"{folder}/store",
        "update_weight_local_checkpoint_dir": f"{folder}/mirror",
    }
    return Namespace(**MODES[package] | places | others)


def updater(package: str, args: Namespace, weights: Any, engines: list[Any]) -> Any:
    """Make the updater that actors make once our function was called."""
    stand_ins.group[:] = [dist.group.WORLD]
    place = import_module(stand_ins.PLACES[package])
    made = place.UpdateWeightFromDiskDelta(
        args, [], lambda: weights, model_name="qwen3", quantization_config=None
    )
    made.connect_rollout_engines([stand_ins.Actor(engine) for engine in engines], None)
    return made


def checkpoint() -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(3)
    names = ("embed", "layers.0.up", "layers.0.scale", "layers.1.up", "head")
    return {name: torch.randn(40, 30, generator=random).bfloat16() for name in names}


def gathered(comm: Communicator, full: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return what a rank gathers: the first one of each stage of two all of it; both embed."""
    per_stage = max(comm.size // 2, 1)
    if comm.rank % per_stage:
        return {}
    stage = comm.rank // per_stage
    mine = {0: ("embed", "layers.0.up", "layers.0.scale"), 1: ("embed", "layers.1.up", "head")}
    return {name: full[name] for name in mine[stage]}


def followed(comm: Communicator, package: str, folder: str) -> None:
    full, engines = checkpoint(), [stand_ins.ENGINES[package]() for _ in range(2)]
    with framework(package):
        args = arguments(package, folder)
        for _ in range(2):  # an actor may begin again in its process
            slime.install(args)
        mine = updater(package, args, gathered(comm, full), engines)
        for step in range(3):
            mine.update_weights()
            assert mine.weight_version == step
            metrics = mine.pop_metrics()
            assert mine.pop_metrics() == {}
            density = metrics["perf/update_weights_density"]
            assert density == (1 if step == 0 else pytest.approx(60 / 6000))
            size = metrics["perf/update_weights_wire_bytes"]
            assert size > 6000 if step == 0 else size < 2000
            for engine in engines if comm.rank == 0 else []:
                assert engine.weights.keys() == full.keys()
                assert all(torch.equal(engine.weights[name], full[name]) for name in full)
            full["embed"][step] += 1
            full["head"][:, step].view(torch.int16)[:30] ^= 1
    pause = "pause retract" if package == "miles" else "pause"
    calls = [call for i in range(3) for call in (pause, "flush", f"load {i}", "continue")]
    for engine in engines:
        assert engine.calls == (calls if comm.rank == 0 else [])


@pytest.mark.processes
@pytest.mark.parametrize(("package", "world_size"), [("slime", 4), ("miles", 2)])
def test_engines_follow_all_stages(
    run_on: Any, tmp_path: Path, package: str, world_size: int
) -> None:
    run_on(world_size, followed, package, str(tmp_path))


def failing(comm: Communicator, package: str, folder: str) -> None:
    full, engine = checkpoint(), stand_ins.ENGINES[package]()
    with framework(package):
        args = arguments(package, folder, pause_generation_mode="in_place")
        slime.install(args)
        weights: dict[str, Any] = gathered(comm, full)
        mine = updater(package, args, weights, [engine])

        def fails(on: int, error: type[Exception], message: str) -> list[str]:
            """Return what the engine was called."""
            del engine.calls[:]
            other = rf"^rank {on} failed: .*{message}"
            told = (error, message) if comm.rank == on else (CommunicationError, other)
            with pytest.raises(told[0], match=told[1]):
                mine.update_weights()
            return engine.calls

        if comm.rank == 1:
            weights["embed"] = None
        assert fails(1, AttributeError, "has no attribute") == []
        if comm.rank == 1:
            weights["embed"] = full["embed"]
        engine.failing = OSError("no memory")
        calls = fails(0, OSError, "no memory")
        if comm.rank == 0:
            assert calls == ["pause in_place", "load 0"], "it stays paused"
        engine.failing, engine.answer = None, {"success": False, "message": "too old"}
        fails(0, CommunicationError, "update_weights_from_disk of an engine: too old")
        engine.answer = None
        stand_ins.group.append(dist.new_group(backend="gloo"))  # as after an offload
        mine.update_weights()
        if comm.rank == 0:
            assert torch.equal(engine.weights["head"], full["head"])
            assert engine.calls[-2:] == ["load 2", "continue"]


@pytest.mark.processes
def test_a_failure_is_raised_on_all_ranks(run_on: Any, tmp_path: Path) -> None:
    run_on(2, failing, "miles", str(tmp_path))


def test_it_is_not_installed_where_nothing_would_use_it(tmp_path: Path) -> None:
    with framework("slime"):
        args = Namespace(update_weight_mode="full")
        with pytest.raises(InputError, match="--update-weight-mode delta"):
            slime.install(args)
    with framework("none"), pytest.raises(InputError, match="slime or Miles must call"):
        slime.install(arguments("slime", str(tmp_path)))


@pytest.mark.parametrize("package", ["slime", "miles"])
def test_the_stand_ins_are_like_the_real_ones(package: str) -> None:
    real = pytest.importorskip(stand_ins.PLACES[package], reason=f"without {package}")
    assert_alike(stand_ins.UPDATERS[package], real.UpdateWeightFromDiskDelta)
    for name in ("_iter_hf_tensors", "_for_each_hf_bucket"):
        if stand_in := getattr(stand_ins.UPDATERS[package], name, None):
            assert_alike(stand_in, getattr(real.UpdateWeightFromDiskDelta, name))
    assert_alike(stand_ins.get_gloo_group, real.get_gloo_group)


@pytest.mark.parametrize("package", ["slime", "miles"])
def test_the_engines_are_like_the_real_ones(package: str) -> None:
    place = f"{package}.backends.sglang_utils.sglang_engine"
    real = pytest.importorskip(place, reason=f"without {package}").SGLangEngine
    kind = stand_ins.ENGINES[package]
    for name in dir(kind):
        if not name.startswith("_"):
            assert_alike(getattr(kind, name), getattr(real, name))
