"""SkyRL: servers load what all ranks of a trainer publish together."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sparcel.core.comm import Communicator
from sparcel.errors import CommunicationError, InputError
from tests.integrations.stand_ins import skyrl as stand_ins
from tests.integrations.stand_ins import vllm as vllm_stand_ins
from tests.integrations.stand_ins.installing import assert_alike, fresh, install, parameters


@pytest.fixture(params=["stand-in", "real"])
def skyrl(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the module in which SkyRL chooses how to sync weights, once ours is installed."""
    return installed(request.param == "real", monkeypatch)


def installed(is_real: bool, patch: pytest.MonkeyPatch) -> Any:
    if is_real:
        place = pytest.importorskip(stand_ins.PLACE, reason="without SkyRL")
        for one in stand_ins.FUNCTIONS:
            patch.setattr(place, one.__name__, getattr(place, one.__name__))
    else:
        install(patch, "skyrl", stand_ins.MODULES)
    fresh(patch, "sparcel.integrations.skyrl").install()
    return import_module(stand_ins.PLACE)


def settings(folder: str) -> Any:
    places = SimpleNamespace(sync_dir=f"{folder}/store", local_checkpoint_dir=f"{folder}/mirror")
    return SimpleNamespace(run_engines_locally=True, delta_weight_sync=places)


def synced(comm: Communicator, is_real: bool, folder: str) -> None:
    random = torch.Generator().manual_seed(3)
    full: dict[str, Any] = {
        f"w{i}": torch.randn(30, 20 + i, generator=random).bfloat16() for i in range(5)
    }
    client = stand_ins.RemoteInferenceClient()
    with pytest.MonkeyPatch.context() as patch:
        skyrl = installed(is_real, patch)
        strategy = skyrl.get_transfer_strategy_cls("delta", colocate_all=False)
        told = strategy.create_init_info(
            settings(folder), inference_world_size=8, base_model_path="my/model"
        )
        sender = strategy.create_sender(init_info=told, inference_client=client)
        asyncio.run(client.init_weight_update_communicator(told))
        assert client.told == [{"store": f"{folder}/store", "mirror": f"{folder}/mirror"}] * 2
        assert sender.handles_prefix_cache_reset

        def chunks() -> Iterator[Any]:
            for names in (["w0", "w1"], ["w2"], ["w3", "w4"]):
                tensors = [full[name] for name in names]
                shapes = [[30, 20 + int(name[1])] for name in names]
                yield skyrl.WeightChunk(names, ["torch.bfloat16"] * len(names), shapes, tensors)

        def sync(reset: bool = False) -> None:
            del client.calls[:]
            metadata: dict[str, list[Any]] = {"names": [*full], "dtype_names": [], "shapes": []}
            asyncio.run(sender.send_chunks(chunks(), metadata, reset_prefix_cache=reset))

        for step in range(3):
            sync(reset=step == 1)
            steps = ["pause", "start False", f"load {step}", "finish", "resume"]
            steps[1:1] = ["reset True"] if step == 1 else []
            assert client.calls == (steps if comm.rank == 0 else [])
            assert client.weights.keys() == (full.keys() if comm.rank == 0 else set())
            assert all(torch.equal(one, full[name]) for name, one in client.weights.items())
            full["w3"][step] += 1

        client.failing = OSError("no memory")
        expected = OSError if comm.rank == 0 else CommunicationError
        with pytest.raises(expected, match="no memory"):
            sync()
        if comm.rank == 0:
            assert client.calls[-2:] == ["load 3", "finish"], "it stays paused"
        client.failing = None
        whole, full["w4"] = full["w4"], None if comm.rank else full["w4"]
        with pytest.raises(AttributeError if comm.rank else ValueError):
            sync()
        assert client.calls == []
        full["w4"] = whole
        sync()
        assert comm.rank or torch.equal(client.weights["w3"], full["w3"])
        sender.teardown()


@pytest.mark.processes
@pytest.mark.parametrize("is_real", [False, True])
def test_servers_load_what_all_ranks_publish(run_on: Any, tmp_path: Path, is_real: bool) -> None:
    if is_real:
        pytest.importorskip(stand_ins.PLACE, reason="without SkyRL")
    run_on(2, synced, is_real, str(tmp_path))


def test_only_delta_means_sparcel(skyrl: Any) -> None:
    assert skyrl.get_transfer_strategy("delta", False) == "sparcel"
    assert skyrl.get_transfer_strategy("nccl", False) == "nccl"
    assert skyrl.get_transfer_strategy("nccl", True) == "ipc"
    assert "Broadcast" in skyrl.get_transfer_strategy_cls("nccl", False).__name__
    with pytest.raises(InputError, match="use nccl there"):
        skyrl.get_transfer_strategy("delta", True)


def test_the_servers_arguments_name_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(False, monkeypatch)
    utils = import_module(f"{stand_ins.SERVERS}.utils")
    assert utils.get_transfer_strategy("delta", False) == "sparcel"


def test_it_needs_a_store(skyrl: Any) -> None:
    strategy = skyrl.get_transfer_strategy_cls("delta", False)
    unset = SimpleNamespace(run_engines_locally=True, delta_weight_sync=None)
    with pytest.raises(InputError, match=r"sync_dir names no store"):
        strategy.create_init_info(unset)


def test_servers_have_the_engine(skyrl: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "vllm", vllm_stand_ins.MODULES)
    fresh(monkeypatch, "sparcel.integrations.vllm")
    engine = skyrl.get_transfer_strategy_cls("delta", False).get_vllm_transfer_engine()
    assert engine.init_info_cls(store="a", mirror="b").mirror == "b"


def test_it_has_what_skyrl_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(False, monkeypatch)
    ours = import_module("sparcel.integrations.skyrl")
    for kind, like in [
        (ours.Sender, stand_ins.DeltaWeightTransferSender),
        (ours.InitInfo, stand_ins.DeltaInitInfo),
        (ours.Strategy, stand_ins.WeightTransferStrategy),
    ]:
        for name, method in vars(like).items():
            if not name.startswith("_"):
                method = getattr(method, "__func__", method)
                assert parameters(getattr(kind, name)) == parameters(method)


def test_the_stand_ins_are_like_skyrl() -> None:
    real = pytest.importorskip(stand_ins.PLACE, reason="without SkyRL")
    for one in (*stand_ins.CLASSES, *stand_ins.FUNCTIONS):
        assert_alike(one, getattr(real, one.__name__))
    for like in (stand_ins.DeltaWeightTransferSender, stand_ins.DeltaInitInfo):
        for name, method in vars(like).items():
            if not name.startswith("_"):
                assert_alike(method, getattr(getattr(real, like.__name__), name))


def test_the_client_is_like_skyrls() -> None:
    place = f"{stand_ins.SERVERS}.remote_inference_client"
    real = pytest.importorskip(place, reason="without SkyRL").RemoteInferenceClient
    for name, method in vars(stand_ins.RemoteInferenceClient).items():
        if not name.startswith("_"):
            assert_alike(method, getattr(real, name))
