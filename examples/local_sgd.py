"""Local SGD: every rank trains alone for some steps, then the ranks average their changes.

torchrun --standalone --nproc-per-node 2 examples/local_sgd.py
"""

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

import sparcel
from sparcel.training import Averager

ROUNDS, LOCAL_STEPS = 10, 10

dist.init_process_group("gloo")
torch.manual_seed(0)  # all ranks start from the same parameters
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
shared = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
averager = Averager(shared, sparcel.scheme("topk", density=0.1))
generator = torch.Generator().manual_seed(dist.get_rank())  # every rank has its own data


def batch(size):
    """Return inputs, and whether their first half has the larger sum."""
    x = torch.randn(size, 64, generator=generator)
    return x, (x[:, :32].sum(1) > x[:, 32:].sum(1)).long()


for _ in range(ROUNDS):
    for _ in range(LOCAL_STEPS):
        x, y = batch(64)
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    with torch.no_grad():
        changes = {name: p - shared[name] for name, p in model.named_parameters()}
        updates = averager.average(changes)
        for name, parameter in model.named_parameters():
            shared[name] += updates[name]
            parameter.copy_(shared[name])

weights = sum(p.double().sum() for p in shared.values()).item()
x, y = batch(1000)
accuracy = (model(x).argmax(1) == y).double().mean().item()
print(
    f"accuracy {accuracy:.2f}, weights {weights!r}, {averager.handle.stats().bytes_sent} bytes sent"
)
averager.handle.close()
dist.destroy_process_group()
