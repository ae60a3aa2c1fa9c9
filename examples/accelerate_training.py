"""Train with Accelerate: its checkpoints hold sparcel's memory, as a registered object.

torchrun --standalone --nproc-per-node 2 examples/accelerate_training.py checkpoints

A second argument resumes: ``... checkpoints checkpoints/1``.
"""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import sparcel
from sparcel.integrations import FullState

EPOCHS = 4

accelerator = Accelerator(cpu=True)
set_seed(0)
x = torch.randn(1280, 64)
y = (x[:, :32].sum(1) > x[:, 32:].sum(1)).long()
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
loader = DataLoader(TensorDataset(x, y), batch_size=64)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
handle = sparcel.attach(model, "topk", density=0.05, optimizer=optimizer, scaler=accelerator.scaler)
accelerator.register_for_checkpointing(FullState(handle))

first = 0
if len(sys.argv) > 2:
    accelerator.load_state(sys.argv[2])
    first = int(Path(sys.argv[2]).name) + 1
for epoch in range(first, EPOCHS):
    for batch, labels in loader:
        optimizer.zero_grad()
        accelerator.backward(cross_entropy(model(batch), labels))
        optimizer.step()
    accelerator.save_state(str(Path(sys.argv[1], str(epoch))))
    ratio = handle.stats().compression
    accelerator.print(f"epoch {epoch}: {ratio:.1f} times fewer bytes than a dense exchange")

weights = sum(p.double().sum() for p in model.parameters()).item()
accuracy = (model(x).argmax(1) == y).double().mean().item()
print(f"accuracy {accuracy:.2f}, weights {weights!r}, {handle.stats().bytes_sent} bytes sent")
handle.close()
accelerator.end_training()
