"""Without Triton, sparcel imports and works: the definitions take the place of kernels for GPUs."""

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys
sys.modules["triton"] = None  # as if it were not installed: imports fail, and find_spec says None

import torch
import sparcel
from sparcel.core import device, kernels
from tests import card

x = torch.linspace(-1, 2, 40)
expected = sparcel.topk(x, 5)
assert expected.indices.tolist() == [35, 36, 37, 38, 39]

if torch.cuda.is_available():
    def put(tensor): return tensor.cuda()
    def got(tensor): return tensor.cpu()
else:
    card._register()
    card.check = lambda *_: None  # definitions may wait for a GPU
    device.GPUS.add(card.CARD)
    device._pinned, device._copied = card._unpinned, card._read
    put, got = card.moved, card.seen

def steps(comm, far):
    scheme = sparcel.scheme("topk", density=0.2, format="packed:4")
    gradients = [(x + comm.rank + step).sin() for step in range(2)]
    return [got(scheme.step(put(one) if far else one, comm)).clone() for one in gradients]

indices, values = kernels.topk(put(x), 5)
assert torch.equal(got(indices), expected.indices)
assert torch.equal(got(values), expected.values)
here, there = (sparcel.simulate(2, lambda comm: steps(comm, far)).results for far in (False, True))
for mine, theirs in zip(here, there):
    assert all(map(torch.equal, mine, theirs))
assert "sparcel.core.kernels.gpu" not in sys.modules
"""


def test_definitions_are_used_without_triton() -> None:
    root = Path(__file__).parents[2]
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=root, capture_output=True, text=True, check=False
    )
    assert not ran.returncode, ran.stderr
