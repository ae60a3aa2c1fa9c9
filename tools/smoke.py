"""Use an installed sparcel as its users do, in seconds: python tools/smoke.py."""

import platform
import subprocess
import sys
import sysconfig
import tempfile
from importlib.metadata import version
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import sparcel


def command() -> None:
    script = Path(sysconfig.get_path("scripts"), "sparcel")
    for option, expected in [("--help", "Usage: sparcel"), ("--version", version("sparcel"))]:
        shown = subprocess.run([script, option], capture_output=True, text=True, check=True).stdout
        assert expected in shown, shown


def all_reduce(comm: sparcel.comm.Communicator) -> list[float]:
    stream = sparcel.topk(torch.tensor([1.0, -3.0, 2.0, 0.0]), 2)
    return sparcel.all_reduce(stream, group=comm).to_dense().tolist()


def train(rank: int, folder: str) -> None:
    """Do a step on one of two ranks, whose parameters and data differ before it."""
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    torch.manual_seed(rank)
    model = DistributedDataParallel(torch.nn.Linear(1024, 256))
    before = model.module.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = sparcel.attach(model, "oktopk", density=0.1, frontload=False, optimizer=optimizer)
    model(torch.randn(8, 1024)).square().mean().backward()
    optimizer.step()

    weights = [torch.empty_like(before) for _ in range(2)]
    dist.all_gather(weights, model.module.weight.detach())
    assert torch.equal(*weights)
    changed = (weights[0] != before).sum().item()
    assert 0 < changed < before.numel() / 4, changed
    handle.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    assert sparcel.__version__ == version("sparcel")
    assert Path(sparcel.__file__).is_relative_to(sys.prefix), f"{sparcel.__file__} is no wheel's"
    command()
    total = [0.0, -12.0, 8.0, 0.0]
    assert sparcel.simulate(4, all_reduce).results == [total] * 4
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(train, args=(folder,), nprocs=2)
    print(
        f"sparcel {sparcel.__version__} works on {platform.python_implementation()} "
        f"{platform.python_version()} with torch {torch.__version__}"
    )
