"""Train with torch.func: the gradients are a dict of tensors, and so are the updates.

torchrun --standalone --nproc-per-node 2 examples/functional_training.py
"""

import torch
import torch.distributed as dist
from torch.func import functional_call, grad
from torch.nn.functional import cross_entropy

import sparcel
from sparcel.training import Averager

dist.init_process_group("gloo")
torch.manual_seed(0)  # all ranks start from the same parameters
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
averager = Averager(parameters, sparcel.scheme("topk", density=0.05))
generator = torch.Generator().manual_seed(dist.get_rank())  # every rank has its own data


def batch(size):
    """Return inputs, and whether their first half has the larger sum."""
    x = torch.randn(size, 64, generator=generator)
    return x, (x[:, :32].sum(1) > x[:, 32:].sum(1)).long()


def loss(parameters, x, y):
    return cross_entropy(functional_call(model, parameters, (x,)), y)


for _ in range(100):
    updates = averager.average(grad(loss)(parameters, *batch(64)))
    parameters = {name: p - 0.5 * updates[name] for name, p in parameters.items()}

weights = sum(p.double().sum() for p in parameters.values()).item()
x, y = batch(1000)
accuracy = (functional_call(model, parameters, (x,)).argmax(1) == y).double().mean().item()
print(
    f"accuracy {accuracy:.2f}, weights {weights!r}, {averager.handle.stats().bytes_sent} bytes sent"
)
averager.handle.close()
dist.destroy_process_group()
