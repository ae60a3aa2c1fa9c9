"""Train with Lightning: a callback attaches sparcel, logs what it costs, and keeps its memory.

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

import sparcel


class Sparcel(lightning.Callback):
    """Attaches a scheme to the model, and keeps its memory in Lightning's checkpoints."""

    def __init__(self, scheme, **settings):
        self.scheme, self.settings = scheme, settings
        self.handle, self.loaded = None, None

    def on_fit_start(self, trainer, pl_module):  # the model is wrapped in DDP now
        self.handle = sparcel.attach(trainer.strategy.model, self.scheme, **self.settings)
        if self.loaded is not None:
            self.handle.load_state_dict(self.loaded)

    def on_train_batch_end(self, trainer, pl_module, *batch):
        pl_module.log_dict(self.handle.stats().as_dict())  # the compression ratio among others

    def state_dict(self):  # all ranks call; rank 0 saves
        return self.handle.full_state_dict() if self.handle else {}

    def load_state_dict(self, state):  # all ranks call, before the model is wrapped in DDP
        self.loaded = state


class Classifier(lightning.LightningModule):
    """Tells whether the first half of its input has the larger sum."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2)
        )

    def training_step(self, batch):
        x, y = batch
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
exchange.handle.close()
