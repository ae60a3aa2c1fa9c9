"""Train a small language model on Python's standard library by one method after the other."""

import argparse
import hashlib
import sysconfig
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import sparcel
from sparcel.lab import link_bytes

CONTEXT, BATCH = 16, 64
METHODS = ["dense", "bf16", "powersgd", "sparcel"]

parser = argparse.ArgumentParser()
parser.add_argument("--methods", nargs="+", choices=METHODS, default=["sparcel"])
parser.add_argument("--seeds", nargs="+", type=int, default=[0])
parser.add_argument("--steps", type=int, default=320)
parser.add_argument("--save", help="file for a checkpoint at the end, without PowerSGD's memory")
parser.add_argument("--resume", help="checkpoint to go on from")
args = parser.parse_args()
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()


def samples(files):
    """Return every sequence of CONTEXT + 1 bytes in the files."""
    text = bytearray(b"".join(file.read_bytes() for file in files))
    return torch.frombuffer(text, dtype=torch.uint8).unfold(0, CONTEXT + 1, 1)


def predict(model, batch):
    """Return the model's scores for the last byte of each sample, and that byte."""
    batch = batch.long()
    return model(batch[:, :CONTEXT]), batch[:, CONTEXT]


files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
held_out = samples(files[::10])[::50]
training = samples(file for place, file in enumerate(files) if place % 10)


def train(method, seed):
    """Train a fresh model, or the one to resume, and print what it took and where it ended."""
    torch.manual_seed(seed)
    embedding, hidden = nn.Embedding(256, 32), nn.Linear(32 * CONTEXT, 256)
    module = nn.Sequential(embedding, nn.Flatten(), hidden, nn.ReLU(), nn.Linear(256, 256))
    model = DistributedDataParallel(module)
    optimizer = torch.optim.Adam(model.parameters(), lr=6e-3)

    handle = None
    if method == "sparcel":
        handle = sparcel.attach(model, optimizer=optimizer, density=0.1, format="packed:4")
    elif method == "bf16":  # on Gloo, DDP refuses the hook itself by its name
        model.register_comm_hook(None, lambda group, bucket: bf16_compress_hook(group, bucket))
    elif method == "powersgd":  # of rank 4, after 10 dense steps
        model.register_comm_hook(PowerSGDState(None, 4, start_powerSGD_iter=10), powerSGD_hook)

    first = 0
    if args.resume:
        state = torch.load(args.resume)
        module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["steps"]
        if handle:
            handle.load_state_dict(state["sparcel"])

    seconds, links = [], []
    for step in range(first, args.steps):
        start = perf_counter()
        # All ranks draw the samples of all, and each takes its own.
        draw = torch.Generator().manual_seed(1000 * seed + step)
        rows = torch.randint(len(training), (ranks, BATCH), generator=draw)[rank]
        cross_entropy(*predict(model, training[rows])).backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(perf_counter() - start)
        links.append(link_bytes())

    if args.save:
        memory = handle.full_state_dict() if handle else None  # all ranks call
        if rank == 0:
            state = {"model": module.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state | {"steps": args.steps, "sparcel": memory}, args.save)

    with torch.no_grad():
        scores, targets = predict(module, held_out)
    if rank == 0:
        accuracy = (scores.argmax(1) == targets).float().mean()
        weights = b"".join(p.detach().numpy().tobytes() for p in module.parameters())
        print(f"{method}, seed {seed}")
        print(f"  {sum(seconds):.1f} s, at the end {1e3 * median(seconds[-50:]):.1f} ms a step")
        if links[-1]:
            sent = (links[-1].sent - links[-51].sent) / 50
            print(f"  at the end {sent / 1e3:.0f} kB a step on the link")
        print(f"  held-out loss {cross_entropy(scores, targets).item()}, accuracy {accuracy:.1%}")
        print(f"  SHA-256 of the weights: {hashlib.sha256(weights).hexdigest()[:16]}", flush=True)
    if handle:
        if rank == 0:
            print(f"  {handle}")
        handle.close()


for method in args.methods:
    for seed in args.seeds:
        train(method, seed)
dist.destroy_process_group()
