"""Lightning: the callback exchanges, its memory is in checkpoints, and a Trainer fits twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from sparcel.core.comm import Communicator
from sparcel.errors import InputError, SparcelWarning
from tests.integrations.launched import (
    Trained,
    as_by_torchrun,
    assert_not_interrupted,
    largest,
    needs,
    said,
)

pytestmark = needs("lightning")

STEPS = 3
"""Steps of an epoch, of two batches on each of two ranks."""

DDP = {"strategy": "ddp", "devices": 2}


def module(sharded: bool = False) -> Any:
    """Return a model that is trained by Adam."""
    from lightning.pytorch import LightningModule

    class Reverser(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(40, 60), nn.ReLU(), nn.Linear(60, 40))

        def configure_model(self) -> None:
            if sharded and not isinstance(self.layers, FSDPModule):
                fully_shard(self.layers, mesh=self.device_mesh["shard"])

        def training_step(self, batch: list[Tensor]) -> Tensor:
            return (self.layers(batch[0]) - batch[0].flip(1)).square().mean()

        def validation_step(self, batch: list[Tensor]) -> None:
            self.log("error", self.training_step(batch), sync_dist=True)

        test_step = validation_step

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=0.01)

    return Reverser()


def batches() -> DataLoader[tuple[Tensor, ...]]:
    draws = torch.Generator().manual_seed(5)
    return DataLoader(TensorDataset(torch.randn(STEPS * 16, 40, generator=draws)), batch_size=4)


def trainer(folder: Path, callbacks: list[Any], **settings: Any) -> Any:
    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint

    return Trainer(
        accelerator="cpu",
        accumulate_grad_batches=2,
        callbacks=[*callbacks, ModelCheckpoint(folder, save_top_k=-1)],
        enable_model_summary=False,
        enable_progress_bar=False,
        logger=False,
        **{"max_epochs": 3, **settings},
    )


def exchange() -> Any:
    from sparcel.integrations.lightning import Sparcel

    return Sparcel("topk", density=0.05, frontload=False)


def fitted(folder: Path, resumed: Path | None = None, seed: int = 3, **settings: Any) -> Trained:
    """Fit in fresh objects, from a checkpoint if there is one."""
    torch.manual_seed(seed)
    callback, model = exchange(), module(sharded=settings.get("strategy", "auto") != "auto")
    fit = trainer(folder, [callback], **{**DDP, **settings}).fit
    fit(model, batches(), batches(), ckpt_path=resumed)
    memory, stats = callback.state_dict(), callback.handle and callback.handle.stats()
    return Trained([local(p) for p in model.parameters()], memory, stats)


def local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def interrupted(comm: Communicator, folder: Path) -> tuple[Trained, Trained]:
    """Fit three epochs without interruption, and from the checkpoint of the second."""
    with as_by_torchrun(comm):
        return fitted(folder), fitted(folder / "resumed", folder / "epoch=1-step=6.ckpt")


def test_a_resumed_fit_ends_as_one_that_was_not_interrupted(run_on: Any, tmp_path: Path) -> None:
    ranks = run_on(2, interrupted, tmp_path)
    assert_not_interrupted(ranks, steps=3 * STEPS, saved=2 * STEPS)
    of_all_ranks = ranks[0][0].memory
    assert largest(of_all_ranks, 0) > 0
    assert largest(of_all_ranks, 1) > 0


def scaled(comm: Communicator, folder: Path) -> tuple[Trained, Trained]:
    """Do the same with a scaler whose scale is too large at first."""
    from lightning.pytorch.plugins import MixedPrecision

    def plugin() -> Any:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=2)
        return MixedPrecision("16-mixed", "cpu", scaler)

    with as_by_torchrun(comm):
        through = fitted(folder, plugins=plugin())
        checkpoint = folder / "epoch=1-step=6.ckpt"
        return through, fitted(folder / "resumed", checkpoint, plugins=plugin())


def test_the_scaler_is_found(run_on: Any, tmp_path: Path) -> None:
    ranks = run_on(2, scaled, tmp_path)
    assert_not_interrupted(ranks, steps=3 * STEPS, saved=2 * STEPS)
    assert ranks[0][0].stats.void_steps > 0
    assert 0 < largest(ranks[0][0].memory, 1) < 1  # memory of gradients that are not scaled


def sharded(comm: Communicator, folder: Path) -> tuple[Trained, Trained]:
    """Do the same with replicas that FSDP2 shards, over one rank each, from different seeds."""
    from sparcel.integrations.lightning import HybridShardStrategy

    def hybrid() -> Any:
        return {"strategy": HybridShardStrategy(replicas=2, shards=1), "seed": comm.rank}

    with as_by_torchrun(comm):
        through = fitted(folder, **hybrid())
        resumed = fitted(folder / "resumed", folder / "epoch=1-step=6.ckpt", **hybrid())
        outside = module(sharded=True)
        outside.scale = nn.Parameter(torch.ones(1))
        for callbacks, model, told in (
            ([], module(sharded=True), r"pass callbacks=\[Sparcel\(\)\]"),
            ([exchange()], outside, "'scale' is outside of it"),
        ):
            refused = trainer(folder, callbacks, devices=2, strategy=hybrid()["strategy"])
            with pytest.raises(InputError, match=told):
                refused.fit(model, batches())
    for training in (through, resumed):
        training.memory = {key: local(part) for key, part in training.memory.items()}
    return through, resumed


def test_replicas_of_sharded_models_are_averaged(run_on: Any, tmp_path: Path) -> None:
    ranks = run_on(2, sharded, tmp_path)
    assert_not_interrupted(ranks, steps=3 * STEPS, saved=2 * STEPS)
    first, second = (largest(through.memory, rank) for rank, (through, _) in enumerate(ranks))
    assert 0 < first != second > 0  # each had batches of its own


class BrokenError(Exception):
    """What ends a fit."""


def lives(comm: Communicator, folder: Path) -> dict[str, Any]:
    """Break, fit, save, test with a checkpoint, and fit again, by one Trainer."""
    from lightning.pytorch import Callback

    class Break(Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            raise BrokenError

    callback, broken, model = exchange(), Break(), module()
    with as_by_torchrun(comm):
        life = trainer(folder, [callback, broken], **DDP, max_epochs=1)
        with pytest.raises(BrokenError):
            life.fit(model, batches())
        handles = [callback.handle]
        life.callbacks.remove(broken)
        model = module()
        life.fit(model, batches())
        handles.append(callback.handle)
        life.save_checkpoint(folder / "after.ckpt")
        files = (folder / "epoch=0-step=3.ckpt", folder / "after.ckpt")
        saved = [torch.load(file, weights_only=True)["callbacks"]["sparcel"] for file in files]
        life.test(model, batches(), ckpt_path="best", verbose=False)
        life.fit_loop.max_epochs = 2
        life.fit(model, batches())
        handles.append(callback.handle)
    return {
        "saved": saved,
        "closed": [handle.closed for handle in handles],
        "steps": [handle.stats().training_steps for handle in handles],
        "weight": model.layers[0].weight.detach(),
    }


def test_a_trainer_fits_tests_and_fits_again(run_on: Any, tmp_path: Path) -> None:
    first, second = run_on(2, lives, tmp_path)
    assert first["closed"] == second["closed"] == [True, True, True]
    assert first["steps"][1:] == second["steps"][1:] == [STEPS, STEPS]  # each began with nothing
    during, after = first["saved"]
    assert largest(during, 1) > 0
    assert during.keys() == after.keys()
    assert all(torch.equal(part, after[key]) for key, part in during.items())
    assert torch.equal(first["weight"], second["weight"])


def told(comm: Communicator, folder: Path) -> tuple[list[str], list[str], Trained, list[Tensor]]:
    """Resume from a checkpoint without memory; then fit in this process alone, and without us."""
    mine, callback = folder / str(comm.rank), exchange()
    with as_by_torchrun(comm):
        trainer(folder, [], **DDP, max_epochs=1).fit(module(), batches())
        trainer(folder / "other", [callback], **DDP, max_epochs=1).fit(module(), batches())
        resumed = trainer(folder / "resumed", [callback], **DDP)
        with pytest.warns(SparcelWarning) as without:
            resumed.fit(module(), batches(), ckpt_path=folder / "epoch=0-step=3.ckpt")
    with pytest.warns(SparcelWarning) as alone:
        left = fitted(mine, strategy="auto", devices=1)
    torch.manual_seed(3)
    plain = module()
    trainer(mine / "plain", [], devices=1).fit(plain, batches())
    return said(without), said(alone), left, [p.detach() for p in plain.parameters()]


def test_what_is_missing_is_told(run_on: Any, tmp_path: Path) -> None:
    for without, alone, left, plain in run_on(2, told, tmp_path):
        (only,) = without
        assert only.endswith("epoch=0-step=3.ckpt holds no memory of sparcel, which starts empty")
        (only,) = alone
        assert only.startswith("there is one copy of the model")
        assert left.stats is None
        assert left.memory == {}
        assert all(map(torch.equal, left.parameters, plain))
