"""TRL: servers load what AsyncGRPOTrainer sends, and patches in TRL's shape come back."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sparcel.errors import CommunicationError, InputError
from sparcel.integrations.trl import WeightTransfer
from sparcel.products.delta import Folder, Subscriber
from tests.integrations.stand_ins import trl as stand_ins
from tests.integrations.stand_ins.installing import assert_alike, parameters
from tests.integrations.stand_ins.server import serving

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
TRAINER = "trl.experimental.async_grpo.async_grpo_trainer"


class Served:
    """A server that goes to the versions that it is told, and keeps what it had then."""

    def __init__(self) -> None:
        self.subscriber: Subscriber | None = None
        self.mirror: str | None = None
        self.versions: list[dict[str, Tensor]] = []
        self.failing = False

    def __call__(self, route: str, body: Any) -> None:
        if route == "/init_weight_transfer_engine":
            self.subscriber = Subscriber(Folder(body["init_info"]["store"]))
            self.mirror = body["init_info"].get("mirror")
        if route == "/update_weights":
            if self.failing:
                raise ValueError("no memory")
            assert self.subscriber is not None
            self.subscriber.update(body["update_info"]["version"])
            held = self.subscriber.tensors
            self.versions.append({name: tensor.clone() for name, tensor in held.items()})


def sync(transfer: WeightTransfer, model: nn.Module) -> None:
    """Do what AsyncGRPOTrainer does."""
    transfer.pause()
    transfer.send_weights(iter(list(model.named_parameters())))
    transfer.resume()


def assert_same(got: dict[str, Tensor], model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        assert torch.equal(got[name], parameter.detach().bfloat16())


def test_all_servers_get_each_version(tmp_path: Path) -> None:
    model, first, second = nn.Linear(10, 10), Served(), Served()
    with serving(first) as url, serving(second) as other:
        transfer = WeightTransfer(tmp_path, url, other, mirror=tmp_path / "mirror")
        transfer.init_weight_transfer()
        assert first.mirror == second.mirror == str(tmp_path / "mirror")
        for number in range(3):
            sync(transfer, model)
            assert transfer.version is not None
            assert transfer.version.number == number
            for server in (first, second):
                assert_same(server.versions[number], model)
            with torch.no_grad():
                model.weight[number] += 1
        transfer.destroy()


def test_a_failure_does_not_keep_other_ranks_waiting(tmp_path: Path) -> None:
    transfer = WeightTransfer(tmp_path)
    walked = []

    def weights() -> Iterator[tuple[str, Any]]:
        yield "fails", None
        for name in ("a", "b"):
            walked.append(name)
            yield name, torch.ones(3)

    with pytest.raises(AttributeError):
        transfer.send_weights(weights())
    assert walked == ["a", "b"]
    with pytest.raises(InputError, match="init_weight_transfer first"):
        transfer.send_weights(iter(()))


def test_what_a_server_says_reaches_the_trainer(tmp_path: Path) -> None:
    served, model = Served(), nn.Linear(4, 4)
    with serving(served) as url:
        transfer = WeightTransfer(tmp_path, url)
        transfer.init_weight_transfer()
        served.failing = True
        with pytest.raises(CommunicationError, match="no memory"):
            sync(transfer, model)
        served.failing = False
        sync(transfer, model)
    assert_same(served.versions[0], model)


def test_it_has_the_methods_that_trl_calls() -> None:
    for name, method in vars(stand_ins.WeightTransferProtocol).items():
        if not name.startswith("_"):
            assert parameters(getattr(WeightTransfer, name)) == parameters(method)


def test_the_trainer_of_trl_drives_it(tmp_path: Path) -> None:
    trainer = pytest.importorskip(TRAINER, reason="without TRL").AsyncGRPOTrainer
    pytest.importorskip("accelerate").PartialState()
    model, served = nn.Linear(10, 10), Served()
    with serving(served) as url:
        transfer = WeightTransfer(tmp_path, url)
        transfer.init_weight_transfer()
        accelerator = SimpleNamespace(
            unwrap_model=lambda model: model,
            is_main_process=True,
            wait_for_everyone=lambda: None,
            device=torch.device("cpu"),
        )
        told = SimpleNamespace(
            accelerator=accelerator,
            model=model,
            weight_transfer=transfer,
            rollout_worker=None,
            model_version=0,
        )
        told._streaming_iter = lambda: trainer._streaming_iter(told)
        for number in range(3):
            trainer._sync_weight_merged(told, 0.0)
            assert_same(served.versions[number], model)
            with torch.no_grad():
                model.weight[number] += 1


def test_the_stand_in_is_like_trl() -> None:
    real = pytest.importorskip(TRAINER, reason="without TRL").WeightTransferProtocol
    assert_alike(stand_ins.WeightTransferProtocol, real)
