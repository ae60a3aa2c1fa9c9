"""Train with Lightning: a callback attaches sparcel and keeps its memory; the model logs its cost.

torchrun --standalone --nproc-per-node 2 examples/lightning_training.py checkpoints

A second argument resumes: ``... checkpoints checkpoints/epoch=1-step=20.ckpt``.
"""

import sys

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from sparcel.integrations.lightning import Sparcel


class Classifier(lightning.LightningModule):
    """Tells whether the first half of its input has the larger sum."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2)
        )

    def training_step(self, batch):
        x, y = batch
        self.log_dict(exchange.handle.stats().as_dict())  # the compression ratio among others
        return cross_entropy(self.layers(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.5)


lightning.seed_everything(0)
x = torch.randn(1280, 64)
data = TensorDataset(x, (x[:, :32].sum(1) > x[:, 32:].sum(1)).long())
model, exchange = Classifier(), Sparcel("topk", density=0.05)
trainer = lightning.Trainer(
    max_epochs=4,
    accelerator="cpu",
    devices=2,
    strategy=DDPStrategy(process_group_backend="gloo"),
    callbacks=[exchange, ModelCheckpoint(sys.argv[1], save_top_k=-1)],
    enable_progress_bar=False,
    logger=CSVLogger(sys.argv[1]),
    log_every_n_steps=5,
)
trainer.fit(
    model, DataLoader(data, batch_size=64), ckpt_path=sys.argv[2] if len(sys.argv) > 2 else None
)

weights = sum(p.double().sum() for p in model.parameters()).item()
accuracy = (model.layers(x).argmax(1) == data.tensors[1]).double().mean().item()
stats = exchange.handle.stats()
print(f"accuracy {accuracy:.2f}, weights {weights!r}, {stats.bytes_sent} bytes sent")
